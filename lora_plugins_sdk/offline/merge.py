"""Fold an adapter into a copy of its base, file by file: `W + scale * B A`, in a new directory or not at all."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_plugins_sdk.adapter_files import adapter_directory
from lora_plugins_sdk.adapter_meta import engine_problems
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.json_files import read_json_object
from lora_plugins_sdk.offline.adapter import PlainAdapter, read_plain_adapter
from lora_plugins_sdk.offline.base_files import OtherFiles, other_files
from lora_plugins_sdk.offline.fit import FOLDABLE, Fold, by_tensor, fit
from lora_plugins_sdk.offline.origin import origin_problems
from lora_plugins_sdk.offline.products import product_norm
from lora_plugins_sdk.offline.shard import WrittenShard, stored_dtype, write_shard
from lora_plugins_sdk.offline.workers import run_all
from lora_plugins_sdk.safetensors_header import DTYPE_BITS, SafetensorsHeader, read_header
from lora_plugins_sdk.staging import refuse_output, staged_directory, sync
from lora_plugins_sdk.weight_files import INDEX_FILE, WeightFiles, read_weight_files

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CONFIG_FILE = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """A merge that was checked and not begun.

    Args:
        adapter: what is folded.
        base: weights it is folded into.
        output: directory to make.
        folds: tensor name -> folds into it, sorted by their first row; one for each factor pair.
        dtype: name of the dtype that every floating point tensor gets; None when none changes.
        others: what the base holds beside its weights.
    """

    adapter: PlainAdapter
    base: WeightFiles
    output: Path
    folds: Mapping[str, tuple[Fold, ...]]
    dtype: str | None
    others: OtherFiles

    @property
    def read_bytes(self) -> int:
        """Size of the base's tensors."""
        return sum(one.num_bytes for header in self.base.headers.values() for one in header.tensors.values())

    @property
    def write_bytes(self) -> int:
        """Size of the output's tensors."""
        code = _code(self.dtype)
        return sum(
            math.prod(one.shape) * DTYPE_BITS[stored_dtype(one, code)] // 8
            for header in self.base.headers.values()
            for one in header.tensors.values()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What a merge did.

    Args:
        folds: deltas added; equal to the adapter's pairs.
        changed: tensors they were added to.
        tensors: tensors of the output.
        write_bytes: their size.
        delta_norm: Frobenius norm of all deltas together.
        lost_norm: Frobenius norm of what storing the sums in the output's dtype took away.
    """

    folds: int
    changed: int
    tensors: int
    write_bytes: int
    delta_norm: float
    lost_norm: float


def plan_merge(base: str | Path, adapter: str | Path, output: str | Path, dtype: str | None = None) -> MergePlan:
    """Check everything a merge depends on; writes nothing.

    Args:
        base: HF directory.
        adapter: PEFT directory, checkpoint or finished run.
        output: directory to make.
        dtype: `float32`, `bfloat16` or `float16` for every floating point tensor; None keeps each one's own.

    Raises:
        LoraError: anything that would not fit; of the pairs and their base tensors, every problem is listed.
    """
    directory, output = Path(base), Path(output)
    refuse_output(output)
    if output.resolve().is_relative_to(directory.resolve()):
        raise LoraError(str(output), reason="lies in the base directory", cure="give a place outside of it")
    saved = read_plain_adapter(adapter_directory(adapter), directory)
    # Before anything is looked up: its names are another's, and each would be a problem of its own.
    raise_if_any(f"{saved.directory} cannot be merged:", engine_problems(str(saved.directory), saved.saved.origin))
    weights = read_weight_files(directory)
    found = fit(saved, weights, read_hf_config(directory))
    raise_if_any(
        f"{saved.directory} cannot be merged into {directory}:",
        [*origin_problems(saved, directory), *found.problems, *_dtype_problems(weights, dtype)],
    )
    code = _code(dtype)
    changes = any(stored_dtype(weights.tensor(name), code) != weights.tensor(name).dtype for name in weights.where)
    plan = MergePlan(
        adapter=saved,
        base=weights,
        output=output,
        folds=by_tensor(found.folds),
        dtype=dtype if changes else None,
        others=other_files(weights),
    )
    _refuse_full_disk(plan)
    return plan


def merge(plan: MergePlan, advance: Callable[[int], None] = lambda size: None) -> MergeReport:
    """Carry out a plan. Peak memory is the adapter and a few rows of a tensor a processor; no file is whole in memory.

    Args:
        plan: from `plan_merge`.
        advance: is told, as it goes, how many of `plan.read_bytes` were dealt with; called from several threads.

    Raises:
        LoraError: the base changed since the plan, a sum is not finite, the disk refuses. There is no output then.
    """
    lost: dict[str, float] = {}
    folded: set[str] = set()
    with staged_directory(plan.output) as place:

        def write(header: SafetensorsHeader, proceed: Callable[[], None]) -> WrittenShard:
            return _write_weights(plan, header, place, advance, proceed)

        for part in run_all(write, list(plan.base.headers.values())):
            lost |= part.lost
            folded |= set(part.folded)
        _write_others(plan, place)
        missing = plan.adapter.pairs.keys() - folded
        if missing:
            raise LoraError(
                f"{len(missing)} of {len(plan.adapter.pairs)} factor pairs",
                reason=f"were not folded: {', '.join(sorted(missing))}",
                cure="report this; the output was discarded",
            )
    deltas = [plan.adapter.lora.scale * product_norm(pair) for pair in plan.adapter.pairs.values()]
    return MergeReport(
        folds=len(folded),
        changed=len(lost),
        tensors=len(plan.base.where),
        write_bytes=plan.write_bytes,
        delta_norm=math.hypot(*deltas),
        lost_norm=math.hypot(*lost.values()),
    )


def _write_weights(
    plan: MergePlan,
    header: SafetensorsHeader,
    place: Path,
    advance: Callable[[int], None],
    proceed: Callable[[], None],
) -> WrittenShard:
    if read_header(header.path) != header:
        raise LoraError(
            str(header.path), reason="changed since it was checked", cure="leave the base alone and try again"
        )

    def step(size: int) -> None:
        proceed()
        advance(size)

    target = place / header.path.name
    written = write_shard(
        header, target, plan.folds, scale=plan.adapter.lora.scale, dtype=_code(plan.dtype), advance=step
    )
    # Done again for all at the end; here the disk works while others compute.
    sync(target)
    return written


def _code(dtype: str | None) -> str | None:
    return None if dtype is None else DTYPES[dtype]


def _dtype_problems(base: WeightFiles, dtype: str | None) -> Iterator[Diagnostic]:
    if dtype is None:
        return
    if dtype not in DTYPES:
        yield Diagnostic(subject=f"dtype {dtype!r}", reason="is unknown", cure=f"use one of {', '.join(DTYPES)}")
        return
    for name in base.where:
        held = base.tensor(name).dtype
        if held.startswith("F") and held not in FOLDABLE:
            yield Diagnostic(
                subject=name,
                reason=f"is stored as {held}: a cast would drop its scales",
                cure="leave --dtype away, or give the unquantised base",
            )


def _refuse_full_disk(plan: MergePlan) -> None:
    others = sum((plan.base.directory / path).stat().st_size for path in plan.others.taken)
    needed, free = plan.write_bytes + others, shutil.disk_usage(plan.output.absolute().parent).free
    if needed > free:
        raise LoraError(
            str(plan.output),
            reason=f"needs {needed} bytes, the disk has {free} free",
            cure="free some space, or give a directory on another disk",
        )


def _write_others(plan: MergePlan, place: Path) -> None:
    source, rewritten = plan.base.directory, [] if plan.dtype is None else [Path(_CONFIG_FILE)]
    for path in plan.others.taken:
        if path not in rewritten:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / path, place / path)
    if plan.base.indexed and plan.dtype is None:
        shutil.copy2(source / INDEX_FILE, place / INDEX_FILE)
    elif plan.base.indexed:
        index = read_json_object(source / INDEX_FILE, cure="download the checkpoint again")
        metadata = index.get("metadata")
        kept = metadata if isinstance(metadata, dict) else {}
        _write_json(place / INDEX_FILE, {**index, "metadata": {**kept, "total_size": plan.write_bytes}})
    if plan.dtype is not None:
        # Readers cast to the dtype that the config names.
        _write_json(place / _CONFIG_FILE, _with_dtype(read_hf_config(source), plan.dtype))


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with each dtype that it or one of its parts (`text_config`) names replaced."""
    changed = dict(config)
    for key, value in config.items():
        if key in _DTYPE_KEYS and isinstance(value, str):
            changed[key] = dtype
        elif key.endswith("_config") and isinstance(value, dict):
            changed[key] = _with_dtype(value, dtype)
    return changed


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
