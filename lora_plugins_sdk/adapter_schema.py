"""Other schemas of names that adapters of a model come in (`layers.3.attn.wq_du`), as data; both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.peft_names import FACTOR, factor_name

if TYPE_CHECKING:
    from re import Match

    from torch import Tensor

    from lora_plugins_sdk.peft_files import PeftAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSchema:
    """Names that differ from HF's part by part.

    Args:
        name: the schema's, for messages.
        parts: part of a module path -> HF's (`{"wq_du": "q_proj", "attn": "self_attn"}`). Of several for one of HF's
            the first is written, all are read.
        prefix: what names of modules within layers begin with in place of the HF ones' (`model.llm.`).
        wrappers: parts that may stand before a module path, in any number (`model`, `llm`).
    """

    name: str
    parts: Mapping[str, str]
    prefix: str
    wrappers: tuple[str, ...]

    def short_name(self, hf_module: str) -> str:
        """A HF module path, or its end, in the schema's parts: `self_attn.q_proj` -> `attn.wq_du`."""
        own = {hf: part for part, hf in reversed(list(self.parts.items()))}
        return ".".join(own.get(part, part) for part in hf_module.split("."))

    def read(self, adapter: PeftAdapter, modules: Iterable[str]) -> PeftAdapter:
        """An adapter of this schema under HF's names; one without any of the schema's names stays as it is.

        Args:
            adapter: as saved. Tensors that name none of `modules` keep their names.
            modules: HF names of the model's projections (`module_names`).

        Raises:
            LoraError: two tensors are one under HF's names; all are listed.
        """
        found = {name: match for name in adapter.tensors if (match := FACTOR.fullmatch(name))}
        if all(self._in_hf_parts(one["module"]) == one["module"] for one in found.values()):
            return adapter
        known = {self._bare(one): one for one in modules}
        names = {
            name: _renamed(match, known[bare])
            for name, match in found.items()
            if (bare := self._bare(match["module"])) in known
        }
        first: dict[str, str] = {}
        problems = [
            Diagnostic(
                subject=name,
                reason=f"and {other} are both {names.get(name, name)}",
                cure="save the adapter again with one name for each module",
            )
            for name in adapter.tensors
            if (other := first.setdefault(names.get(name, name), name)) != name
        ]
        raise_if_any(f"this adapter cannot be read in the {self.name} schema:", problems)
        tensors = {hf: adapter.tensors[name] for hf, name in first.items()}
        return replace(adapter, tensors=tensors, config=_retargeted(adapter.config, self._in_hf_parts))

    def write(self, adapter: PeftAdapter, modules: Iterable[str]) -> PeftAdapter:
        """An adapter under HF's names in this schema; `read` gives it back.

        Args:
            adapter: as exported.
            modules: HF names of the model's projections (`module_names`).

        Raises:
            LoraError: tensors for which the schema has no name, as a single routed expert's; all are listed.
        """
        modules = set(modules)
        tensors: dict[str, Tensor] = {}
        problems = []
        for name, tensor in adapter.tensors.items():
            found = FACTOR.fullmatch(name)
            if found is None or found["module"] not in modules:
                problems.append(
                    Diagnostic(
                        subject=name,
                        reason=f"has no name in the {self.name} schema",
                        cure="train routed experts with expert_sharing='outer', and leave out what is no LoRA factor",
                    )
                )
                continue
            bare = self.short_name(self._bare(found["module"]))
            prefix = self.prefix if bare.startswith("layers.") else ""
            tensors[_renamed(found, f"{prefix}{bare}")] = tensor
        raise_if_any(f"this adapter cannot be written in the {self.name} schema:", problems)
        return replace(adapter, tensors=tensors, config=_retargeted(adapter.config, self.short_name))

    def _in_hf_parts(self, module: str) -> str:
        return ".".join(self.parts.get(part, part) for part in module.split("."))

    def _bare(self, module: str) -> str:
        """A module path of either kind in HF's parts, without what may stand before it."""
        parts = self._in_hf_parts(module).split(".")
        while parts[0] in self.wrappers and len(parts) > 1:
            parts = parts[1:]
        return ".".join(parts)


def _renamed(factor: Match[str], module: str) -> str:
    return factor_name(module, factor["factor"], embedding=factor["embedding"] is not None)


def _retargeted(config: Mapping[str, Any], rename: Callable[[str], str]) -> Mapping[str, Any]:
    named = config.get("target_modules")
    if not isinstance(named, list | tuple):
        return config
    return {**config, "target_modules": sorted({rename(one) for one in named})}
