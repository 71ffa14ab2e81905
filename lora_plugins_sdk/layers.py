"""Which layers of a model have a site: models whose layers are of several types say so in their HF config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError

# Far above any model; a damaged config would fill the memory with names instead.
_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTypes:
    """The types that a model's layers have.

    Args:
        types: every type that the architecture knows.
        key: config key of the list with one type per layer.
        every: where the config lacks that list, config expression n: each n-th layer is of the last of `types`, the
            others of the first. None when the config must have the list.

    Raises:
        LoraError: `every` is no integer expression, or asks for one of two types and there are not two.
    """

    types: tuple[str, ...]
    key: str = "layer_types"
    every: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_expression(self.every)
            if len(self.types) != 2:
                raise LoraError(
                    f"layer types {', '.join(self.types)}",
                    reason=f"are not two, and every={self.every!r} tells two apart",
                    cure="leave `every` out, or give two types",
                )

    def only(self, layer_type: str) -> OnlyLayers:
        """The layers of one type, for `Site(layers=...)` and `BaseWeight(layers=...)`.

        Raises:
            LoraError: there is no such type.
        """
        if layer_type not in self.types:
            raise LoraError(
                f"layer type {layer_type!r}",
                reason=f"is none of {', '.join(self.types)}",
                cure="name one of them, or add it to the LayerTypes",
            )
        return OnlyLayers(of=self, layer_type=layer_type)

    def resolve(self, dims: ModelDims, count: int) -> Sequence[str]:
        """The type of each of `count` layers.

        Raises:
            LoraError: the config has no such list, or one of another length or with other types.
        """
        found = dims.config.get(self.key)
        cure = "use the config.json that belongs to this model type"
        if found is None and self.every is not None:
            period = dims.resolve(self.every)
            if period < 1:
                raise LoraError(f"{self.every}={period}", reason="is no number of layers", cure=cure)
            return [self.types[-1] if (layer + 1) % period == 0 else self.types[0] for layer in range(count)]
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
            state = f"is no list of {count} types" if found is not None else "is missing"
            raise LoraError(f"config key {self.key!r}", reason=state, cure=cure)
        unknown = sorted({str(one) for one in found} - set(self.types))
        if unknown:
            raise LoraError(
                f"config key {self.key!r}",
                reason=f"names layers of type {', '.join(unknown)}; this architecture knows {', '.join(self.types)}",
                cure="use a plugin that serves such layers",
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlyLayers:
    """Layers of one type."""

    of: LayerTypes
    layer_type: str


def layers_with(path: str, only: OnlyLayers | None, dims: ModelDims, count: int) -> Sequence[int | None]:
    """Layers that have what is declared at a path: some or all of `count` where the path has a `{layer}`, else
    `[None]`.

    Raises:
        LoraError: the config does not say which layers are of which type.
    """
    if "{layer}" not in path:
        return [None]
    if only is None:
        return range(count)
    return [layer for layer, kind in enumerate(only.of.resolve(dims, count)) if kind == only.layer_type]


def number_of_layers(dims: ModelDims, expression: str) -> int:
    """The model's number of layers.

    Raises:
        LoraError: it is none.
    """
    layers = dims.resolve(expression)
    if not 0 < layers <= _MOST_LAYERS:
        raise LoraError(
            f"{expression} = {layers}",
            reason="is no number of layers",
            cure="use the config.json that belongs to this model type",
        )
    return layers
