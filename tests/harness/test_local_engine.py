"""The local engine against transformers and PEFT used plainly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lora_harness.engines import Completion, GenerationRequest, RolloutEngine, SamplingParams, check_engine_name
from lora_harness.engines.local import LocalEngine
from lora_harness.engines.sampling import draw_tokens, request_uniforms
from lora_plugins_sdk.errors import LoraError

VOCAB, CONTEXT = 37, 48


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def adapter_config(rank: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "lora_dropout": 0.5,
        **changes,
    }


def adapter_tensors(model_dir: Path, config: Mapping[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random factors with the names and shapes PEFT itself gives them."""
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    peft_model = get_peft_model(base, LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    return {name: torch.randn(value.shape, generator=generator) * 0.3 for name, value in state.items()}


def request(
    length: int, *, seed: int, new: int = 12, temperature: float = 1.0, stop: tuple[int, ...] = ()
) -> GenerationRequest:
    prompt = np.random.default_rng(1000 + seed).integers(0, VOCAB, length)
    sampling = SamplingParams(max_new_tokens=new, temperature=temperature, stop_token_ids=frozenset(stop))
    return GenerationRequest(prompt_ids=tuple(prompt.tolist()), sampling=sampling, seed=seed)


def mixed_requests() -> list[GenerationRequest]:
    return [
        request(
            3 + 5 * (i % 4),
            seed=i,
            new=4 + 3 * (i % 3),
            temperature=(0.7, 1.0, 1.3)[i % 3],
            stop=(5, 6, 7, 8),
        )
        for i in range(17)
    ]


@torch.no_grad()
def teacher_forced(model: Any, asked: GenerationRequest, done: Completion) -> Tensor:
    """Log-probabilities of `done`, one unpadded forward pass without a cache."""
    ids = torch.tensor([*asked.prompt_ids, *done.token_ids])
    logits = model(input_ids=ids[None]).logits[0].double() / asked.sampling.temperature
    start = len(asked.prompt_ids)
    return torch.log_softmax(logits, -1)[torch.arange(start - 1, len(ids) - 1), ids[start:]]


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


def test_adapter_swap_changes_output_and_stamp(model_dir: Path) -> None:
    """B37, B41: rollouts stayed on the base, or on the previous adapter, after a reload."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    first, second = (adapter_tensors(model_dir, config, seed) for seed in (1, 2))
    asked = [request(6, seed=i) for i in range(4)]
    base = engine.generate(asked)
    outputs = [base]
    for version, tensors in ((1, first), (2, second), (5, first)):
        engine.publish(version, tensors, config)
        outputs.append(engine.generate(asked))
        assert {one.adapter_version for one in outputs[-1]} == {version} == {engine.adapter_version}
    drawn = [[one.token_ids for one in done] for done in outputs]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1] != drawn[2]


def test_adapter_tensors_are_copied(model_dir: Path) -> None:
    """B24: the engine's adapter shared storage with the trainer's."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    tensors = adapter_tensors(model_dir, config)
    engine.publish(1, tensors, config)
    asked = [request(6, seed=3)]
    before = engine.generate(asked)
    for tensor in tensors.values():
        tensor.zero_()
    assert engine.generate(asked) == before


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = torch.zeros(3, 32)


def _transpose(tensors: dict[str, Tensor]) -> None:
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    tensors[name] = tensors[name].T.contiguous()


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][2, 1] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop, r"layers\.1\.self_attn\.q_proj\.lora_B\.weight: missing"),
        (_add, r"layers\.0\.self_attn\.k_proj\.lora_A\.weight: the model .* no such factor"),
        (_transpose, r"down_proj\.lora_A\.weight: shape is \(48, 3\).* ask for \(3, 48\)"),
        (_nan, r"down_proj\.lora_B\.weight: holds NaN"),
    ],
)
@pytest.mark.parametrize("loaded_before", [False, True])
def test_spoilt_adapter_is_refused_whole(model_dir: Path, spoil: Any, said: str, loaded_before: bool) -> None:
    """B29, B36: tensors that match nothing were dropped, and the policy stayed the base."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    if loaded_before:
        engine.publish(1, adapter_tensors(model_dir, config, 1), config)
    asked = [request(6, seed=3)]
    before = engine.generate(asked)
    spoilt = adapter_tensors(model_dir, config, 2)
    spoil(spoilt)
    with pytest.raises(LoraError, match=said):
        engine.publish(2, spoilt, config)
    assert engine.generate(asked) == before
    engine.publish(2, adapter_tensors(model_dir, config, 2), config)
    assert engine.generate(asked) != before


def test_wrong_rank_is_refused(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    with pytest.raises(LoraError, match="rank"):
        engine.publish(1, adapter_tensors(model_dir, adapter_config(rank=2)), adapter_config(rank=3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_rank_typo": 1}, "lora_rank_typo"),
        ({"target_modules": ["no_such_proj"]}, "PEFT refuses"),
    ],
)
def test_bad_adapter_config(model_dir: Path, changes: dict[str, Any], said: str) -> None:
    """B45: unknown config keys crashed PEFT with a bare TypeError."""
    engine = LocalEngine(model_dir)
    with pytest.raises(LoraError, match=said):
        engine.publish(1, adapter_tensors(model_dir, adapter_config()), adapter_config(**changes))


def test_changed_config_and_stale_version(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    tensors = adapter_tensors(model_dir, adapter_config())
    engine.publish(2, tensors, adapter_config())
    with pytest.raises(LoraError, match="lora_alpha"):
        engine.publish(3, tensors, adapter_config(lora_alpha=7))
    for stale in (0, 1, 2):
        with pytest.raises(LoraError, match="version 2 is loaded"):
            engine.publish(stale, tensors, adapter_config())


def test_rslora_scale_is_honoured(model_dir: Path) -> None:
    """B34: alpha / r where the config asks for alpha / sqrt(r)."""
    asked = [request(6, seed=3)]
    done = []
    for config in (adapter_config(use_rslora=True), adapter_config(lora_alpha=6 * 3**0.5)):
        engine = LocalEngine(model_dir)
        engine.publish(1, adapter_tensors(model_dir, adapter_config()), config)
        done.append(engine.generate(asked)[0])
    assert done[0].token_ids == done[1].token_ids
    np.testing.assert_allclose(done[0].logprobs, done[1].logprobs, atol=1e-5)


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
    with pytest.raises(LoraError, match="not a directory"):
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
