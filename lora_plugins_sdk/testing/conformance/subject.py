"""What is put to the test: an architecture, a tiny HF config, and what the plugin says it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_plugins_sdk.config import LoraConfig
from lora_plugins_sdk.dims import read_hf_config
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.selection import load_plugin
from lora_plugins_sdk.site import EXPERT
from lora_plugins_sdk.table import ParameterTable, derive_table
from lora_plugins_sdk.targets import candidates
from lora_plugins_sdk.testing.conformance.capability import check_lacks

OPTIONS = ("rank", "alpha", "expert_sharing", "seed", "sequence_length")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Names and numbers only, so that every rank can build the same.

    Args:
        architecture: its name.
        plugin: the plugin's name or file where two serve one architecture; None otherwise.
        config_json: the tiny HF config as JSON.
        lacks: pairs of capability and reason.
        rank, alpha: of the adapter, rank 2 or more; alpha is 1.5 * rank when None. With rank 8 the numbers rank,
            sqrt(rank), alpha, alpha / rank and 2 all differ, so that each forgotten or doubled factor is told from the
            others.
        expert_sharing: of an adapter on routed experts (see `LoraConfig`).
        seed: seed of base weights, adapter and batches.
        sequence_length: tokens of each sample; TP * CP * 2 divides it.
    """

    architecture: str
    plugin: str | None = None
    config_json: str
    lacks: tuple[tuple[str, str], ...] = ()
    rank: int = 8
    alpha: float | None = None
    expert_sharing: str = "none"
    seed: int = 0
    sequence_length: int = 16

    @classmethod
    def of(
        cls,
        architecture: str,
        *,
        hf_config: Mapping[str, Any] | str | Path | None = None,
        plugin: str | None = None,
        lacks: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Subject:
        """A subject from what an author writes; the architecture's own `tiny_config` and `lacks` where None is given.

        Args:
            architecture, hf_config, plugin, lacks: as in `PluginConformance`.
            options: fields of `Subject` named in `OPTIONS`.

        Raises:
            LoraError: no such architecture or option, no config, or an opt-out that is none.
        """
        if unknown := options.keys() - set(OPTIONS):
            raise LoraError(
                f"option {min(unknown)!r} of the conformance kit",
                reason="is unknown",
                cure=f"use {', '.join(OPTIONS)}",
            )
        declared = load_plugin(architecture=architecture, plugin=plugin).architecture
        config = dict(declared.tiny_config if hf_config is None else read_hf_config(hf_config))
        if not config:
            raise LoraError(
                f"architecture {architecture!r}",
                reason="declares no tiny_config, so there is no model to check it with",
                cure="declare one in the Architecture, or give a HF config (hf_config, --hf-config)",
            )
        lacks = dict(declared.lacks if lacks is None else lacks)
        check_lacks(lacks)
        return cls(
            architecture=architecture,
            plugin=plugin,
            config_json=json.dumps(config, sort_keys=True),
            lacks=tuple(sorted(lacks.items())),
            **options,
        )

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        """The tiny HF config."""
        return json.loads(self.config_json)

    @cached_property
    def selected(self) -> SelectedPlugin:
        """The plugin, selected in this process."""
        return load_plugin(architecture=self.architecture, plugin=self.plugin)

    def __getstate__(self) -> dict[str, Any]:
        # What was looked up in one process does not travel to another: hooks are found there again.
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    def lora(self, **changes: Any) -> LoraConfig:
        """The adapter's hyper-parameters; by default every projection that the config lets one adapt is a target."""
        options = {
            "rank": self.rank,
            "alpha": 1.5 * self.rank if self.alpha is None else self.alpha,
            "seed": self.seed,
            "target_modules": self.targets(),
            "expert_sharing": self.expert_sharing,
        }
        return LoraConfig(**(options | changes))

    def targets(self) -> tuple[str, ...]:
        """Every projection as a target, the output head included, tied weights left out."""
        architecture = self.selected.architecture
        dims = architecture.dims(self.hf_config)
        free = [
            one.projection.hf.format(layer="*", expert=EXPERT)
            for one in candidates(architecture, self.hf_config)
            if one.site.tied is None or not dims.flag(one.site.tied.when)
        ]
        return tuple(dict.fromkeys(free))

    def site_modules(self) -> dict[str, list[str]]:
        """Host modules of each declared site, by the site's path; sites that the config does not have are empty."""
        places: dict[str, list[str]] = {site.path: [] for site in self.selected.architecture.sites}
        for one in candidates(self.selected.architecture, self.hf_config):
            if one.host not in places[one.site.path]:
                places[one.site.path].append(one.host)
        return places

    def refuse_options(self) -> None:
        """Refuse a rank, alpha or expert sharing with which the config has no adapter, while it has one without them.

        A plugin that has none at all is what the checks are for.

        Raises:
            LoraError: what is wrong with them.
        """
        try:
            self.table(RunFacts())
        except LoraError:
            try:
                replace(self, rank=2, alpha=None, expert_sharing="none").table(RunFacts())
            except Exception:
                return
            raise
        except Exception:
            return

    def table(self, facts: RunFacts, **changes: Any) -> ParameterTable:
        """The parameter table of a run, derived in this process.

        Raises:
            LoraError: the run is not possible.
        """
        # A layout is run facts with a name; the table must not depend on the name.
        sizes = {name: getattr(facts, name) for name in RunFacts.__slots__}
        return derive_table(self.selected, self.hf_config, self.lora(**changes), RunFacts(**sizes))
