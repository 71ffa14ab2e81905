"""The local engine against transformers and PEFT used plainly."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_cases import (
    CONTEXT,
    VOCAB,
    adapter_config,
    adapter_tensors,
    mixed_requests,
    request,
    save_model,
    teacher_forced,
)
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from lora_harness.engines import GenerationRequest, RolloutEngine, SamplingParams, check_engine_name
from lora_harness.engines.local import LocalEngine
from lora_harness.engines.sampling import draw_tokens, request_uniforms
from lora_plugins_sdk.errors import LoraError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_logprobs_equal_teacher_forcing(model_dir: Path, with_adapter: bool) -> None:
    engine = LocalEngine(model_dir, max_batch_size=7)
    reference: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    if with_adapter:
        config = adapter_config()
        tensors = adapter_tensors(model_dir, config)
        received = engine.publish(4, tensors, config)
        assert received == sum(t.numel() * 4 for t in tensors.values())
        # Folded by hand: PEFT's own forward is what the engine runs.
        for name, a in tensors.items():
            if ".lora_A." in name:
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                weight = reference.get_parameter(name.removeprefix("base_model.model.").replace("lora_A.", ""))
                weight.data += 6 / 3 * b @ a
    asked = mixed_requests()
    done = engine.generate(asked)
    for one, completion in zip(asked, done, strict=True):
        want = teacher_forced(reference, one, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), want, rtol=0, atol=1e-5)
        assert completion.adapter_version == (4 if with_adapter else 0)


def test_completion_does_not_depend_on_the_batch(model_dir: Path) -> None:
    asked = mixed_requests()
    together = LocalEngine(model_dir).generate(asked)
    engine = LocalEngine(model_dir, max_batch_size=3)
    alone = [engine.generate([one])[0] for one in asked]
    reversed_batches = engine.generate(asked[::-1])[::-1]
    for a, b, c in zip(together, alone, reversed_batches, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.finish_reason == b.finish_reason == c.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    other_seeds = [
        GenerationRequest(prompt_ids=one.prompt_ids, sampling=one.sampling, seed=one.seed + 2**40) for one in asked
    ]
    assert [one.token_ids for one in engine.generate(other_seeds)] != [one.token_ids for one in alone]


@pytest.mark.parametrize("with_adapter", [False, True])
def test_decoding_uses_nothing_that_transformers_deprecates(model_dir: Path, with_adapter: bool) -> None:
    engine = LocalEngine(model_dir)
    if with_adapter:
        config = adapter_config()
        engine.publish(1, adapter_tensors(model_dir, config), config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(engine.generate(mixed_requests())) == len(mixed_requests())


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_goes_under_the_name_that_the_model_has_for_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """transformers 5.19 and 5.23 have one name, 5.24 another; a model of one's own may have either with any of them."""
    asked = mixed_requests()
    expected = LocalEngine(model_dir).generate(asked)
    given: list[Any] = []
    own = Qwen3ForCausalLM.forward
    theirs = next(one for one in ("cache", "past_key_values") if one in inspect.signature(own).parameters)

    def new(self: Any, *, cache: Any, **others: Any) -> Any:
        given.append(cache)
        return own(self, **{theirs: cache}, **others)

    def old(self: Any, *, past_key_values: Any, **others: Any) -> Any:
        return new(self, cache=past_key_values, **others)

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", new if name == "cache" else old)
    assert LocalEngine(model_dir).generate(asked) == expected
    assert given and all(one is not None for one in given)


def test_stop_and_length(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    asked = mixed_requests()
    done = engine.generate(asked)
    assert {one.finish_reason for one in done} == {"stop", "length"}
    for one, completion in zip(asked, done, strict=True):
        stops = one.sampling.stop_token_ids
        assert not stops & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == len(completion.logprobs)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == one.sampling.max_new_tokens


def test_greedy_is_the_argmax_and_ignores_the_seed(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    reference: Any = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    first = request(9, seed=1, temperature=0)
    second = GenerationRequest(prompt_ids=first.prompt_ids, sampling=first.sampling, seed=2)
    a, b = engine.generate([first, second])
    ids = torch.tensor([*first.prompt_ids, *a.token_ids])
    logits = reference(input_ids=ids[None]).logits[0, 8:-1]
    assert a.token_ids == b.token_ids == tuple(logits.argmax(-1).tolist())
    want = torch.log_softmax(logits, -1).max(-1).values
    torch.testing.assert_close(torch.tensor(a.logprobs), want.detach(), rtol=0, atol=1e-5)


def test_sampled_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.3, -1.0, 1.1, -40.0, 0.0])
    count = 20_000
    uniforms = torch.from_numpy(request_uniforms(7, count))
    temperatures = torch.full((count,), 0.8, dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits.expand(count, -1), temperatures, uniforms)
    want = torch.softmax(logits.double() / 0.8, 0)
    share = torch.bincount(tokens, minlength=5).double() / count
    # 5 standard deviations of a share.
    assert bool(((share - want).abs() <= 5 * (want * (1 - want) / count).sqrt() + 1e-12).all())
    torch.testing.assert_close(logprobs, want.log()[tokens])


def test_uniforms_depend_on_seed_and_position_only() -> None:
    np.testing.assert_array_equal(request_uniforms(3, 40)[:9], request_uniforms(3, 9))
    assert request_uniforms(3, 1) != request_uniforms(3 + 2**32, 1)


def test_uniform_bounds_never_draw_an_impossible_token() -> None:
    logits = torch.tensor([[-1e4, 1.0, 2.0, -1e4]]).expand(2, -1)
    tokens, _ = draw_tokens(logits, torch.ones(2, dtype=torch.float64), torch.tensor([0.0, 1 - 2**-53]).double())
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (GenerationRequest(prompt_ids=(), sampling=SamplingParams(max_new_tokens=1)), "no tokens"),
        (GenerationRequest(prompt_ids=(VOCAB,), sampling=SamplingParams(max_new_tokens=1)), "vocabulary"),
        (GenerationRequest(prompt_ids=(-1,), sampling=SamplingParams(max_new_tokens=1)), "vocabulary"),
        (GenerationRequest(prompt_ids=(1,), sampling=SamplingParams(max_new_tokens=1), seed=-1), "seed"),
        (request(CONTEXT + 1, seed=0, new=1), "max_position_embeddings"),
        (request(CONTEXT - 3, seed=0, new=4), "max_position_embeddings"),
    ],
)
def test_bad_request(model_dir: Path, bad: GenerationRequest, said: str) -> None:
    with pytest.raises(LoraError, match=said):
        LocalEngine(model_dir).generate([request(3, seed=0), bad])


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_bad_temperature(temperature: float) -> None:
    with pytest.raises(LoraError, match="temperature"):
        SamplingParams(max_new_tokens=1, temperature=temperature)


def test_bad_sizes(model_dir: Path) -> None:
    with pytest.raises(LoraError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(LoraError, match="max_batch_size"):
        LocalEngine(model_dir, max_batch_size=0)


def test_full_context_is_served_and_no_request_is_an_empty_list(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    assert len(engine.generate([request(CONTEXT - 4, seed=0, new=4)])[0].token_ids) == 4
    assert engine.generate([]) == []


def test_missing_files(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="no such directory"):
        LocalEngine(tmp_path / "nowhere")
    with pytest.raises(LoraError, match=r"config\.json"):
        LocalEngine(tmp_path)
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    with pytest.raises(LoraError, match=r"model\.safetensors"):
        LocalEngine(tmp_path)


def test_weights_of_another_config(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    config = (model_dir / "config.json").read_text()
    assert '"num_hidden_layers": 2' in config
    (tmp_path / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3').replace(
            '"full_attention"', '"full_attention", "full_attention"', 1
        )
    )
    with pytest.raises(LoraError, match="do not fit config"):
        LocalEngine(tmp_path)


def test_registry_and_close(model_dir: Path) -> None:
    with pytest.raises(LoraError, match=r"'no_such'.*local"):
        check_engine_name("no_such")
    engine = LocalEngine(model_dir)
    assert isinstance(engine, RolloutEngine)
    assert engine.capabilities.name == "local"
    engine.close()
    engine.close()
    with pytest.raises(LoraError, match="closed"):
        engine.generate([request(3, seed=0)])
