"""An architecture: the table of sites of one model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lora_plugins_sdk.adapter_schema import AdapterSchema
from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.layers import OnlyLayers
from lora_plugins_sdk.multimodal import Multimodal, check_pattern, matching
from lora_plugins_sdk.pack import Pack
from lora_plugins_sdk.site import Site, Tied, check_path
from lora_plugins_sdk.spellings import Spellings, in_declared_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseWeight:
    """One host tensor of the frozen base and the HF tensors it is made of.

    Args:
        host: host parameter path; `{layer}` stands for the layer number.
        hf: HF tensor names, in pack order.
        pack: row layout when TP splits the rows; None when the tensor is not split by rows.
        layers: the layers that have it, where layers are of several types; every layer when None.
        offset: the host holds HF's values plus this (-1 for a norm that is zero-centred in the host and not in HF).
        sections: per HF tensor, the rows of the parts that TP splits each on its own (as in `Projection`); empty where
            each is split as a whole.
        split_columns: TP splits the second dimension (ROW weights).
        tied: under its flag the tensor is another one's alias: the host may lack it, and a checkpoint may hold a copy.

    Raises:
        LoraError: a placeholder other than `{layer}`, a width that is no integer expression, sections for another
            number of tensors, or layers for a path without `{layer}`.
    """

    host: str
    hf: tuple[str, ...]
    pack: Pack | None = None
    sections: tuple[tuple[str, ...], ...] = ()
    split_columns: bool = False
    layers: OnlyLayers | None = None
    offset: float = 0.0
    tied: Tied | None = None

    def __post_init__(self) -> None:
        for path in (self.host, *self.hf):
            check_path(path)
        for expression in (expression for parts in self.sections for expression in parts):
            check_expression(expression)
        if self.layers is not None and "{layer}" not in self.host:
            raise LoraError(
                f"base weight {self.host!r}",
                reason=f"exists once and is declared for layers of type {self.layers.layer_type}",
                cure="write {layer} for the layer number, or leave `layers` out",
            )
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
        refuses: `model_type` -> why it is not served, of models that one might take for this one.
        sites: the adaptable linears.
        base_weights: host tensors that belong to no site (norms, embedding). Site weights are derived from the sites.
        multimodal: how a multimodal checkpoint wraps this language model; None when there is none.
        left_alone: wildcards for HF tensors that the model does not hold and a checkpoint may (`model.visual.*`,
            `mtp.*`). Whatever else a checkpoint has too much is an error.
        num_layers: config expression for the number of layers.
        vocabulary: config expression for the number of tokens. The logits have a column for each; columns beyond are
            padding and belong to none.
        fallbacks: expressions for config keys that HF lets a config omit.
        spellings: where a config may come under other keys than transformers', the key that tells -> declared key ->
            key that holds its value then. A config with both must say the same in both.
        adapter_schemas: schemas of other names that adapters of this model come in.
        tiny_config: HF config of a model small enough for `lora-plugins check`; empty when there is none.
        quickstart_config: HF config, without a vocabulary, of a model that learns something within minutes on a CPU,
            for `lora-grpo quickstart`; empty when there is none.
        left_padding: whether transformers' model gives a row that is padded on the left what it gives the row alone. A
            model that counts the padding as positions does not, and rollouts on transformers then decode prompts of one
            length at a time.
        tiny_values: wildcard of HF tensor names -> value that the conformance kit draws them around, where the initial
            values of transformers give a model that blows up rounding errors (fast decays before a norm).
        lacks: capability -> reason, for what the conformance kit must not expect (the names are the kit's).

    Raises:
        LoraError: one host path declared twice, a size that is no integer expression, or a wildcard of `left_alone`
            that begins with a wildcard or matches a tensor that the model needs.
    """

    name: str
    model_types: tuple[str, ...]
    sites: tuple[Site, ...]
    base_weights: tuple[BaseWeight, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    multimodal: Multimodal | None = None
    left_alone: tuple[str, ...] = ()
    num_layers: str = "num_hidden_layers"
    vocabulary: str = "vocab_size"
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    spellings: Spellings = field(default_factory=dict)
    adapter_schemas: tuple[AdapterSchema, ...] = ()
    tiny_config: Mapping[str, object] = field(default_factory=dict)
    quickstart_config: Mapping[str, object] = field(default_factory=dict)
    left_padding: bool = True
    tiny_values: Mapping[str, float] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for expression in (self.num_layers, self.vocabulary, *self.fallbacks.values()):
            check_expression(expression)
        declared = [*(f"{site.path}.weight" for site in self.sites), *(weight.host for weight in self.base_weights)]
        twice = [path for path, count in Counter(declared).items() if count > 1]
        if twice:
            raise LoraError(
                f"architecture {self.name!r}",
                reason=f"declares the host weight {twice[0]!r} twice",
                cure="declare each host path once: as a site, or in base_weights",
            )

        for pattern in self.left_alone:
            check_pattern(pattern)
            taken = matching(pattern, self._hf_tensors())
            if taken:
                raise LoraError(
                    f"architecture {self.name!r}",
                    reason=f"leaves {pattern!r} alone and needs {taken[0]!r}, which matches it",
                    cure="narrow the wildcard",
                )

    def _hf_tensors(self) -> list[str]:
        from_sites = [f"{one.hf}.weight" for site in self.sites for one in site.projections]
        return [*from_sites, *(name for weight in self.base_weights for name in weight.hf)]

    def dims(self, hf_config: Mapping[str, object]) -> ModelDims:
        """Sizes of one model of this architecture: of the language model, where a multimodal config wraps one.

        Raises:
            LoraError: the config belongs to another model type, or contradicts itself.
        """
        text = self.multimodal.text_config(hf_config) if self.multimodal is not None else None
        named = [hf_config.get("model_type")]
        if text is not None and "model_type" in text:
            named.append(text["model_type"])
        for model_type in named:
            if model_type not in self.model_types:
                raise LoraError(
                    f"model_type {model_type!r}",
                    reason=self.refuses.get(str(model_type))
                    or f"architecture {self.name!r} serves {', '.join(self.model_types)}",
                    cure="choose the plugin for this model type (`lora-plugins list`) or the right config.json",
                )
        return ModelDims(in_declared_keys({**hf_config, **(text or {})}, self.spellings), self.fallbacks)

    def of_config(self, hf_config: Mapping[str, object]) -> Architecture:
        """The architecture with the HF names that a checkpoint with this config has.

        A multimodal checkpoint keeps the language model under a longer prefix; every other is named as declared.
        """
        if self.multimodal is None or self.multimodal.text_config(hf_config) is None:
            return self
        wrapped = self.multimodal.wrapped
        return replace(
            self,
            sites=tuple(
                replace(
                    site,
                    projections=tuple(replace(one, hf=wrapped(one.hf)) for one in site.projections),
                    tied=site.tied and replace(site.tied, to=wrapped(site.tied.to)),
                    fused_hf=site.fused_hf and wrapped(site.fused_hf),
                )
                for site in self.sites
            ),
            base_weights=tuple(
                replace(
                    weight,
                    hf=tuple(map(wrapped, weight.hf)),
                    tied=weight.tied and replace(weight.tied, to=wrapped(weight.tied.to)),
                )
                for weight in self.base_weights
            ),
        )
