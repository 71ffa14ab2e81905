"""An adapter in SGLang's form back as PEFT has it: the inverse of `for_sglang`, product by product."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_config import minimal_config, read_lora_config
from lora_plugins_sdk.peft_names import FACTOR, factor_name
from lora_plugins_sdk.serving.sglang_groups import SHARED, Pair, shared_factor
from lora_plugins_sdk.serving.sglang_places import EMBEDDING, family_of, layer_prefix, peft_path, place_of, text_config

if TYPE_CHECKING:
    from torch import Tensor

_MODULE = re.compile(r"lm_head|model\.embed_tokens|model\.layers\.\d+\..+")
_SPLIT = re.compile(r"(?P<stem>.+\.linear_attn\.in_proj_)(?P<part>[qkv])")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftForm:
    """What an adapter in SGLang's form says in PEFT's.

    Args:
        tensors: PEFT tensor name -> full factor.
        config: `adapter_config.json`, minimal.
        left_out: modules in SGLang's terms whose factors are all zero, as those that fill a group up.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    left_out: tuple[str, ...]


def from_sglang(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], hf_config: Mapping[str, Any], base_names: Iterable[str]
) -> PeftForm:
    """Translate back. `for_sglang` of the result gives the same tensors and scale again.

    Args:
        tensors: as `for_sglang` names them.
        config: their `adapter_config.json`.
        hf_config: the base's `config.json`.
        base_names: tensor names of the base, which tell what its layers' names begin with.

    Raises:
        LoraError: a name that `for_sglang` does not give, a factor without its partner, or q, k and v of one gated
            delta net with different A, which one `in_proj_qkv` cannot hold.
    """
    read_lora_config(config)
    family, prefix = family_of(hf_config), layer_prefix(base_names, hf_config)
    whole: dict[str, Pair] = {}
    split: dict[str, dict[str, Pair]] = {}
    left_out: list[str] = []
    for module, pair in _pairs(tensors).items():
        parts = _SPLIT.fullmatch(module)
        if parts is not None:
            split.setdefault(parts["stem"], {})[parts["part"]] = pair
        elif _is_zero(pair):
            left_out.append(module)
        else:
            whole[module] = pair
    for stem, parts in split.items():
        # Where A is zero, zeros fill nothing up: they are rows of one projection beside rows that are not zero.
        if all(map(_is_zero, parts.values())):
            left_out += [f"{stem}{part}" for part in parts]
        else:
            whole[f"{stem}qkv"] = _joined(stem, parts)
    named: dict[str, Tensor] = {}
    modules = []
    for module, pair in whole.items():
        path = module if module == "lm_head" else prefix + peft_path(module.removeprefix("model."), family)
        place = place_of(path, family)
        if place is None or place.module != module.removeprefix("model."):
            raise _unknown(module)
        embedding = place.target == EMBEDDING
        if embedding:
            pair = Pair(a=_with_padding(pair.a, hf_config), b=pair.b)
        if SHARED in module:
            pair = shared_factor(pair, place)
        modules.append(path)
        named[factor_name(path, "A", embedding=embedding)] = pair.a
        named[factor_name(path, "B", embedding=embedding)] = pair.b
    leaves = sorted({module.rsplit(".", 1)[-1] for module in modules})
    return PeftForm(
        tensors=dict(sorted(named.items())),
        config=minimal_config({**config, "target_modules": leaves}, modules),
        left_out=tuple(sorted(left_out)),
    )


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = FACTOR.fullmatch(name)
        embedding = found is not None and found["embedding"] is not None
        if (
            found is None
            or _MODULE.fullmatch(found["module"]) is None
            or embedding != (found["module"].rsplit(".", 1)[-1] == EMBEDDING)
        ):
            raise _unknown(name)
        factors.setdefault(found["module"], {})[found["factor"]] = tensor
    for module, found in factors.items():
        if found.keys() != {"A", "B"}:
            raise LoraError(module, reason="has one factor of two", cure="export the adapter for SGLang again")
    return {module: Pair(a=found["A"], b=found["B"]) for module, found in factors.items()}


def _joined(stem: str, parts: Mapping[str, Pair]) -> Pair:
    """One `in_proj_qkv` of its three row blocks."""
    first = next(iter(parts.values()))
    if parts.keys() != set("qkv") or any(_differ(one.a, first.a) for one in parts.values()):
        raise LoraError(
            f"{stem}q, {stem}k and {stem}v",
            reason="have different lora_A; the base has one projection for the three, with one lora_A",
            cure="merge the adapter where it is served, or give the PEFT directory that it was made from",
        )
    rows = [parts[part].b for part in "qkv"]
    b = first.b.new_empty((sum(len(one) for one in rows), first.b.shape[-1]))
    for block, one in zip(b.split([len(one) for one in rows]), rows, strict=True):
        block.copy_(one)
    return Pair(a=first.a, b=b)


def _with_padding(a: Tensor, hf_config: Mapping[str, Any]) -> Tensor:
    """A of an embedding `[rank, tokens]` with zero columns for the padding of its vocabulary, as HF has it."""
    text = text_config(hf_config)
    if a.shape[1] != text.get("unpadded_vocab_size"):
        return a
    padded = a.new_zeros(a.shape[0], text["vocab_size"])
    padded[:, : a.shape[1]] = a
    return padded


def _is_zero(pair: Pair) -> bool:
    return not bool(pair.a.any()) and not bool(pair.b.any())


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or bool((one != other).any())


def _unknown(name: str) -> LoraError:
    return LoraError(
        name,
        reason="is no name of SGLang's form for this base",
        cure="give the base that the adapter was exported for, or the PEFT directory that it was made from",
    )
