"""Tasks: prompts that repeat by seed and never cross splits, scores, and the errors of bad data and bad rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from lora_harness.config import TaskSection
from lora_harness.tasks import Example, Task, build_task
from lora_harness.tasks import reasoning_gym as gym_module
from lora_harness.tasks.base import LazyExamples
from lora_plugins_sdk.errors import LoraError


def make(**options: Any) -> Task:
    return build_task(TypeAdapter(TaskSection).validate_python(options))


def gym(dataset: str = "chain_sum", **options: Any) -> Task:
    return make(kind="reasoning_gym", dataset=dataset, **options)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [{"prompt": f"say {n}", "answer": n, "id": n} for n in range(20)])


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    path = tmp_path / f"user_{abs(hash(str(tmp_path)))}.py"
    path.write_text(
        "from lora_harness.tasks import Example\n"
        "def prompts(split, count, seed, start=0):\n"
        "    first = start + (10_000 if split == 'eval' else 0)\n"
        "    return [{'prompt': f'{first + i}', 'answer': i, 'hint': seed} for i in range(count)]\n"
        "def examples(split, count, seed): return [Example(prompt=f'{split} {i}') for i in range(count)]\n"
        "def leaky(split, count, seed): return [{'prompt': str(i)} for i in range(count)]\n"
        "def short(split, count, seed): return [{'prompt': 'x'}]\n"
        "def nothing(split, count, seed): return []\n"
        "def wrong(split, count, seed): return ['x'] * count\n"
        "def failing(split, count, seed): raise OSError('disk on fire')\n"
        "def reward(example, completion): return completion == example.answer\n"
        "def hint_reward(example, completion): return example.source['hint']\n"
        "def raising(example, completion): return 1 / len(completion)\n"
        "def nan(example, completion): return float('nan')\n"
        "def infinite(example, completion): return float('inf')\n"
        "def text(example, completion): return '1.0'\n"
        "def none(example, completion): pass\n"
    )
    return path


class TestReasoningGym:
    def test_prompts_repeat_and_a_larger_count_begins_with_a_smaller_one(self):
        first, again = gym().prompts("train", 12, 3), gym().prompts("train", 30, 3)
        assert [e.prompt for e in first] == [e.prompt for e in again[:12]]
        assert [e.prompt for e in first] != [e.prompt for e in gym().prompts("train", 12, 4)]

    def test_own_verifier_scores(self):
        task = gym()
        example = task.prompts("train", 1, 0)[0]
        assert task.score(example, f" {example.answer}\n") == 1.0
        assert task.score(example, "nonsense") == 0.0

    def test_splits_share_no_question_even_where_there_are_few(self):
        task = gym(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
        train = {example.prompt for example in task.prompts("train", 400, 0)}
        held_out = {example.prompt for example in task.prompts("eval", 40, 0)}
        assert train and held_out and not train & held_out

    def test_examples_beyond_one_data_set_object_follow_on(self, monkeypatch):
        whole = [example.prompt for example in gym().prompts("train", 40, 0)]
        monkeypatch.setattr(gym_module, "CHUNK", 7)
        assert [example.prompt for example in gym().prompts("train", 40, 0)] == whole

    def test_params_reach_the_generator(self):
        task = gym(params={"min_terms": 5, "max_terms": 5, "allow_negation": False})
        assert all(e.source["metadata"]["num_terms"] == 5 for e in task.prompts("train", 8, 0))

    def test_a_verifier_that_cannot_read_an_answer_gives_zero_and_says_so_once(self):
        task = gym("prime_factorization")
        example = task.prompts("train", 1, 0)[0]
        with pytest.warns(UserWarning, match="prime_factorization's verifier raised ValueError") as caught:
            assert [task.score(example, "no idea"), task.score(example, "none")] == [0.0, 0.0]
        assert len(caught) == 1

    def test_unknown_data_set_lists_close_names(self):
        with pytest.raises(LoraError, match=r"'chainsum'.*none of reasoning-gym's.*did you mean 'chain_sum'"):
            gym("chainsum")

    def test_unknown_option_lists_the_known_ones(self):
        with pytest.raises(LoraError, match=r"task\.params\.terms: is no option of chain_sum -> use one of min_terms"):
            gym(params={"terms": 2})

    def test_refused_value_says_why(self):
        with pytest.raises(LoraError, match="max_terms must be >= min_terms"):
            gym(params={"min_terms": 5, "max_terms": 2})

    def test_a_generator_without_questions_of_a_split_ends_in_an_error(self, monkeypatch):
        monkeypatch.setattr(gym_module, "split_of", lambda question: "train")
        with pytest.raises(LoraError, match="1000 in a row are not in the eval split"):
            list(gym().prompts("eval", 1, 0))

    def test_a_generator_that_fails_is_not_taken_for_a_short_one(self, monkeypatch):
        task = gym()

        class Exhausted:
            def __getitem__(self, index: int) -> dict[str, Any]:
                raise IndexError("exhausted")

        monkeypatch.setattr(task, "_create", lambda *, seed: Exhausted())
        with pytest.raises(LoraError, match="raised IndexError: exhausted"):
            list(task.prompts("train", 3, 0))


class TestJsonl:
    def test_every_row_is_in_one_split_and_orders_follow_the_seed(self, numbers):
        task = make(kind="jsonl", train_path=str(numbers), eval_fraction=0.25)
        train, held_out = task.prompts("train", 15, 0), task.prompts("eval", 5, 0)
        assert sorted(int(e.source["id"]) for e in [*train, *held_out]) == list(range(20))
        assert [e.prompt for e in train] == [e.prompt for e in task.prompts("train", 15, 0)]
        assert [e.prompt for e in train] != [e.prompt for e in task.prompts("train", 15, 1)]

    def test_each_pass_over_the_file_has_every_row_in_a_new_order(self, numbers):
        task = make(kind="jsonl", train_path=str(numbers), eval_fraction=0.5)
        order = [e.prompt for e in task.prompts("train", 20, 0)]
        assert sorted(order[:10]) == sorted(order[10:]) and order[:10] != order[10:]

    def test_equal_prompts_are_held_out_together(self, tmp_path):
        path = write_rows(tmp_path / "x.jsonl", [{"prompt": f"p{n % 4}", "answer": n} for n in range(16)])
        task = make(kind="jsonl", train_path=str(path), eval_fraction=0.25)
        assert {e.prompt for e in task.prompts("train", 12, 0)}.isdisjoint(e.prompt for e in task.prompts("eval", 4, 0))

    def test_eval_file_and_other_keys(self, tmp_path, numbers):
        path = write_rows(tmp_path / "eval.jsonl", [{"q": "held out", "a": "yes"}])
        train = write_rows(tmp_path / "train.jsonl", [{"q": "one", "a": 1.5}])
        task = make(
            kind="jsonl", train_path=str(train), eval_path=str(path), prompt_key="q", answer_key="a"
        )  # fmt: skip
        (example,) = task.prompts("eval", 1, 0)
        assert (example.prompt, task.score(example, " yes "), task.score(example, "yes!")) == ("held out", 1.0, 0.0)
        assert task.prompts("train", 1, 0)[0].answer == "1.5"

    @pytest.mark.parametrize(
        ("answer", "completion", "reward"),
        [
            ("1/2", "so it is 0.5", 1.0),
            ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", 1.0),
            ("x + 1", "thus $1 + x$", 1.0),
            ("x + 1", "thus 1", 0.0),
            ("$x + 1$", "\\boxed{1 + x}", 1.0),
            ("1,000", "1000 of them", 1.0),
            ("7", "8", 0.0),
            ("7", "no number", 0.0),
            ("7", "", 0.0),
        ],
    )
    def test_math_verify(self, tmp_path, answer, completion, reward):
        rows = [{"prompt": f"p{n}", "answer": answer} for n in range(2)]
        task = make(kind="jsonl", train_path=str(write_rows(tmp_path / "m.jsonl", rows)), scorer="math_verify")
        assert task.score(task.prompts("train", 1, 0)[0], completion) == reward

    def test_an_answer_that_is_no_mathematics(self, tmp_path):
        rows = [{"prompt": f"p{n}", "answer": "?!"} for n in range(2)]
        task = make(kind="jsonl", train_path=str(write_rows(tmp_path / "m.jsonl", rows)), scorer="math_verify")
        with pytest.raises(LoraError, match=r"math_verify: raised ValueError: .*no mathematics in the answer '\?!'"):
            task.score(task.prompts("train", 1, 0)[0], "3")

    def test_reward_function_sees_the_row_and_needs_no_answer(self, tmp_path, user_module):
        path = write_rows(tmp_path / "x.jsonl", [{"prompt": f"p{n}", "hint": 0.25} for n in range(4)])
        task = make(kind="jsonl", train_path=str(path), scorer=f"{user_module.stem}:hint_reward")
        example = task.prompts("train", 1, 0)[0]
        assert example.answer is None and task.score(example, "x") == 0.25

    def test_only_the_tagged_answer_is_scored(self, numbers):
        task = make(kind="jsonl", train_path=str(numbers), answer_tag="answer")
        example = Example(prompt="p", answer="42")
        assert task.score(example, "<answer>1</answer> no: <answer> 42\n</answer>.") == 1.0
        assert task.score(example, "42") == 0.0

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([], "has no rows"),
            (["", "  "], "has no rows"),
            ([{"prompt": "a", "answer": 1}, "{oops"], r"line 2: is not JSON"),
            ([[1]], "line 1: is not an object"),
            ([{"prompt": "a", "answer": 1}, {"text": "b"}], r"line 2: has no key 'prompt' \(it has text\)"),
            ([{"prompt": "a"}], "line 1: has no key 'answer'.*task.answer_key"),
            ([{"prompt": None, "answer": 1}], "line 1: 'prompt' is None, not a text or number"),
            ([{"prompt": "", "answer": 1}], "line 1: 'prompt' is ''"),
            ([{"prompt": "same", "answer": 1}] * 3, "has only one prompt"),
        ],
    )  # fmt: skip
    def test_bad_files(self, tmp_path, rows, said):
        with pytest.raises(LoraError, match=f"(?s){said}"):
            make(kind="jsonl", train_path=str(write_rows(tmp_path / "bad.jsonl", rows)))

    def test_missing_file(self, tmp_path):
        with pytest.raises(LoraError, match=r"task\.train_path.*cannot be read"):
            make(kind="jsonl", train_path=str(tmp_path / "absent.jsonl"))

    def test_too_few_held_out_rows(self, numbers):
        said = r"eval\.count = 64: there are only 2 held-out rows -> set eval\.count to 2 or less, or "
        with pytest.raises(LoraError, match=said + r"raise task\.eval_fraction = 0\.1, or give task\.eval_path"):
            make(kind="jsonl", train_path=str(numbers)).prompts("eval", 64, 0)

    def test_too_few_rows_in_a_held_out_file(self, tmp_path, numbers):
        path = write_rows(tmp_path / "eval.jsonl", [{"prompt": "say 99", "answer": 99}])
        task = make(kind="jsonl", train_path=str(numbers), eval_path=str(path))
        with pytest.raises(LoraError, match=r"set eval\.count to 1 or less, or add rows to task\.eval_path"):
            task.prompts("eval", 2, 0)

    def test_files_that_share_a_prompt(self, tmp_path, numbers):
        path = write_rows(tmp_path / "eval.jsonl", [{"prompt": "say 3", "answer": 3}])
        with pytest.raises(LoraError, match=r"shares prompts with task\.train_path, e\.g\. 'say 3'"):
            make(kind="jsonl", train_path=str(numbers), eval_path=str(path))


class TestFunction:
    def test_prompts_and_reward(self, user_module):
        name = user_module.stem
        task = make(kind="function", prompts=f"{name}:prompts", reward=f"{name}:reward", params={"start": 7})
        example = task.prompts("train", 3, 5)[2]
        assert example == Example(prompt="9", answer="2", source={"prompt": "9", "answer": 2, "hint": 5})
        assert (task.score(example, "2"), task.score(example, "3")) == (1.0, 0.0)
        assert [e.prompt for e in task.prompts("eval", 1, 0)] == ["10007"]

    def test_examples_are_taken_as_they_are(self, user_module):
        task = make(kind="function", prompts=f"{user_module.stem}:examples", reward=f"{user_module.stem}:reward")
        assert task.prompts("train", 1, 0) == [Example(prompt="train 0")]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("short", "returned 1 prompts of the train split instead of 2"),
            ("nothing", "returned 0 prompts"),
            ("wrong", "returned 'x' -> return mappings"),
            ("failing", "raised OSError: disk on fire for split 'train'"),
        ],
    )
    def test_bad_prompts_functions(self, user_module, name, said):
        task = make(kind="function", prompts=f"{user_module.stem}:{name}", reward=f"{user_module.stem}:reward")
        with pytest.raises(LoraError, match=said):
            task.prompts("train", 2, 0)

    def test_splits_that_share_prompts(self, user_module):
        task = make(kind="function", prompts=f"{user_module.stem}:leaky", reward=f"{user_module.stem}:reward")
        task.prompts("train", 2, 0)
        with pytest.raises(LoraError, match=r"prompts of the eval split that it also gave for train, e\.g\. '0'"):
            task.prompts("eval", 2, 0)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("raising", "raised ZeroDivisionError: division by zero"),
            ("nan", "returned nan"),
            ("infinite", "returned inf"),
            ("text", "returned '1.0'"),
            ("none", "returned None"),
        ],
    )
    def test_bad_rewards_name_the_function_the_example_and_the_cure(self, user_module, name, said):
        task = make(kind="function", prompts=f"{user_module.stem}:prompts", reward=f"{user_module.stem}:{name}")
        with pytest.raises(LoraError) as caught:
            task.score(task.prompts("train", 1, 0)[0], "")
        message = str(caught.value)
        assert f"{user_module.stem}:{name}" in message and said in message
        assert "for the prompt '0' and the completion ''" in message and "-> make it return a" in message

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            (
                "no_such_module_here:f",
                r"task\.prompts = .*importing no_such_module_here failed with ModuleNotFoundError",
            ),
            ("json:lods", r"has no function 'lods' -> did you mean 'loads'\?"),
            ("json:zzz", "define zzz there"),
        ],
    )
    def test_paths_that_lead_nowhere(self, path, said):
        with pytest.raises(LoraError, match=said):
            make(kind="function", prompts=path, reward="json:loads")


def test_lazy_examples_are_made_when_read_and_kept():
    made: list[int] = []

    def examples():
        for n in range(100):
            made.append(n)
            yield Example(prompt=str(n))

    lazy = LazyExamples(10, examples())
    assert len(lazy) == 10 and made == []
    assert [e.prompt for e in lazy[2:4]] == ["2", "3"] and len(made) == 4
    assert lazy[-1].prompt == "9" and lazy[0].prompt == "0" and len(made) == 10
    assert lazy[4:4] == [] and len(list(lazy)) == 10
    with pytest.raises(IndexError):
        lazy[10]
