"""A language model inside a multimodal checkpoint, and tensors of a checkpoint that are not the language model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lora_plugins_sdk.errors import LoraError


@dataclass(frozen=True, kw_only=True, slots=True)
class Multimodal:
    """How a multimodal checkpoint wraps the language model.

    Args:
        config_key: where its config keeps the language model's own; a config that has it is a multimodal one.
        prefix: what HF names of the language model begin with, as declared.
        wrapped_prefix: what they begin with in a multimodal checkpoint. Names without `prefix` are the same in both.
    """

    config_key: str = "text_config"
    prefix: str = "model."
    wrapped_prefix: str = "model.language_model."

    def text_config(self, hf_config: Mapping[str, object]) -> Mapping[str, object] | None:
        """The language model's own config; None when the config is of the language model alone."""
        text = hf_config.get(self.config_key)
        return text if isinstance(text, Mapping) else None

    def prefix_in(self, hf_config: Mapping[str, object]) -> str:
        """What HF names of the language model begin with in a checkpoint that has this config."""
        return self.prefix if self.text_config(hf_config) is None else self.wrapped_prefix

    def wrapped(self, name: str) -> str:
        """A declared HF name as the multimodal checkpoint has it; a name that has it already stays."""
        if name.startswith(self.wrapped_prefix) or not name.startswith(self.prefix):
            return name
        return self.wrapped_prefix + name.removeprefix(self.prefix)


def check_pattern(pattern: str) -> None:
    """Refuse a wildcard that could match anything.

    Raises:
        LoraError: it begins with a wildcard.
    """
    if not pattern or pattern[0] in "*?[":
        raise LoraError(
            f"wildcard {pattern!r}",
            reason="begins with a wildcard: it would take tensors that nobody knows",
            cure="begin it with the names' own prefix, as in 'model.visual.*'",
        )


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a wildcard matches; `*` takes dots too."""
    return [name for name in names if fnmatchcase(name, pattern)]
