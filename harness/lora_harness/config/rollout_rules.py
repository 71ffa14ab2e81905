"""Rules of the ``[rollout]`` section: which engine and mode take which option, and what each mode cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_harness.config import sections as s
from lora_harness.config.rollout import RolloutSection, SglangSection
from lora_plugins_sdk.errors import Diagnostic

# SGLang's arguments that follow from the run; one that the user sets too would contradict.
_OURS = {
    "model_path": "use model.path",
    "dtype": "use model.dtype",
    "host": "remove it; for servers on other machines use rollout.sglang.urls",
    "port": "use rollout.sglang.port",
    "random_seed": "use seed",
    "skip_tokenizer_init": "remove it: engines take and give token ids",
    "max_running_requests": "use rollout.max_batch_size",
    "enable_lora": "use rollout.mode",
    "max_lora_rank": "use lora.rank",
    "lora_target_modules": "use lora.target_modules",
    "lora_paths": "remove it; an adapter to start from is warm_start.adapter",
    "max_loras_per_batch": "use rollout.sglang.keep",
    "max_loaded_loras": "use rollout.sglang.keep",
    "enable_memory_saver": "remove it: engines keep their weights for the whole run, and are not put to sleep",
    "experts_shared_outer_loras": "remove it: it follows from the adapter",
    "tokenizer_worker_num": "remove it: one worker serves, at the port that the run holds for it; nothing is tokenized",
    "enable_http2": "remove it: requests come as HTTP/1.1, at the port that the run holds for the server",
    "enable_ssl_refresh": "remove it: the run asks its own servers over plain HTTP",
    "json_model_override_args": "change the model's config.json, which the trainer reads too",
}


def no_effect(key: str, reason: str, cure: str) -> Diagnostic:
    """An option that would do nothing."""
    return Diagnostic(subject=key, reason=f"has no effect {reason}", cure=cure)


def sglang_options_need_sglang(rollout: RolloutSection) -> Iterator[Diagnostic]:
    if rollout.engine == "sglang":
        return
    if rollout.mode == "merge":
        yield Diagnostic(
            subject="rollout.mode",
            reason="'merge' sends full weights, and the local engine takes adapters only",
            cure="remove it, or set rollout.engine = 'sglang'",
        )
    for key in ("sync_buffer_mib", "delta_skip", "sglang"):
        if getattr(rollout, key) is not None:
            yield no_effect(
                f"rollout.{key}", "with rollout.engine = 'local'", "remove it, or set rollout.engine = 'sglang'"
            )


def train_only_sends_nothing(rollout: RolloutSection) -> Iterator[Diagnostic]:
    if not rollout.train_only:
        return
    for key in ("mode", "sync_buffer_mib", "delta_skip"):
        if getattr(rollout, key) is not None:
            yield no_effect(
                f"rollout.{key}",
                "with rollout.train_only: nothing is sent to the engine",
                "remove it, or set rollout.train_only = false",
            )
    if rollout.max_logprob_gap is not None:
        yield Diagnostic(
            subject="rollout.max_logprob_gap",
            reason="compares the policy with what the engine serves, which with rollout.train_only is the base",
            cure="remove one of the two",
        )


def adapter_options_need_adapter_mode(rollout: RolloutSection) -> Iterator[Diagnostic]:
    if rollout.sglang is None or (rollout.sync_mode == "adapter" and not rollout.train_only):
        return
    for key in ("keep", "adapter_directory"):
        if getattr(rollout.sglang, key) is not None:
            yield no_effect(
                f"rollout.sglang.{key}",
                "without adapters on the engine",
                "remove it, or set rollout.mode = 'adapter'",
            )


def vision_needs_merge_mode(rollout: RolloutSection, lora: s.LoraSection) -> Iterator[Diagnostic]:
    if lora.scope == "vision" and rollout.sync_mode == "adapter" and not rollout.train_only:
        yield Diagnostic(
            subject="lora.scope",
            reason="'vision' trains factors that no engine serves as an adapter",
            cure="set rollout.engine = 'sglang' and rollout.mode = 'merge', or lora.scope = 'language'",
        )


def one_kind_of_engine(rollout: RolloutSection) -> Iterator[Diagnostic]:
    section, fresh = rollout.sglang, SglangSection()
    if section is None:
        return
    if section.urls:
        for key in ("python", "engines", "in_process", "port", "arguments"):
            if getattr(section, key) != getattr(fresh, key):
                yield no_effect(
                    f"rollout.sglang.{key}",
                    "with rollout.sglang.urls: servers that run already are used as they are",
                    "remove one of the two",
                )
    elif section.in_process:
        for key in ("python", "engines", "port"):
            if getattr(section, key) != getattr(fresh, key):
                yield no_effect(
                    f"rollout.sglang.{key}",
                    "with rollout.sglang.in_process: one engine runs in the trainer's process",
                    "remove one of the two",
                )
    for url in section.urls:
        if not url.startswith(("http://", "https://")):
            yield Diagnostic(
                subject="rollout.sglang.urls", reason=f"{url!r} is no URL", cure="write e.g. 'http://127.0.0.1:30000'"
            )


def in_process_is_for_one_rank(rollout: RolloutSection, parallel: s.ParallelSection) -> Iterator[Diagnostic]:
    if rollout.sglang is not None and rollout.sglang.in_process and parallel.tp * parallel.pp > 1:
        yield Diagnostic(
            subject="rollout.sglang.in_process",
            reason=f"serves one rank, and parallel.tp * parallel.pp = {parallel.tp * parallel.pp}",
            cure="remove it: a server serves all ranks",
        )


def arguments_are_free(rollout: RolloutSection) -> Iterator[Diagnostic]:
    given: dict[str, Any] = rollout.sglang.arguments if rollout.sglang is not None else {}
    for name in sorted(given.keys() & _OURS.keys()):
        yield Diagnostic(subject=f"rollout.sglang.arguments.{name}", reason="is set by the harness", cure=_OURS[name])
    if given.get("dp_size", 1) != 1 and not rollout.train_only:
        yield Diagnostic(
            subject="rollout.sglang.arguments.dp_size",
            reason=f"{given['dp_size']} copies in one engine cannot be updated together: SGLang refuses adapters and "
            "weights there",
            cure="remove it and set rollout.sglang.engines to the number of copies",
        )


def merged_engines_have_one_rank(rollout: RolloutSection) -> Iterator[Diagnostic]:
    if rollout.sglang is None or rollout.train_only or rollout.sync_mode != "merge":
        return
    for name in ("tp_size", "pp_size"):
        ranks = rollout.sglang.arguments.get(name, 1)
        if ranks != 1:
            yield Diagnostic(
                subject=f"rollout.sglang.arguments.{name}",
                reason="merge mode checks all weights of an engine, and how SGLang deals them out over "
                f"{ranks} ranks is not known here",
                cure="set rollout.mode = 'adapter', or remove it: rollout.sglang.engines runs several of one rank each",
            )


ROLLOUT_RULES = (
    sglang_options_need_sglang,
    train_only_sends_nothing,
    adapter_options_need_adapter_mode,
    vision_needs_merge_mode,
    one_kind_of_engine,
    in_process_is_for_one_rank,
    arguments_are_free,
    merged_engines_have_one_rank,
)
