"""Write the generated parts of the documentation: `python docs/generate.py`, or `--check` to only compare.

A part stands between `<!-- begin generated: NAME -->` and `<!-- end generated -->`; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- begin generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table; outside of code, `<` and `*` in a cell are shown as they are."""
    from lora_plugins_sdk.cli.render import markdown_table

    return markdown_table(list(columns), [[_literal(cell) for cell in row] for row in rows])


def _literal(cell: str) -> str:
    parts = cell.split("`")
    parts[::2] = [text.replace("<", "&lt;").replace("*", "\\*") for text in parts[::2]]
    return "`".join(parts)


# --- hooks -----------------------------------------------------------------------------------------------------------


def hook_functions() -> list[FunctionType]:
    """The hook specifications, in the order of their source."""
    from lora_plugins_sdk import hookspecs

    found = [one for name, one in vars(hookspecs).items() if name.startswith("lora_") and inspect.isfunction(one)]
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


def hook_signature(function: FunctionType) -> str:
    """`name(argument: Type, ...) -> Result` as the specification writes it."""
    signature = inspect.signature(function)
    arguments = ", ".join(f"{one.name}: {one.annotation}" for one in signature.parameters.values())
    return f"{function.__name__}({arguments}) -> {signature.return_annotation}"


def hooks() -> str:
    """A heading, the signature, what it answers and a table of its arguments for each hook."""
    return "\n\n".join(_hook(function) for function in hook_functions())


def _hook(function: FunctionType) -> str:
    text, _, _ = inspect.getdoc(function).partition(":param")  # type: ignore[union-attr]
    options: dict[str, Any] = function.lora_plugins_spec  # type: ignore[attr-defined]
    calls = "first result other than None" if options["firstresult"] else "every result"
    parts = [
        f"### {function.__name__}",
        f"```text\n{hook_signature(function)}\n```",
        "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")),
        f"Taken: {calls}.",
    ]
    described = hook_arguments(function)
    if described:
        annotations = inspect.signature(function).parameters
        rows = [(f"`{name}`", f"`{annotations[name].annotation}`", what) for name, what in described.items()]
        parts.append(table(("Argument", "Type", "Meaning"), rows))
    return "\n\n".join(parts)


def hook_arguments(function: FunctionType) -> dict[str, str]:
    """Argument name -> its `:param` text."""
    found = re.findall(r":param (\w+): (.*?)(?=\n\s*:param|\Z)", inspect.getdoc(function) or "", re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


# --- command lines ---------------------------------------------------------------------------------------------------


def lora_plugins_commands() -> str:
    """The commands of `lora-plugins` with their options."""
    from lora_plugins_sdk.cli.app import app

    return _commands("lora-plugins", app)


def lora_grpo_commands() -> str:
    """The commands of `lora-grpo` with their options."""
    from lora_harness.cli import app

    return _commands("lora-grpo", app)


def _commands(program: str, app: Any) -> str:
    import typer

    group: Any = typer.main.get_command(app)
    parts = [_options_table(group)]
    for name, command in group.commands.items():
        arguments = [_argument(one) for one in command.params if one.param_type_name == "argument"]
        parts += [
            f"### {' '.join([program, name, *arguments])}",
            inspect.cleandoc(command.help),
            _options_table(command),
        ]
    return "\n\n".join(part for part in parts if part)


def _argument(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _options_table(command: Any) -> str:
    rows = []
    for one in command.params:
        if one.name in ("help", "install_completion", "show_completion"):
            continue
        names = one.opts if one.param_type_name == "option" else [_argument(one)]
        shown = (
            "required" if one.required else "" if one.default is None or one.default is False else f"`{one.default}`"
        )
        rows.append((", ".join(f"`{name}`" for name in names), one.help or "", shown))
    return table(("Option", "Meaning", "Default"), rows) if rows else ""


# --- harness config --------------------------------------------------------------------------------------------------


TOML_TYPES = {
    str: "string",
    Path: "string",
    int: "integer",
    float: "float",
    bool: "boolean",
    tuple: "array",
    dict: "table",
}


def harness_config() -> str:
    """Every key of a training config, section by section."""
    from lora_harness.config import TrainConfig

    top, parts = [], []
    for name, field in TrainConfig.model_fields.items():
        sections = _sections(field)
        if not sections:
            top.append((name, field))
        for section in sections:
            kind = section.model_fields.get("kind")
            suffix = f' with kind = "{get_args(kind.annotation)[0]}"' if kind is not None and len(sections) > 1 else ""
            parts.extend(_section(name, section, suffix, leave_out=kind))
    return "\n\n".join([f"### Top level\n\n{_fields_table(top)}", *parts])


def _section(name: str, section: Any, suffix: str = "", *, leave_out: Any = None) -> Iterator[str]:
    """A section's own keys, then each section within it."""
    fields = [(key, one) for key, one in section.model_fields.items() if one is not leave_out]
    plain = [(key, one) for key, one in fields if not _sections(one)]
    yield f"### `[{name}]`{suffix}\n\n{_fields_table(plain)}"
    for key, one in fields:
        for inner in _sections(one):
            yield from _section(f"{name}.{key}", inner)


def _sections(field: Any) -> list[Any]:
    """The config models that a field may hold; none for a plain value."""
    from pydantic import BaseModel

    return [one for one in _members(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a field accepts: an annotation without `Annotated`, or each member of a union."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _fields_table(fields: Iterable[tuple[str, Any]]) -> str:
    rows = [(f"`{name}`", _type_name(one.annotation), _default(one), one.description or "") for name, one in fields]
    return table(("Key", "Type", "Default", "Meaning"), rows)


def _type_name(annotation: Any) -> str:
    names = [_toml_type(one) for one in _members(annotation) if one is not type(None)]
    return " or ".join(dict.fromkeys(names))


def _toml_type(one: Any) -> str:
    if get_origin(one) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(one))
    return TOML_TYPES[get_origin(one) or one]


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`".replace("'", '"')
    return f"`{value}`" if isinstance(value, int | float | dict) else f'`"{value}"`'


# --- the conformance kit ---------------------------------------------------------------------------------------------


def conformance_checks() -> str:
    """A heading for each level and a table of its checks."""
    from lora_plugins_sdk.testing.conformance import Level
    from lora_plugins_sdk.testing.conformance.catalogue import checks

    parts = []
    for level in Level:
        rows = [(f"`{one.name}`", one.proves) for one in checks(level)]
        parts.append(f"### {level.title}\n\n{table(('Check', 'What holds when it passes'), rows)}")
    return "\n\n".join(parts)


def conformance_capabilities() -> str:
    """A table of capabilities and the checks that need them."""
    from lora_plugins_sdk.testing.conformance import Level
    from lora_plugins_sdk.testing.conformance.capability import CAPABILITIES
    from lora_plugins_sdk.testing.conformance.catalogue import checks

    every = [one for level in Level for one in checks(level)]
    rows = []
    for name, meaning in CAPABILITIES.items():
        needed_by = ", ".join(f"`{one.name}`" for one in every if name in one.needs)
        by_layout = "the layouts that have it" if name.endswith("-parallel") else needed_by
        rows.append((f"`{name}`", meaning, "every check with a model" if name == "build-model" else by_layout))
    return table(("Capability", "The plugin", "Needed by"), rows)


def conformance_layouts() -> str:
    """The layouts of level 2 by name."""
    from lora_plugins_sdk.testing.conformance.layouts import LAYOUTS, needed_capabilities

    rows = [
        (f"`{layout}`", str(layout.world_size), ", ".join(f"`{name}`" for name in needed_capabilities(layout)))
        for layout in LAYOUTS
    ]
    return table(("Layout", "Ranks", "Needs"), rows)


# --- plugins ---------------------------------------------------------------------------------------------------------


def sites_of(architecture: str) -> str:
    """Every projection of an architecture, its host linear and its widths."""
    from lora_plugins_sdk import load_plugin

    rows = [
        (
            f"`{one.hf.replace('model.layers.{layer}.', '')}`",
            f"`{site.path.replace('decoder.layers.{layer}.', '')}`",
            f"{site.kind}, per expert" if site.experts else str(site.kind),
            f"`{one.in_dim}`",
            f"`{one.out_dim}`",
            site.layers.layer_type if site.layers is not None else "every" if site.per_layer else "",
            "yes" if site.all_linear else "no",
        )
        for site in load_plugin(architecture=architecture).architecture.sites
        for one in site.projections
    ]
    return table(("HF", "megatron-core", "split", "in", "out", "layers", "`all-linear`"), rows)


def inkling_sites() -> str:
    """The parameter table of one layer of each kind under TP, SP and EP."""
    from lora_plugins_sdk import LoraConfig, RunFacts, derive_table, load_plugin
    from lora_plugins_sdk.serving.sglang_places import place_of

    plugin = load_plugin(architecture="inkling")
    (official,) = plugin.architecture.adapter_schemas
    lora = LoraConfig(rank=4, target_modules=("all-linear", "embed_tokens", "lm_head"), expert_sharing="outer")
    facts = RunFacts(tp=2, dp=2, ep=2, sequence_parallel=True)
    rows = {}
    for row in derive_table(plugin, plugin.architecture.tiny_config, lora, facts).rows:
        split = [
            name
            for dim, name in ((row.partition_dim, "ETP" if row.expert else "TP"), (row.expert_dim, "EP"))
            if dim >= 0
        ]
        shared = (row.stack and row.stack_dim < 0) or (row.packed and row.full_shape[0] == 1)
        module = row.hf_module.replace(".{expert}", "")
        key = (module.split(".", 3)[-1], row.factor, row.host_module.split(".", 3)[-1])
        place = place_of(module, "inkling")
        assert place is not None, f"SGLang does not serve {module}"
        rows[key] = (
            f"`{key[0]}`",
            row.factor + (", shared" if shared else ""),
            f"`{key[2]}`",
            " x ".join(split) or "whole",
            {None: "", "tp": "TP", "etp": "ETP", "etp_ep": "ETP x EP"}.get(row.grad_sum_group, str(row.grad_sum_group)),
            f"`{official.short_name(key[0])}`",
            f"`{place.module.split('.', 2)[-1]}`",
            f"`{place.target}`",
        )
    columns = ("HF", "factor", "megatron-core", "split over", "gradient summed over", "official name")
    return table((*columns, "on SGLang", "SGLang target"), list(rows.values()))


# --- pages -----------------------------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[], str]] = {
    "hooks": hooks,
    "lora_plugins": lora_plugins_commands,
    "lora_grpo": lora_grpo_commands,
    "harness_config": harness_config,
    "conformance_checks": conformance_checks,
    "conformance_capabilities": conformance_capabilities,
    "conformance_layouts": conformance_layouts,
    "qwen3_moe_sites": partial(sites_of, "qwen3_moe"),
    "qwen36_moe_sites": partial(sites_of, "qwen36_moe"),
    "inkling_sites": inkling_sites,
}


def pages() -> list[Path]:
    """The files that may have generated parts."""
    return [*sorted(DOCS.glob("*.md")), *sorted(DOCS.parent.glob("plugins/*/README.md"))]


def regenerate(text: str) -> str:
    """A page with its generated parts made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", text)


def main() -> int:
    """Rewrite the pages; with `--check`, only say which are stale and return 1."""
    check = "--check" in sys.argv[1:]
    stale = []
    for page in pages():
        text = page.read_text()
        new = regenerate(text)
        if new != text:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    print(f"{'stale' if check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
