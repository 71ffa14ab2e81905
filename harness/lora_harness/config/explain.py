"""Pydantic's findings in this project's form: the key, the reason, the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lora_plugins_sdk.errors import Diagnostic


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[Diagnostic]:
    """One diagnostic a finding. `root` is the model that was validated; its field descriptions give the
    cures."""
    explained: set[str] = set()
    for item in error.errors():
        model, keys = _owner(root, item["loc"])
        key = ".".join(keys)
        if key in explained:  # a union of types reports one failure for each of its members
            continue
        explained.add(key)
        yield _diagnostic(key, keys[-1], item, model, root)


def _diagnostic(key: str, last: str, item: Any, model: type[BaseModel], root: type[BaseModel]) -> Diagnostic:
    match item["type"]:
        case "extra_forbidden":
            return Diagnostic(subject=key, reason="unknown key", cure=_suggest(last, model, root))
        case "missing":
            return Diagnostic(subject=key, reason="is required", cure=f"set it: {_description(model, last)}")
        case "union_tag_not_found":
            return Diagnostic(subject=f"{key}.kind", reason="is required", cure=f"use one of {_tags(item)}")
        case "union_tag_invalid":
            tag = item["ctx"]["tag"]
            return Diagnostic(subject=f"{key}.kind", reason=f"{tag!r} is unknown", cure=f"use one of {_tags(item)}")
    reason = f"{item['input']!r} is not accepted ({item['msg'][0].lower()}{item['msg'][1:]})"
    return Diagnostic(subject=key, reason=reason, cure=f"expected: {_description(model, last)}")


def _owner(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str]]:
    """The model that holds the finding's key, and the dotted key as the user wrote it.

    A location also holds indices of sequences and the tags of discriminated unions; neither is a key of the
    file.
    """
    model, keys = root, []
    parts = list(loc)
    while parts:
        part = parts.pop(0)
        field = model.model_fields.get(str(part))
        keys.append(str(part))
        members = models_of(field) if field is not None else []
        if not members or not parts:
            break
        model = members[0]
        if len(members) > 1:
            tag = parts.pop(0)
            model = next(m for m in members if tag in get_args(m.model_fields["kind"].annotation))
    return model, keys


def models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The models that a field may hold: none for a plain value, several for a union."""
    annotation = field.annotation
    candidates = [annotation, *get_args(annotation)]
    return [one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)]


def _suggest(name: str, model: type[BaseModel], root: type[BaseModel]) -> str:
    if name in root.model_fields:
        return f"{name} stands at the top: write it above the first [table]"
    tables = {section: models_of(field) for section, field in root.model_fields.items()}
    homes = [
        f"write {section}.{name}"
        for section, models in tables.items()
        if model not in models and any(name in one.model_fields for one in models)
    ]
    if homes:
        return " or ".join(homes)
    known = list(model.model_fields)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(known)}"


def _description(model: type[BaseModel], name: str) -> str:
    field = model.model_fields.get(name)
    return (field.description if field is not None else None) or f"a table of {name} options"


def _tags(item: Any) -> str:
    return str(item["ctx"].get("expected_tags", "'reasoning_gym', 'jsonl', 'function'"))
