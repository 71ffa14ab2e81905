"""What SGLang is sent and answers, without SGLang: fields, completions, tensors by value, servers that do not fit."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from lora_harness.engines import SamplingParams
from lora_harness.engines.sglang import wire
from lora_harness.engines.sglang.arguments import engine_arguments
from lora_harness.engines.sglang.attached import misfits
from lora_harness.engines.sglang.client import SglangRequest
from lora_harness.engines.sglang.sync.package import LoraSettings
from lora_plugins_sdk.errors import LoraError

LORA = LoraSettings(targets=frozenset({"qkv_proj", "o_proj"}), max_rank=16, slots=3)


def request(adapter: str | None = None, seed: int = 5, stops: frozenset[int] = frozenset()) -> SglangRequest:
    sampling = SamplingParams(max_new_tokens=4, temperature=0.7, stop_token_ids=stops)
    return SglangRequest(rid=f"r{seed}", prompt_ids=(1, 2), sampling=sampling, seed=seed, adapter=adapter)


def answer(drawn: list[tuple[float, int]], reason: str = "length", **meta: Any) -> dict[str, Any]:
    logprobs = [(value, token, None) for value, token in drawn]
    return {"meta_info": {"output_token_logprobs": logprobs, "finish_reason": {"type": reason}, **meta}}


def test_requests_are_one_message_with_a_stamp_each():
    """B37: a request without its adapter would be answered by the base."""
    fields = wire.generate_fields([request("policy-v3"), request(None, seed=2**64 - 1, stops=frozenset({9, 7}))])
    assert fields["lora_path"] == ["policy-v3", None] and fields["input_ids"] == [[1, 2], [1, 2]]
    first, second = fields["sampling_params"]
    assert (first["ignore_eos"], second["ignore_eos"], second["stop_token_ids"]) == (True, False, [7, 9])
    assert second["sampling_seed"] == 2**63 - 1, "SGLang keeps int64"
    assert "lora_path" not in wire.generate_fields([request()]), "an engine without LoRA refuses the field"


def test_completions_hold_the_engines_tokens_and_numbers():
    found = wire.read_completion("e", request(stops=frozenset({9})), answer([(-0.5, 4), (-0.25, 9)], "stop"))
    assert (found.token_ids, found.logprobs, found.finish_reason) == ((4, 9), (-0.5, -0.25), "stop")
    aborted = wire.read_completion("e", request(), {"meta_info": {"finish_reason": {"type": "abort"}}})
    assert (aborted.token_ids, aborted.finish_reason) == ((), "abort")
    with pytest.raises(LoraError, match="at token 4, an end token of the model that is no stop token"):
        wire.read_completion("e", request(), answer([(-0.5, 4)], "stop"))


def test_weights_that_changed_under_a_request_have_no_version():
    def version(**meta: Any) -> str | None:
        return wire.read_completion("e", request(), answer([(0.0, 1)], **meta)).weight_version

    def spans(*names: str) -> list[dict[str, Any]]:
        return [{"version": name, "start": 0, "end": 1} for name in names]

    assert version() is None and version(weight_version="a") == "a"
    assert version(weight_version="b", weight_versions=spans("a")) == "a"
    assert version(weight_version="b", weight_versions=spans("a", "b")) is None


def test_tensors_travel_by_value():
    """No handle to shared memory: another process of another torch has to read them."""
    whole = torch.arange(1000.0)
    sent = wire.pack_tensors({"part": wire.portable(whole[10:14]), "turned": wire.portable(whole[:6].view(2, 3).T)})
    assert len(sent) < 2000, "a view must not drag its whole storage along"
    assert b"rebuild_storage" not in sent and b"multiprocessing" not in sent
    found = pickle.loads(sent)
    assert torch.equal(found["part"], whole[10:14]) and torch.equal(found["turned"], whole[:6].view(2, 3).T)
    grown = wire.portable(torch.ones(2, requires_grad=True))
    assert not grown.requires_grad


def test_checksums_of_several_ranks_keep_apart():
    assert wire.weight_checksums([{"checksums": {"w": "a"}}]) == {"w": "a"}
    assert wire.weight_checksums([{"checksums": {"w": "a"}}, {"checksums": {"w": "b"}}]) == {"w@0": "a", "w@1": "b"}


def arguments(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict(
        model_path="m",
        dtype="float32",
        seed=3,
        max_running_requests=4,
        context=64,
        recurrent=False,
        config_keys={},
        snapshots=False,
        lora=LORA,
        cpu=True,
        given={},
    )
    return engine_arguments(**{**usual, **changes})


def test_arguments_follow_from_the_run():
    found = arguments()
    assert (found["device"], found["lora_backend"], found["max_total_tokens"]) == ("cpu", "torch_native", 256)
    assert (found["max_lora_rank"], found["max_loras_per_batch"]) == (16, 3)
    assert found["lora_target_modules"] == ["o_proj", "qkv_proj"]
    assert "experts_shared_outer_loras" not in found
    outer = LoraSettings(targets=LORA.targets, max_rank=16, slots=3, shared_outer_experts=True)
    assert arguments(lora=outer)["experts_shared_outer_loras"] is True
    merge = arguments(lora=None, cpu=False, given={"tp_size": 2})
    assert "enable_lora" not in merge and "device" not in merge and merge["tp_size"] == 2
    assert "max_mamba_cache_size" not in found and "json_model_override_args" not in found
    hybrid = arguments(recurrent=True, config_keys={"full_attention_interval": 2})
    assert (hybrid["disable_radix_cache"], hybrid["max_mamba_cache_size"]) == (True, 16)
    assert json.loads(hybrid["json_model_override_args"]) == {"full_attention_interval": 2}
    inkling = arguments(snapshots=True)
    assert (inkling["max_mamba_cache_size"], inkling["swa_full_tokens_ratio"]) == (20, 1.0)
    assert "disable_radix_cache" not in inkling, "SGLang does not load the model without"
    assert arguments(given={"max_total_tokens": 99})["max_total_tokens"] == 99, "the user's word wins on a CPU too"


SERVER = {"dp_size": 1, "enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 3}


@pytest.mark.parametrize(
    "changes, reason, cure",
    [
        ({"dp_size": 2}, "runs 2 copies", "--dp-size 1"),
        ({"enable_lora": None}, "without LoRA", "--enable-lora"),
        ({"max_lora_rank": 8}, "ranks up to 8", "--max-lora-rank 16"),
        ({"max_loras_per_batch": 2}, "holds 2 adapters", "--max-loras-per-batch 3"),
        ({"lora_target_modules": ["qkv_proj"]}, "does not adapt o_proj", "o_proj qkv_proj"),
        ({"experts_shared_outer_loras": True}, "shared outer factors", "--no-experts-shared-outer-loras"),
    ],
)
def test_a_server_that_does_not_fit_is_told_how_to_start(changes: dict[str, Any], reason: str, cure: str):
    assert not list(misfits("u", {**SERVER, "lora_target_modules": ["all"]}, LORA, {}))
    [found] = misfits("u", {**SERVER, **changes}, LORA, {})
    assert reason in found.reason and cure in found.cure


@pytest.mark.parametrize("leaf", ["embed_tokens", "lm_head"])
def test_a_server_for_embedding_and_head_is_none_for_one_of_them(leaf: str):
    """SGLang clears a slot of the two together: the other one would be what the server's last adapter left there."""
    one = LoraSettings(targets=LORA.targets | {leaf}, max_rank=16, slots=3)
    for targets in (["all"], ["embed_tokens", "lm_head", "o_proj", "qkv_proj"]):
        [found] = misfits("u", {**SERVER, "lora_target_modules": targets}, one, {})
        assert "would keep what an earlier adapter had there" in found.reason and leaf not in found.reason
        assert leaf in found.cure
    assert not list(misfits("u", {**SERVER, "lora_target_modules": sorted(one.targets)}, one, {}))
    both = LoraSettings(targets=LORA.targets | {"embed_tokens", "lm_head"}, max_rank=16, slots=3)
    assert not list(misfits("u", {**SERVER, "lora_target_modules": ["all"]}, both, {}))


def test_merged_weights_are_compared_on_engines_of_one_rank():
    assert not list(misfits("u", {"dp_size": 1, "tp_size": 1, "pp_size": 1}, None, {}))
    [found] = misfits("u", {"dp_size": 1, "tp_size": 2, "pp_size": 1}, None, {})
    assert "over 2 ranks (tp_size)" in found.reason and found.cure.startswith(
        "start it with --tp-size 1, or set rollout.mode"
    )
    assert not list(misfits("u", {**SERVER, "tp_size": 2}, LORA, {})), "adapters are whole on each rank"


def test_merged_weights_need_a_server_without_lora():
    assert not list(misfits("u", {"dp_size": 1}, None, {}))
    [found] = misfits("u", SERVER, None, {})
    assert "was started with LoRA" in found.reason
