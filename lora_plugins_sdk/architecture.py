"""An architecture: the table of sites of one model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.pack import Pack
from lora_plugins_sdk.site import Site, Tied, check_path


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseWeight:
    """One host tensor of the frozen base and the HF tensors it is made of.

    Args:
        host: host parameter path; `{layer}` stands for the layer number.
        hf: HF tensor names, in pack order.
        pack: row layout when TP splits the rows; None when the tensor is not split by rows.
        sections: per HF tensor, the rows of the parts that TP splits each on its own (as in `Projection`); empty where
            each is split as a whole.
        split_columns: TP splits the second dimension (ROW weights).
        tied: under its flag the tensor is another one's alias: the host may lack it, and a checkpoint may hold a copy.

    Raises:
        LoraError: a placeholder other than `{layer}`, a width that is no integer expression, or sections for another
            number of tensors.
    """

    host: str
    hf: tuple[str, ...]
    pack: Pack | None = None
    sections: tuple[tuple[str, ...], ...] = ()
    split_columns: bool = False
    tied: Tied | None = None

    def __post_init__(self) -> None:
        for path in (self.host, *self.hf):
            check_path(path)
        for expression in (expression for parts in self.sections for expression in parts):
            check_expression(expression)
        if self.sections and len(self.sections) != len(self.hf):
            raise LoraError(
                f"base weight {self.host!r}",
                reason=f"declares sections of {len(self.sections)} tensors and is made of {len(self.hf)}",
                cure="give one tuple of sections per HF tensor, () for one that TP splits as a whole",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Everything the SDK must know of a model type.

    Args:
        name: the architecture's name, as given to `lora-plugins describe`.
        model_types: values of `model_type` in HF configs that it serves.
        sites: the adaptable linears.
        base_weights: host tensors that belong to no site (norms, embedding). Site weights are derived from the sites.
        num_layers: config expression for the number of layers.
        fallbacks: expressions for config keys that HF lets a config omit.
        tiny_config: HF config of a model small enough for `lora-plugins check`; empty when there is none.
        lacks: capability -> reason, for what the conformance kit must not expect (the names are the kit's).

    Raises:
        LoraError: one host path declared twice, or a size that is no integer expression.
    """

    name: str
    model_types: tuple[str, ...]
    sites: tuple[Site, ...]
    base_weights: tuple[BaseWeight, ...] = ()
    num_layers: str = "num_hidden_layers"
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    tiny_config: Mapping[str, object] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for expression in (self.num_layers, *self.fallbacks.values()):
            check_expression(expression)
        declared = [*(f"{site.path}.weight" for site in self.sites), *(weight.host for weight in self.base_weights)]
        twice = [path for path, count in Counter(declared).items() if count > 1]
        if twice:
            raise LoraError(
                f"architecture {self.name!r}",
                reason=f"declares the host weight {twice[0]!r} twice",
                cure="declare each host path once: as a site, or in base_weights",
            )

    def dims(self, hf_config: Mapping[str, object]) -> ModelDims:
        """Sizes of one model of this architecture.

        Raises:
            LoraError: the config belongs to another model type.
        """
        model_type = hf_config.get("model_type")
        if model_type not in self.model_types:
            raise LoraError(
                f"model_type {model_type!r}",
                reason=f"architecture {self.name!r} serves {', '.join(self.model_types)}",
                cure="choose the plugin for this model type (`lora-plugins list`) or the right config.json",
            )
        return ModelDims(hf_config, self.fallbacks)
