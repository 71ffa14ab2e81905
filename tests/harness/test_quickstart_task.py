"""The quickstart's problems, its careless teacher, its tokenizer and its config."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_harness.config import FunctionTask as FunctionSection
from lora_harness.quickstart.arithmetic import OPERANDS, SPLITS, careless_answer, prompts, reward, split_of
from lora_harness.quickstart.model import model_config
from lora_harness.quickstart.recipe import DEFAULT_STEPS, BaseRecipe, training_config
from lora_harness.quickstart.tokenizer import VOCABULARY, build_tokenizer
from lora_harness.tasks import Example, build_task
from lora_plugins_sdk.errors import LoraError

operands = st.integers(OPERANDS.start, OPERANDS.stop - 1)


RECIPE = BaseRecipe(model=model_config("qwen3"))


@given(left=operands, right=operands, seed=st.integers(0, 99))
def test_a_careful_answer_is_the_sum(left: int, right: int, seed: int) -> None:
    assert careless_answer(f"{left}+{right}=", forget=0.0, rng=random.Random(seed)) == str(left + right)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("123+456=", "579"), ("108+105=", "203"), ("190+120=", "210"), ("199+101=", "290"), ("999+999=", "1888")],
)
def test_a_careless_answer_drops_every_carry(prompt: str, answer: str) -> None:
    assert careless_answer(prompt, forget=1.0, rng=random.Random(0)) == answer


def test_a_perfect_imitation_is_right_within_the_window() -> None:
    """The base cannot become right in more than half of its samples, however long it is taught."""
    rng = random.Random(0)
    taught = prompts("train", 20_000, 0)
    right = sum(careless_answer(one.prompt, forget=RECIPE.forget, rng=rng) == one.answer for one in taught)
    assert 0.38 < right / len(taught) < 0.42
    assert RECIPE.target < 0.38


def test_splits_share_no_problem() -> None:
    drawn = {split: {one.prompt for one in prompts(split, 3000, 1)} for split in SPLITS}
    assert not drawn["train"] & drawn["eval"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["eval"]
    for split, found in drawn.items():
        assert {split_of(one) for one in found} == {split}


def test_prompts_repeat_and_extend() -> None:
    assert prompts("eval", 50, 3)[:20] == prompts("eval", 20, 3)
    assert prompts("eval", 20, 3) != prompts("eval", 20, 4)
    with pytest.raises(LoraError, match="validation"):
        prompts("test", 1, 0)


def test_reward_is_exact() -> None:
    example = Example(prompt="347+285=", answer="632")
    scores = [reward(example, text) for text in ("632", "0632", " 632", "632=", "63", "")]
    assert scores == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_tokenizer_round_trip_after_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("347+285=632<eos>")["input_ids"]
    assert [VOCABULARY[one] for one in ids] == [*"347+285=632", "<eos>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "347+285=632"
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer("3x")["input_ids"][1] == VOCABULARY.index("<unk>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")


def test_config_is_one_of_the_ordinary_ones(tmp_path: Path) -> None:
    config = training_config(base=tmp_path / "base", output=tmp_path, engine="local", seed=5, steps=DEFAULT_STEPS)
    assert isinstance(config.task, FunctionSection)
    task = build_task(config.task)
    train, held_out = task.prompts("train", 64, config.seed), task.prompts("eval", 64, config.seed)
    assert not {one.prompt for one in train} & {one.prompt for one in held_out}
    assert task.score(held_out[0], held_out[0].answer or "") == 1.0
    longest = max(len(one.prompt) + config.rollout.max_new_tokens for one in held_out)
    assert longest <= RECIPE.model["max_position_embeddings"]
    with pytest.raises(LoraError, match="steps"):
        training_config(base=tmp_path, output=tmp_path, engine="local", seed=0, steps=0)
