"""Checks of one loaded plugin, before any of its hooks is called in a run."""

from __future__ import annotations

import inspect
from typing import Any

from pluggy import PluginValidationError

from lora_plugins_sdk import defaults
from lora_plugins_sdk.architecture import Architecture
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hookspecs import HOOKSPEC_API, PROJECT
from lora_plugins_sdk.manager import new_manager

HOOK_PREFIX = "lora_"
OBSERVER_FLAG = "lora_observer"


def check_api(plugin: Any) -> tuple[int, int] | None:
    """The hook API that the plugin asks for in `requires_api = (major, minor)`; None when it does not say.

    Raises:
        LoraError: this SDK's hook API does not serve it.
    """
    wanted = getattr(plugin, "requires_api", None)
    if wanted is None:
        return None
    if not (isinstance(wanted, tuple) and len(wanted) == 2 and all(type(part) is int for part in wanted)):
        raise LoraError(
            f"requires_api = {wanted!r}",
            reason="not a pair of integers",
            cure=f"write requires_api = {HOOKSPEC_API}",
        )
    major, minor = HOOKSPEC_API
    if wanted[0] != major or wanted[1] > minor:
        newer = wanted > HOOKSPEC_API
        raise LoraError(
            f"requires_api = {wanted}",
            reason=f"this SDK's hook API is {HOOKSPEC_API}",
            cure="update lora-plugins-sdk" if newer else "update the plugin, or install an older lora-plugins-sdk",
        )
    return wanted


def architectures_of(plugin: Any, name: str) -> tuple[Architecture, ...]:
    """What the plugin registers, after its hooks were checked against the specification.

    Args:
        plugin: the loaded module or object.
        name: the name to register it under.

    Raises:
        LoraError: it is a class, has a hook without `@hookimpl`, an unknown hook or argument, or registers
            something that is not an architecture, or nothing without being an observer.
    """
    if inspect.isclass(plugin):
        raise LoraError(f"plugin {name!r}", reason="is a class", cure="export an instance of it, or a module")
    _refuse_unmarked_hooks(plugin)
    manager = new_manager()
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except PluginValidationError as error:
        raise LoraError(
            f"plugin {name!r}",
            reason=" ".join(str(error).split()),
            cure="use only the hooks and arguments in docs/hooks.md, or update lora-plugins-sdk",
        ) from error
    answers = manager.subset_hook_caller("lora_register_architectures", [defaults])()
    architectures = tuple(one for answer in answers for one in answer)
    for one in architectures:
        _refuse_bad_architecture(one)
    if not architectures and not getattr(plugin, OBSERVER_FLAG, False):
        raise LoraError(
            f"plugin {name!r}",
            reason="registers no architecture",
            cure=f"implement lora_register_architectures, or set {OBSERVER_FLAG} = True if it only watches",
        )
    return architectures


def _refuse_unmarked_hooks(plugin: Any) -> None:
    for name, member in inspect.getmembers(plugin, inspect.isroutine):
        if name.startswith(HOOK_PREFIX) and not hasattr(member, f"{PROJECT}_impl"):
            raise LoraError(
                f"function {name}",
                reason="is named like a hook but not marked as one, so it would never be called",
                cure="decorate it with @hookimpl, or name it otherwise",
            )


def _refuse_bad_architecture(one: Any) -> None:
    if not isinstance(one, Architecture):
        raise LoraError(
            f"lora_register_architectures returned {type(one).__name__}",
            reason="not an Architecture",
            cure="return a sequence of lora_plugins_sdk.Architecture",
        )
    if not one.name or not one.model_types or not one.sites:
        raise LoraError(
            f"architecture {one.name!r}",
            reason="has no name, no model type or no site",
            cure="give name, model_types and sites",
        )
