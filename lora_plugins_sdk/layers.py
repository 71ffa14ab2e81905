"""Which layers of a model have a site: models whose layers are of several types say so in their HF config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_plugins_sdk.dims import ModelDims, check_expression
from lora_plugins_sdk.errors import LoraError

# Far above any model; a damaged config would fill the memory with names instead.
_MOST_LAYERS = 10_000
_CURE = "use the config.json that belongs to this model type"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTypes:
    """The types that a model's layers have.

    Args:
        types: every type that the architecture knows.
        key: config key of the list with one type per layer; None where configs have no such list.
        numbers: config key of another form of it, the numbers of the layers of the last of `types`; the others are of
            the first. A config with several forms must say the same in all.
        first: config key of another form of it, a number n: the first n layers are of the first of `types`, the others
            of the last.
        every: where the config has none of these, config expression n: each n-th layer is of the last of `types`, the
            others of the first. None when the config must say it.
        exempt: config key of the numbers of layers that are of the first type whatever `every` says.

    Raises:
        LoraError: `every` is no integer expression, two types are told apart and there are not two, or layers are
            exempt from nothing.
    """

    types: tuple[str, ...]
    key: str | None = "layer_types"
    numbers: str | None = None
    first: str | None = None
    every: str | None = None
    exempt: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_expression(self.every)
        for option in ("numbers", "first", "every"):
            if getattr(self, option) is not None and len(self.types) != 2:
                raise LoraError(
                    f"layer types {', '.join(self.types)}",
                    reason=f"are not two, and {option}={getattr(self, option)!r} tells two apart",
                    cure=f"leave `{option}` out, or give two types",
                )
        if self.exempt is not None and self.every is None:
            raise LoraError(
                f"layer types {', '.join(self.types)}",
                reason=f"have exempt={self.exempt!r} and no `every` to be exempt from",
                cure="give `every`, or leave `exempt` out",
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
            LoraError: the config does not say it, says it for another number of layers or with other types, or says
                two different things.
        """
        readers = {self.key: self._listed, self.numbers: self._numbered, self.first: self._counted}
        forms = {
            key: read(key, dims.config[key], count)
            for key, read in readers.items()
            if key is not None and dims.config.get(key) is not None
        }
        if not forms and self.every is not None:
            period = dims.resolve(self.every)
            if period < 1:
                raise LoraError(f"{self.every}={period}", reason="is no number of layers", cure=_CURE)
            exempt = self._exempt(dims.config, count)
            return self._with_last(lambda layer: (layer + 1) % period == 0 and layer not in exempt, count)
        if not forms:
            first, *others = [key for key in readers if key is not None]
            raise LoraError(
                f"config key {first!r}",
                reason="is missing" + (f", and there is no {' or '.join(map(repr, others))} either" if others else ""),
                cure=_CURE,
            )
        (key, found), *others = forms.items()
        for other, said in others:
            for layer, (one, two) in enumerate(zip(found, said, strict=True)):
                if one != two:
                    raise LoraError(
                        f"config keys {key!r} and {other!r}",
                        reason=f"contradict each other: layer {layer} is {one} by the first and {two} by the second",
                        cure=_CURE,
                    )
        return found

    def _listed(self, key: str, found: object, count: int) -> Sequence[str]:
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
            raise LoraError(f"config key {key!r}", reason=f"is no list of {count} types", cure=_CURE)
        unknown = sorted({str(one) for one in found} - set(self.types))
        if unknown:
            raise LoraError(
                f"config key {key!r}",
                reason=f"names layers of type {', '.join(unknown)}; this architecture knows {', '.join(self.types)}",
                cure="use a plugin that serves such layers",
            )
        return found

    def _numbered(self, key: str, found: object, count: int) -> Sequence[str]:
        last = _numbers(key, found, count)
        return self._with_last(lambda layer: layer in last, count)

    def _exempt(self, config: Mapping[str, object], count: int) -> set[int]:
        found = config.get(self.exempt) if self.exempt is not None else None
        return set() if found is None else _numbers(str(self.exempt), found, count)

    def _counted(self, key: str, found: object, count: int) -> Sequence[str]:
        if type(found) is not int or not 0 <= found <= count:
            raise LoraError(f"config key {key!r}", reason=f"is no number from 0 to {count}", cure=_CURE)
        return self._with_last(lambda layer: layer >= found, count)

    def _with_last(self, is_last: Callable[[int], bool], count: int) -> Sequence[str]:
        return [self.types[-1] if is_last(layer) else self.types[0] for layer in range(count)]


def _numbers(key: str, found: object, count: int) -> set[int]:
    """Numbers of layers, of a config's list.

    Raises:
        LoraError: it is none.
    """
    whole = isinstance(found, Sequence) and not isinstance(found, str) and all(type(one) is int for one in found)
    if not whole or any(not 0 <= one < count for one in found):  # type: ignore[attr-defined]
        raise LoraError(f"config key {key!r}", reason=f"is no list of numbers from 0 to {count - 1}", cure=_CURE)
    return set(found)  # type: ignore[call-overload]


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
