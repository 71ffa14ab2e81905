"""The ``[rollout]`` section: defaults of each engine and mode, and every rule between its options."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from lora_harness.config import TrainConfig, dump_config, parse_config
from lora_plugins_sdk.errors import LoraError


def config(rollout: dict[str, Any], **tables: Any) -> TrainConfig:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return parse_config({"model": {"path": "base"}, "task": task, "steps": 3, "rollout": rollout, **tables})


def test_what_each_engine_and_mode_fills_in():
    local = config({}).rollout
    assert (local.sync_mode, local.sglang, local.sync_buffer_mib, local.delta_skip) == ("adapter", None, None, None)
    merge = config({"engine": "sglang"}).rollout
    assert merge.mode is None and merge.sync_mode == "merge", "neither mode given means merge"
    assert (merge.sync_buffer_mib, merge.delta_skip) == (512, 1e-6)
    assert merge.sglang is not None and merge.sglang.keep is None
    adapter = config({"engine": "sglang", "mode": "adapter"}).rollout
    assert adapter.sglang is not None and adapter.sglang.keep == 2


@pytest.mark.parametrize(
    "rollout",
    [
        {},
        {"engine": "sglang"},
        {"engine": "sglang", "train_only": True},
        {"engine": "sglang", "mode": "adapter", "sglang": {"arguments": {"tp_size": 2}, "keep": 3}},
        {"engine": "sglang", "mode": "merge", "sglang": {"urls": ["http://a:1", "http://b:2"]}},
    ],
)
def test_a_dumped_config_reads_back_equal(rollout: dict[str, Any]):
    first = config(rollout)
    assert parse_config(tomllib.loads(dump_config(first))) == first


REFUSED = [
    ({"mode": "merge"}, r"rollout\.mode: 'merge' sends full weights.*engine = 'sglang'"),
    ({"mode": "both", "engine": "sglang"}, r"rollout\.mode: 'both' is not accepted"),
    ({"delta_skip": 0.0}, r"rollout\.delta_skip: has no effect with rollout\.engine = 'local'"),
    ({"sync_buffer_mib": 4}, r"rollout\.sync_buffer_mib: has no effect with rollout\.engine = 'local'"),
    ({"sglang": {}}, r"rollout\.sglang: has no effect with rollout\.engine = 'local'"),
    ({"engine": "sglang", "train_only": True, "mode": "adapter"}, r"rollout\.mode: has no effect with .*train_only"),
    ({"train_only": True, "max_logprob_gap": 1e-3}, r"rollout\.max_logprob_gap: compares the policy .* is the base"),
    ({"engine": "sglang", "sglang": {"keep": 2}}, r"rollout\.sglang\.keep: has no effect without adapters"),
    (
        {"engine": "sglang", "mode": "merge", "sglang": {"adapter_directory": "x"}},
        r"rollout\.sglang\.adapter_directory: has no effect without adapters",
    ),
    ({"engine": "sglang", "mode": "adapter", "sglang": {"keep": 1}}, r"rollout\.sglang\.keep: 1 is not accepted"),
    (
        {"engine": "sglang", "sglang": {"urls": ["http://a:1"], "engines": 2}},
        r"rollout\.sglang\.engines: has no effect with rollout\.sglang\.urls",
    ),
    ({"engine": "sglang", "sglang": {"urls": ["a:1"]}}, r"rollout\.sglang\.urls: 'a:1' is no URL"),
    (
        {"engine": "sglang", "sglang": {"in_process": True, "python": "p"}},
        r"rollout\.sglang\.python: has no effect with rollout\.sglang\.in_process",
    ),
    (
        {"engine": "sglang", "sglang": {"arguments": {"max_lora_rank": 8}}},
        r"rollout\.sglang\.arguments\.max_lora_rank: is set by the harness -> use lora\.rank",
    ),
    (
        {"engine": "sglang", "sglang": {"arguments": {"enable_memory_saver": True}}},
        r"arguments\.enable_memory_saver: is set by the harness -> remove it: engines keep their weights",
    ),
    *(
        (
            {"engine": "sglang", "sglang": {"arguments": {name: value}}},
            rf"arguments\.{name}: is set by the harness -> remove it: {cure}",
        )
        for name, value, cure in (
            ("tokenizer_worker_num", 2, "one worker serves, at the port that the run holds"),
            ("enable_http2", True, r"requests come as HTTP/1\.1"),
            ("enable_ssl_refresh", True, "the run asks its own servers over plain HTTP"),
        )
    ),
    (
        {"engine": "sglang", "sglang": {"arguments": {"json_model_override_args": "{}"}}},
        r"json_model_override_args: is set by the harness -> change the model's config\.json, which the trainer",
    ),
    (
        {"engine": "sglang", "mode": "adapter", "sglang": {"arguments": {"dp_size": 2}}},
        r"arguments\.dp_size: 2 copies in one engine cannot be updated.* -> .*rollout\.sglang\.engines",
    ),
    (
        {"engine": "sglang", "mode": "merge", "sglang": {"arguments": {"tp_size": 2}}},
        r"arguments\.tp_size: merge mode checks all weights of an engine.* 2 ranks.* -> set rollout\.mode = 'adapter'",
    ),
    (
        {"engine": "sglang", "sglang": {"arguments": {"pp_size": 2}}},
        r"arguments\.pp_size: merge mode .* 2 ranks.* -> .*rollout\.sglang\.engines runs several of one rank each",
    ),
    ({"engine": "sglang", "sglang": {"pyhton": "p"}}, r"rollout\.sglang\.pyhton: unknown key -> did you mean 'python'"),
]


@pytest.mark.parametrize("rollout, message", REFUSED)
def test_refused_with_the_way_out(rollout: dict[str, Any], message: str):
    with pytest.raises(LoraError, match=message):
        config(rollout)


def test_vision_is_never_trained_for_adapters():
    with pytest.raises(LoraError, match=r"lora\.scope: 'vision' trains factors that no engine serves .*'merge'"):
        config({"engine": "sglang", "mode": "adapter"}, lora={"scope": "vision"})
    assert config({"engine": "sglang", "mode": "merge"}, lora={"scope": "vision"}).lora.scope == "vision"


def test_an_engine_in_the_process_serves_one_rank():
    with pytest.raises(LoraError, match=r"in_process: serves one rank, and parallel\.tp \* parallel\.pp = 2"):
        config({"engine": "sglang", "sglang": {"in_process": True}}, parallel={"tp": 2})
