"""Rotary positions as a HF config states them, plain or scaled for longer sequences. Needs no torch.

Keys and defaults are those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_plugins_sdk.errors import Diagnostic, LoraError, raise_if_any


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: slow pairs are slowed down further, the pairs between slow and fast ones in part.

    Args:
        factor: by how much the slow pairs are slowed down.
        low_freq_factor: pairs that turn fewer times than this in `original_max_position_embeddings` are slow.
        high_freq_factor: pairs that turn more often stay as they are.
        original_max_position_embeddings: longest sequence of the first training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN's (Peng et al. 2023): as Llama 3.1's, by the number of the pair, and the scores are scaled.

    Args:
        factor: by how much slow pairs are slowed down.
        beta_fast: pairs that turn more often than this in `original_max_position_embeddings` stay as they are.
        beta_slow: pairs that turn fewer times are slow.
        truncate: the bounds are whole numbers of pairs.
        attention_factor: factor on rotated queries and keys, so its square is on their scores.
        original_max_position_embeddings: longest sequence of the first training.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary positions of a model.

    Args:
        theta: base of the frequencies.
        percent: share of each head that is rotated.
        scaling: for sequences longer than those of the first training; None has plain positions.
    """

    theta: float
    percent: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None


_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
# What transformers needs and reads for each type. Any other key would be a request that nobody follows.
_NEEDED = {
    "default": frozenset[str](),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset({"factor", _ORIGINAL}),
}
_READ = _NEEDED | {
    "yarn": _NEEDED["yarn"] | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
_SCALING = frozenset({"short_factor", "long_factor"}).union(*_READ.values())
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_CURE = "use the checkpoint's own config.json, or build the model elsewhere and attach to it"


def rope_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what a config says beside them, from `rope_parameters` (transformers 5) or
    `rope_scaling` (transformers 4). One set of fields for each layer type is a `rope_type` that is a mapping.

    Raises:
        LoraError: either of them is no mapping.
    """
    fields = {name: hf_config[name] for name in ("rope_theta", "partial_rotary_factor") if name in hf_config}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf_config.get(key) or {}, Mapping):
            raise LoraError(f"{key} = {hf_config[key]!r}", reason="is no mapping of field to value", cure=_CURE)
    # transformers 5 reads the older key where a config has both, and nothing of the other.
    fields |= hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    fields = {name: value for name, value in fields.items() if value is not None}
    by_layer = {key: value.get("rope_type") for key, value in fields.items() if isinstance(value, Mapping)}
    rope_type = by_layer or fields.get("rope_type") or fields.get("type") or "default"
    return {"rope_theta": 10000.0, "partial_rotary_factor": 1.0} | fields | {"rope_type": rope_type}


def rope_problems(hf_config: Mapping[str, Any], *, percent: float = 1.0) -> list[Diagnostic]:
    """Types of rotary positions that :func:`~lora_plugins_sdk.hosts.gpt.build_gpt` does not have, and fields of those
    that it has which are missing or no number, contradict each other or would have no effect.

    Args:
        hf_config: HF config.json as a mapping.
        percent: share of each head that is rotated.
    """
    fields = _with_original_length(hf_config)
    kind = fields["rope_type"]
    if not isinstance(kind, str) or kind not in _READ:
        built = ", ".join(map(repr, _READ))
        found = [(f"rope_type = {kind!r}", f"is not built; there is {built}")]
    else:
        found = _unread(kind, fields) + _no_numbers(kind, fields) or _contradictions(kind, fields, percent)
    if hf_config.get("rope_scaling") and hf_config.get("rope_parameters"):
        read, unread = rope_fields(hf_config), rope_fields({**hf_config, "rope_scaling": None})
        lost = [key for key, value in unread.items() if read.get(key) != value]
        if lost:
            found.append(("rope_scaling and rope_parameters", f"say different things ({', '.join(lost)})"))
    return [Diagnostic(subject=subject, reason=reason, cure=_CURE) for subject, reason in found]


def read_rope(hf_config: Mapping[str, Any], *, percent: float = 1.0) -> Rope:
    """Rotary positions of a config: plain, `llama3` or `yarn`.

    Args:
        hf_config: HF config.json as a mapping.
        percent: share of each head that is rotated, of a model that rotates a part.

    Raises:
        LoraError: see :func:`rope_problems`.
    """
    raise_if_any("These rotary positions cannot be built:", rope_problems(hf_config, percent=percent))
    fields = _with_original_length(hf_config)
    scaling: Llama3Scaling | YarnScaling | None = None
    if fields["rope_type"] == "llama3":
        scaling = Llama3Scaling(**{name: fields[name] for name in _NEEDED["llama3"]})
    elif fields["rope_type"] == "yarn":
        scaling = YarnScaling(
            factor=fields["factor"],
            original_max_position_embeddings=fields[_ORIGINAL],
            beta_fast=fields.get("beta_fast") or _BETA_FAST,
            beta_slow=fields.get("beta_slow") or _BETA_SLOW,
            truncate=fields.get("truncate", True),
            attention_factor=_attention_factor(fields),
        )
    return Rope(theta=fields["rope_theta"], percent=percent, scaling=scaling)


def _with_original_length(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the length of the first training from where transformers looks for it."""
    fields = rope_fields(hf_config)
    if fields["rope_type"] in ("llama3", "yarn"):
        places = (hf_config.get(_ORIGINAL), fields.get(_ORIGINAL), hf_config.get("max_position_embeddings"))
        fields[_ORIGINAL] = next((length for length in places if length is not None), None)
    return fields


def _unread(kind: str, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    others = (_SCALING if kind == "default" else fields.keys() - _COMMON) - _READ[kind]
    given = sorted(name for name in others if fields.get(name) is not None)
    return [(f"{name} = {fields[name]!r}", f"has no effect with rope_type = {kind!r}") for name in given]


def _no_numbers(kind: str, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems = []
    for name in sorted({"rope_theta"} | _READ[kind] - {"truncate"}):
        value = fields.get(name)
        if value is None and name in _NEEDED[kind]:
            problems.append((name, f"is missing, and rope_type = {kind!r} needs it"))
        elif value is not None and not _positive(value) and not (name.startswith("mscale") and value == 0):
            problems.append((f"{name} = {value!r}", "is no number above 0"))
    return problems


def _contradictions(kind: str, fields: Mapping[str, Any], percent: float) -> list[tuple[str, str]]:
    if kind == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        return [(f"high_freq_factor = {fields['high_freq_factor']}", "is not above low_freq_factor")]
    if kind == "yarn" and (fields.get("beta_fast") or _BETA_FAST) < (fields.get("beta_slow") or _BETA_SLOW):
        return [(f"beta_fast = {fields.get('beta_fast')}", "is below beta_slow")]
    if kind == "yarn" and fields["rope_theta"] <= 1:
        return [(f"rope_theta = {fields['rope_theta']}", "is not above 1")]
    if kind == "yarn" and percent < 1.0 and _attention_factor(fields) != 1.0:
        return [("rope_type = 'yarn'", f"scales whole heads here, and {percent} of each is rotated")]
    return []


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _attention_factor(fields: Mapping[str, Any]) -> float:
    """transformers' own default where the config has none: 0.1 ln(factor) + 1, or the ratio of two such terms."""
    if fields.get("attention_factor") is not None:
        return fields["attention_factor"]

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(fields["factor"]) + 1.0 if fields["factor"] > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return term(fields["mscale"]) / term(fields["mscale_all_dim"])
    return term(1.0)
