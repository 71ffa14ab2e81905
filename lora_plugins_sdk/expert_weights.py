"""The frozen weights of routed experts: from HF tensors of one expert each, or of all experts together.

Which of the two a checkpoint has is read off its tensor names. Each rank reads its own experts and, of those, its own
rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.base_tensors import BaseTensors
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.expert_host import expert_weights
from lora_plugins_sdk.host_modules import locate
from lora_plugins_sdk.parallel_run import ParallelRun
from lora_plugins_sdk.site import SiteKind
from lora_plugins_sdk.targets import candidates


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSource:
    """All experts of one grouped linear and the HF tensors they are made of.

    Args:
        host: model-wide path of the grouped linear.
        path: its declared path.
        kind: how ETP splits each weight.
        hf: tensor name per projection, with `{expert}`.
        fused: name of the tensor `[experts, out of all projections, in]` in their place; None when there is none.
        outs: rows of each projection.
        width: columns.
        experts: number of experts.
    """

    host: str
    path: str
    kind: SiteKind
    hf: tuple[str, ...]
    fused: str | None
    outs: tuple[int, ...]
    width: int
    experts: int

    def names(self, files: BaseTensors) -> list[str]:
        """The tensors that this checkpoint should have."""
        if self.is_fused(files):
            assert self.fused is not None, "just asked"
            return [self.fused]
        return [name.format(expert=expert) for expert in range(self.experts) for name in self.hf]

    def is_fused(self, files: BaseTensors) -> bool:
        """Whether this checkpoint has the experts in one tensor."""
        return self.fused is not None and files.has(self.fused)

    def local_shape(self, run: ParallelRun) -> tuple[int, int]:
        """Shape `[out, in]` of one expert's weight on every rank."""
        rows, etp = sum(self.outs), run.facts.etp
        return (rows // etp, self.width) if self.kind is SiteKind.COLUMN else (rows, self.width // etp)

    def read(self, expert: int, files: BaseTensors, run: ParallelRun) -> torch.Tensor:
        """This rank's part of one expert's weight, reading nothing else."""
        etp, rank = run.facts.etp, run.etp_rank
        parts, offset = [], 0
        for name, out in zip(self.hf, self.outs, strict=True):
            rows, columns = slice(0, out), slice(None)
            if self.kind is SiteKind.COLUMN:
                rows = slice(rank * (out // etp), (rank + 1) * (out // etp))
            else:
                columns = slice(rank * (self.width // etp), (rank + 1) * (self.width // etp))
            if self.is_fused(files):
                assert self.fused is not None, "just asked"
                parts.append(files.part(self.fused, expert, slice(offset + rows.start, offset + rows.stop), columns))
            else:
                parts.append(files.part(name.format(expert=expert), rows, columns))
            offset += out
        return torch.cat(parts)


def expert_sources(architecture: Architecture, hf_config: Mapping[str, object]) -> list[ExpertSource]:
    """Every grouped linear of the model."""
    dims = architecture.dims(hf_config)
    found = []
    known = [one for one in candidates(architecture, hf_config) if one.site.experts]
    for host, group in groupby(known, key=lambda one: one.host):
        members = list(group)
        site, layer = members[0].site, members[0].layer
        assert site.experts is not None, "chosen so"
        found.append(
            ExpertSource(
                host=host,
                path=site.path,
                kind=site.kind,
                hf=tuple(f"{one.hf}.weight" for one in members),
                fused=site.fused_hf and site.fused_hf.format(layer=layer),
                outs=tuple(dims.resolve(one.projection.out_dim) for one in members),
                width=dims.resolve(members[0].projection.in_dim),
                experts=dims.resolve(site.experts),
            )
        )
    return found


def local_expert_weights(
    chunks: tuple[nn.Module, ...], sources: Iterable[ExpertSource]
) -> list[tuple[ExpertSource, dict[int, nn.Parameter]]]:
    """The grouped linears that this rank has, with their weights by local number."""
    sources = list(sources)
    modules = locate(chunks, dict.fromkeys(source.path for source in sources))
    return [(source, expert_weights(modules[source.host][0])) for source in sources if source.host in modules]


def expert_problems(
    sources: Iterable[ExpertSource],
    local: Iterable[tuple[ExpertSource, dict[int, nn.Parameter]]],
    files: BaseTensors,
    run: ParallelRun,
) -> Iterator[Diagnostic]:
    """Tensors and host weights that are not what the config says."""
    for source in sources:
        yield from _wrong_tensors(source, files)
    for source, weights in local:
        count = source.experts // run.facts.ep
        if set(weights) != set(range(count)):
            yield Diagnostic(
                subject=source.host,
                reason=f"holds {len(weights)} experts, the config and expert parallel size {run.facts.ep} give {count}",
                cure="build the model from the checkpoint's own config.json, with moe_grouped_gemm=True",
            )
        expected = source.local_shape(run)
        for number, weight in weights.items():
            if tuple(weight.shape) != expected:
                yield Diagnostic(
                    subject=f"{source.host}.weight{number} {list(weight.shape)}",
                    reason=f"{', '.join(source.names(files)[: len(source.hf)])} would give {list(expected)}",
                    cure="build the model from the checkpoint's own config.json",
                )


def _wrong_tensors(source: ExpertSource, files: BaseTensors) -> Iterator[Diagnostic]:
    if source.is_fused(files):
        expected = {source.fused: (source.experts, sum(source.outs), source.width)}
    else:
        expected = {
            name.format(expert=expert): (out, source.width)
            for name, out in zip(source.hf, source.outs, strict=True)
            for expert in range(source.experts)
        }
    for name, shape in expected.items():
        if name is None or not files.has(name) or files.shape(name) == shape:
            continue
        found = files.shape(name)
        turned = found == (*shape[:-2], shape[-1], shape[-2])
        yield Diagnostic(
            subject=name,
            reason=f"{'is transposed: it ' if turned else ''}has shape {list(found)}, the config gives {list(shape)}",
            cure="convert the checkpoint to [experts, out, in]" if turned else "use the checkpoint's own config.json",
        )


def load_expert_weights(
    local: Iterable[tuple[ExpertSource, dict[int, nn.Parameter]]], files: BaseTensors, run: ParallelRun
) -> None:
    """Fill this rank's experts; what `expert_problems` refuses must have been asked before."""
    for source, weights in local:
        first = run.ep_rank * (source.experts // run.facts.ep)
        for number, weight in weights.items():
            weight.copy_(source.read(first + number, files, run))
