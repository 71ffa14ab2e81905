"""Projections and sites: the one declaration everything else is derived from."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from enum import StrEnum

from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.layers import OnlyLayers
from lora_plugins_sdk.pack import Concat, Pack, pads

EXPERT = "{expert}"
"""Stands for the expert's number in the names of what each routed expert has."""


def check_path(path: str, *, expert: bool = False) -> None:
    """Refuse a declared path with a placeholder other than `{layer}` and, where experts are named, `{expert}`.

    Raises:
        LoraError: another placeholder, or unbalanced braces.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(path) if name is not None]
    except ValueError:
        names = ["unbalanced braces"]
    unknown = [name for name in names if name != "layer" and not (expert and name == "expert")]
    if unknown:
        raise LoraError(
            f"path {path!r}",
            reason=f"has the unknown placeholder {unknown[0]!r}",
            cure="write {layer} for the layer number"
            + (" and {expert} for the expert's" if expert else "")
            + "; there is no other placeholder",
        )


def packed_name(path: str) -> str:
    """The name of what all experts have together, from the name with `{expert}` of what each has."""
    return path.replace(f".{EXPERT}", "")


class SiteKind(StrEnum):
    """How tensor parallelism splits the host weight `[out, in]`."""

    COLUMN = "column"
    ROW = "row"
    REPLICATED = "replicated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One logical LoRA pair as HF and PEFT know it.

    Args:
        hf: HF module path; `{layer}` stands for the layer number, `{expert}` for a routed expert's.
        in_dim: input width, an expression over the HF config.
        out_dim: output width, likewise.
        sections: where HF keeps several parts in one weight and TP splits each on its own, the width of each
            (likewise), in HF order. They add up to `out_dim`.
        stack: where HF keeps several weights in one parameter `[n, ..]` of the projection's own name, n (likewise). The
            host has them side by side as one, along the output (COLUMN) or the input (ROW); `in_dim` and `out_dim` are
            the host's. One factor is each weight's own, the other shared (see `lora_plugins_sdk.stacks`).
        padded_to: where HF's linear has further rows that belong to nothing (a padded vocabulary), its rows with them
            (likewise); None where it has `out_dim`. Exports have no rows for padding; imports take it where it is zero.
        by_weight: HF's module does more than this projection (a norm after the lookup), so that PEFT's delta on the
            module's output would be another: PEFT must target the weight as a parameter.
        name_taken: in this model PEFT takes every module of this name for one of the routed experts', as it renames
            targets of models whose experts transformers has fused: PEFT must target the weight as a parameter.

    Raises:
        LoraError: another placeholder, or a width that is no integer expression.
    """

    hf: str
    in_dim: str
    out_dim: str
    sections: tuple[str, ...] = ()
    stack: str | None = None
    padded_to: str | None = None
    by_weight: bool = False
    name_taken: bool = False

    def __post_init__(self) -> None:
        check_path(self.hf, expert=True)
        for expression in (self.in_dim, self.out_dim, *self.sections, self.stack, self.padded_to):
            if expression is not None:
                check_expression(expression)

    def section_rows(self, dims: ModelDims) -> tuple[int, ...]:
        """Rows of each section, of the only one where none is declared.

        Raises:
            LoraError: a width does not resolve, or the sections do not add up.
        """
        rows = tuple(dims.resolve(expression) for expression in self.sections or (self.out_dim,))
        if sum(rows) != dims.resolve(self.out_dim):
            raise LoraError(
                f"projection {self.hf!r}",
                reason=f"its sections {', '.join(self.sections)} have {sum(rows)} rows, "
                f"its out_dim {self.out_dim} {dims.resolve(self.out_dim)}",
                cure="declare sections that add up to out_dim",
            )
        return rows

    @property
    def leaf(self) -> str:
        """Last part of the HF path, for example `q_proj`."""
        return self.hf.rsplit(".", 1)[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tied:
    """A weight that is another tensor's alias under a config flag (tied embeddings).

    While the flag is set the site cannot be adapted: an adapter on one user of the tensor would not reach the other.

    Args:
        when: HF config flag.
        to: HF tensor that the weight then is.
    """

    when: str
    to: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One physical Megatron linear.

    Args:
        path: host module path; `{layer}` stands for the layer number.
        kind: how TP splits the weight.
        projections: the HF projections that the weight packs, in host order.
        pack: layout of those projections within the weight (COLUMN only; others hold one projection as it is). Of an
            embedding: `Concat(pad=True)` for a vocabulary that TP does not divide.
        fused_norm: the module normalises its input itself; the branch reads the normed input.
        region: part of a multimodal model, matched against `LoraConfig.scope`.
        layers: the layers that have it, where layers are of several types; every layer when None.
        method: the host's method that computes the linear, where its forward does more than that (a router's `gating`).
            It takes the input and returns the output alone.
        all_linear: whether the target `all-linear` includes it (PEFT leaves the output head out).
        tied: the weight may be an alias of another tensor; it then cannot be adapted.
        experts: config expression for the number of routed experts, where the linear is a grouped one: its weights are
            `weight0`, `weight1` ... of the local experts, `kind` says how ETP splits each, and it is called as
            `forward(x, m_splits)` with tokens sorted by expert.
        fused_hf: HF tensor that may hold the weights of all experts in place of one tensor each, `[experts, out, in]`,
            projections one after the other along `out`.
        embedding: the host module looks token ids up in a weight `[vocabulary, hidden]` that TP splits by its rows:
            the linear of a one-hot input, so a ROW site with `in_dim` the vocabulary and `out_dim` the hidden size.

    Raises:
        LoraError: another placeholder, no projection, several on a site that is not COLUMN, a declaration of experts
            or of an embedding that contradicts itself, layers for a path without `{layer}`, or a fused norm outside
            the forward.
    """

    path: str
    kind: SiteKind
    projections: tuple[Projection, ...]
    pack: Pack = field(default_factory=Concat)
    fused_norm: bool = False
    region: str = "language"
    layers: OnlyLayers | None = None
    method: str = "forward"
    all_linear: bool = True
    tied: Tied | None = None
    experts: str | None = None
    fused_hf: str | None = None
    embedding: bool = False

    def __post_init__(self) -> None:
        check_path(self.path)
        self._check_experts()
        self._check_embedding()
        if not self.projections or (self.kind is not SiteKind.COLUMN and len(self.projections) > 1):
            raise LoraError(
                f"site {self.path!r}",
                reason=f"has {len(self.projections)} projections, and its kind is {self.kind}",
                cure="give it one projection; only a column site packs several",
            )
        stacked = [one for one in self.projections if one.stack]
        if stacked and (self.kind is SiteKind.REPLICATED or self.experts or any(one.sections for one in stacked)):
            raise LoraError(
                f"site {self.path!r}",
                reason="has a stack of weights together with experts, sections or a kind that no rank splits",
                cure="declare it COLUMN or ROW, without experts and sections",
            )
        if self.layers is not None and not self.per_layer:
            raise LoraError(
                f"site {self.path!r}",
                reason=f"exists once and is declared for layers of type {self.layers.layer_type}",
                cure="write {layer} for the layer number, or leave `layers` out",
            )
        if self.fused_norm and self.method != "forward":
            raise LoraError(
                f"site {self.path!r}",
                reason=f"its linear is {self.method!r}, which cannot return a normed input",
                cure="declare it without fused_norm",
            )

    def _check_experts(self) -> None:
        if self.experts is not None:
            check_expression(self.experts)
        if self.fused_hf is not None:
            check_path(self.fused_hf)
        numbered = [EXPERT in projection.hf for projection in self.projections]
        problem = None
        if self.experts is None:
            if any(numbered) or self.fused_hf is not None:
                problem = "names routed experts", "give the number of experts: experts='num_experts'"
        elif not all(numbered):
            problem = "has experts, and a projection without {expert} in its HF path", "write ....experts.{expert}...."
        elif (
            self.kind is SiteKind.REPLICATED
            or self.pack != Concat()
            or self.fused_norm
            or self.method != "forward"
            or self.tied
            or any(projection.sections for projection in self.projections)
        ):
            problem = (
                "has experts together with what no grouped linear has",
                "declare it COLUMN or ROW, packed as Concat(), without sections, fused_norm, method and tied",
            )
        if problem:
            raise LoraError(f"site {self.path!r}", reason=problem[0], cure=problem[1])

    def _check_embedding(self) -> None:
        linear = self.kind is not SiteKind.ROW or self.per_layer or self.experts or self.fused_norm
        more = any(one.stack or one.sections or one.padded_to for one in self.projections)
        if self.embedding and (linear or more or self.all_linear or self.method != "forward"):
            raise LoraError(
                f"site {self.path!r}",
                reason="is an embedding together with what no embedding has",
                cure="declare it ROW, once, with all_linear=False and nothing but a pack and `tied`",
            )

    @property
    def pads_input(self) -> bool:
        """Whether the input is a padded vocabulary."""
        return self.embedding and pads(self.pack)

    @property
    def name(self) -> str:
        """Last part of the host path, for example `linear_qkv`."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def per_layer(self) -> bool:
        """Whether the site repeats in every layer."""
        return "{layer}" in self.path
