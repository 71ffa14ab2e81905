"""Whether servers that somebody else started can serve a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_harness.engines.sglang.base_fit import refuse_other_layouts
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.engines.sglang.sync.package import LoraSettings
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.serving.sglang_config import missing_keys
from lora_plugins_sdk.serving.sglang_places import OUTSIDE


def refuse_unfit(group: EngineGroup, lora: LoraSettings | None, hf_config: Mapping[str, Any]) -> None:
    """Compare what servers were started with to what a run needs.

    Args:
        group: clients of the servers.
        lora: what adapter mode needs; None when no adapters are sent.
        hf_config: the trainer's `config.json`. Servers may read another one: theirs counts where it can be read from
            here, and is taken to be the same where it cannot.

    Raises:
        LoraError: lists every server's every shortcoming; or names what a server's Inkling is not published as.
    """
    found = []
    for client in group.clients:
        assert isinstance(client, HttpClient), "only servers are attached to"
        arguments = client.information()
        served = _served_directory(arguments)
        read = hf_config if served is None else read_hf_config(served)
        if served is not None:
            refuse_other_layouts(served, read)
        found += misfits(client.name, arguments, lora, missing_keys(hf_config, read))
    raise_if_any("these servers cannot serve the run:", found)


def misfits(
    name: str, arguments: Mapping[str, Any], lora: LoraSettings | None, config_keys: Mapping[str, Any]
) -> Iterator[Diagnostic]:
    """What one server's arguments lack.

    Args:
        name: of the server.
        arguments: as `/server_info` tells them.
        lora: what adapter mode needs; None when no adapters are sent.
        config_keys: what SGLang's config of the model needs on top of the `config.json` that the server reads.
    """
    copies = arguments.get("dp_size") or 1
    if copies != 1:
        yield _misfit(name, f"runs {copies} copies (dp_size), which SGLang cannot update together", "--dp-size 1")
    if not _has(json.loads(arguments.get("json_model_override_args") or "{}"), config_keys):
        wanted = json.dumps(config_keys)
        yield _misfit(
            name,
            "builds another model than the trainer: its config.json lacks keys that SGLang alone reads",
            f"--json-model-override-args {shlex.quote(wanted)}, or write these keys into config.json",
        )
    if lora is None:
        if arguments.get("enable_lora"):
            yield _misfit(
                name, "was started with LoRA, which keeps full weights from being replaced", "LoRA switched off"
            )
        for option in ("tp_size", "pp_size"):
            ranks = arguments.get(option) or 1
            if ranks != 1:
                yield _misfit(
                    name,
                    f"deals its weights out over {ranks} ranks ({option}), and merge mode checks those of one rank",
                    f"--{option.replace('_', '-')} 1, or set rollout.mode = 'adapter'",
                )
        return
    wanted, rank_option = " ".join(sorted(lora.targets)), f"--max-lora-rank {lora.max_rank}"
    if not arguments.get("enable_lora"):
        yield _misfit(name, "was started without LoRA", f"--enable-lora --lora-target-modules {wanted} {rank_option}")
        return
    rank = arguments.get("max_lora_rank")
    if rank is not None and rank < lora.max_rank:
        yield _misfit(name, f"takes ranks up to {rank}", f"{rank_option}, or lower lora.rank")
    targets = set(arguments.get("lora_target_modules") or ())
    if targets and "all" not in targets and not lora.targets <= targets:
        yield _misfit(
            name, f"does not adapt {' '.join(sorted(lora.targets - targets))}", f"--lora-target-modules {wanted}"
        )
    more = (set(OUTSIDE) if "all" in targets else targets.intersection(OUTSIDE)) - lora.targets
    if more and lora.targets.intersection(OUTSIDE):
        # SGLang clears these slots together or not at all.
        yield _misfit(
            name,
            f"adapts {' '.join(more)} too, and would keep what an earlier adapter had there",
            f"--lora-target-modules {wanted}",
        )
    slots = arguments.get("max_loras_per_batch")
    if slots is not None and slots < lora.slots:
        yield _misfit(
            name,
            f"holds {slots} adapters in a batch, the base among them",
            f"--max-loras-per-batch {lora.slots}, or lower rollout.sglang.keep",
        )
    shared = bool(arguments.get("experts_shared_outer_loras"))
    if shared != lora.shared_outer_experts:
        yield _misfit(
            name,
            f"takes experts with {'shared' if shared else 'separate'} outer factors, the adapter has the other kind",
            "--experts-shared-outer-loras" if lora.shared_outer_experts else "--no-experts-shared-outer-loras",
        )


def _served_directory(arguments: Mapping[str, Any]) -> Path | None:
    """The server's HF directory; None where it is not on this machine."""
    path = Path(arguments.get("model_path") or "")
    return path if path.is_absolute() and (path / "config.json").is_file() else None


def _has(given: Any, wanted: Any) -> bool:
    """Whether a tree of keys holds everything of another."""
    if not isinstance(wanted, Mapping):
        return given == wanted
    return isinstance(given, Mapping) and all(_has(given.get(key), value) for key, value in wanted.items())


def _misfit(name: str, reason: str, cure: str) -> Diagnostic:
    return Diagnostic(subject=f"engine {name}", reason=reason, cure=f"start it with {cure}")
