"""A PEFT adapter as SGLang takes it: its module names, whole groups of projections, normalised targets, plain alpha."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any
from lora_plugins_sdk.peft_config import read_lora_config
from lora_plugins_sdk.peft_names import FACTOR
from lora_plugins_sdk.serving.sglang_groups import Pair, complete_groups
from lora_plugins_sdk.serving.sglang_places import (
    EMBEDDING,
    HELD_AT_ZERO,
    OUTSIDE,
    Place,
    family_of,
    file_name,
    place_of,
    served_leaves,
    text_config,
)

if TYPE_CHECKING:
    from torch import Tensor

ENGINE = "sglang"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingAdapter:
    """An adapter for one engine.

    Args:
        tensors: name -> tensor, sorted by name; no two share memory.
        config: `adapter_config.json`.
        shared_outer_experts: whether experts share their outer factors, which SGLang must be started for
            (`--experts-shared-outer-loras`). False for routed experts with factors of their own, None without experts.
        left_out: modules whose delta is exactly zero and that the engine cannot serve.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    shared_outer_experts: bool | None
    left_out: tuple[str, ...]


def for_sglang(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> ServingAdapter:
    """Translate an adapter; its values are those of PEFT's product `scale * B A`, bit for bit.

    Args:
        tensors: PEFT tensor name -> full factor. Experts are 2-D under `experts.E.`, or 3-D over all experts.
        config: `adapter_config.json` of plain LoRA.
        hf_config: the base's `config.json`.

    Raises:
        LoraError: not plain LoRA, a module that SGLang cannot serve, two modules that are one to it, rows for
            padding that are not zero, an embedding or a head of another vocabulary, a factor without its partner or
            of another rank than the config's; everything is listed.
    """
    lora = read_lora_config(config)
    family = family_of(hf_config)
    problems: list[Diagnostic] = []
    pairs: dict[Place, Pair] = {}
    left_out: list[str] = []
    for module, factors in _by_module(tensors, problems).items():
        if not factors.keys() >= {"A", "B"}:
            problems.append(_problem(module, "has one factor of two", "export the adapter again"))
            continue
        pair = Pair(a=factors["A"], b=factors["B"])
        place = place_of(module, family)
        if place is not None:
            if place.target == "lm_head":
                pair = Pair(a=pair.a, b=_of_tokens(module, "rows of lora_B", pair.b, hf_config, problems))
            elif place.target == EMBEDDING:
                columns = _of_tokens(module, "columns of lora_embedding_A", pair.a.mT, hf_config, problems)
                pair = Pair(a=columns.mT.contiguous(), b=pair.b)
            problems += _misshapen(module, pair, place, lora.rank, hf_config)
            if place in pairs:
                problems.append(
                    _problem(module, f"and another module are both {place.module}", "export the adapter again")
                )
            pairs[place] = pair
        elif module.endswith(HELD_AT_ZERO) and not bool((pair.b != 0).any()):
            left_out.append(module)
        else:
            problems.append(
                _problem(
                    module,
                    "SGLang serves no LoRA there",
                    f"train without it, or merge the adapter into the base; SGLang serves {' and '.join(OUTSIDE)} and, "
                    f"in the layers of the language model, {', '.join(served_leaves(family))}",
                )
            )
    raise_if_any("SGLang cannot serve this adapter:", problems)
    shared_outer = _shared_outer(pairs)
    named = complete_groups(pairs, hf_config, shared_outer=shared_outer)
    return ServingAdapter(
        tensors=dict(sorted(_names(named))),
        config=_config(config, lora.scale * lora.rank, sorted({place.target for place in pairs})),
        shared_outer_experts=shared_outer,
        left_out=tuple(sorted(left_out)),
    )


def _by_module(tensors: Mapping[str, Tensor], problems: list[Diagnostic]) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = FACTOR.fullmatch(name)
        if found is None or (found["embedding"] is not None) != (found["module"].rsplit(".", 1)[-1] == EMBEDDING):
            problems.append(
                _problem(name, "is no LoRA factor of a linear or of the embedding", "export the adapter without it")
            )
        else:
            modules.setdefault(found["module"], {})[found["factor"]] = tensor
    if not modules:
        problems.append(_problem("factors", "there are none", "export the adapter again"))
    return modules


def _of_tokens(
    module: str, named: str, per_token: Tensor, hf_config: Mapping[str, Any], problems: list[Diagnostic]
) -> Tensor:
    """A factor `[vocabulary, rank]` without zero rows for the vocabulary's padding, which SGLang has no place for."""
    text = text_config(hf_config)
    unpadded = text.get("unpadded_vocab_size")
    rows = text.get("vocab_size") if unpadded is None else unpadded
    found = per_token.shape[0]
    if rows is None or found == rows:
        return per_token
    if unpadded is None or found < rows:
        cure = "give the base that the adapter was made for"
        problems.append(_problem(module, f"has {found} {named}, and the base has {rows} tokens", cure))
        return per_token
    if bool((per_token[rows:] != 0).any()):
        problems.append(
            _problem(
                module,
                f"has {found} {named}, and those beyond {rows} are padding and not all zero",
                "give the base that the adapter was made for",
            )
        )
    return per_token[:rows].clone()


def _misshapen(module: str, pair: Pair, place: Place, rank: int, hf_config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    packed = (place.experts and place.expert is None) or ".shared_experts." in place.module
    a, b = list(pair.a.shape), list(pair.b.shape)
    if len(a) != len(b) or len(a) != 2 + packed or a[-2] != rank or b[-1] != rank:
        yield _problem(
            module,
            f"has lora_A {a} and lora_B {b}; SGLang takes "
            + ("[experts or 1, rank, in] and [experts or 1, out, rank]" if packed else "[rank, in] and [out, rank]"),
            f"export the adapter again with r={rank}",
        )
    layers = text_config(hf_config).get("num_hidden_layers")
    if place.layer is not None and isinstance(layers, int) and place.layer >= layers:
        yield _problem(module, f"the base has {layers} layers", "give the base that the adapter was made for")


def _shared_outer(pairs: Mapping[Place, Pair]) -> bool | None:
    """Whether the outer factors of experts are shared; one answer for all of them.

    Shared experts of one tensor always share them, and have copies where routed experts do not (`complete_groups`).
    """
    forms = {True: "", False: ""}
    stacked = None
    for place, pair in pairs.items():
        if not place.experts:
            stacked = True if ".shared_experts." in place.module else stacked
            continue
        shared = False
        if place.expert is None:
            outer = pair.b if place.target == "down_proj" else pair.a
            inner = pair.a if place.target == "down_proj" else pair.b
            sizes = {outer.shape[0], inner.shape[0]}
            shared = outer.shape[0] == 1 and inner.shape[0] > 1
            if not shared and len(sizes) > 1:
                raise LoraError(
                    place.module,
                    reason=f"shares the factor beside the experts' inner width ({outer.shape[0]} against "
                    f"{inner.shape[0]}); SGLang shares A of gate and up and B of down",
                    cure="train experts with the shared outer layout, or with factors of their own",
                )
        forms[shared] = place.module
    if all(forms.values()):
        raise LoraError(
            forms[True],
            reason=f"shares its outer factor over the experts and {forms[False]} does not; SGLang takes one layout",
            cure="train all experts with the same layout",
        )
    return True if forms[True] else False if forms[False] else stacked


def _names(named: Mapping[str, Pair]) -> Iterator[tuple[str, Tensor]]:
    for module, pair in named.items():
        yield file_name(module, "A"), pair.a
        yield file_name(module, "B"), pair.b


def _config(config: Mapping[str, Any], alpha: float, targets: list[str]) -> dict[str, Any]:
    """SGLang scales by `lora_alpha / r` whatever `use_rslora` says, so that scale is in alpha here."""
    return {
        "base_model_name_or_path": config.get("base_model_name_or_path") or "",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": config["r"],
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }


def _problem(subject: str, reason: str, cure: str) -> Diagnostic:
    return Diagnostic(subject=subject, reason=reason, cure=cure)
