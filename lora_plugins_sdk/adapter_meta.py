"""`adapter_meta.json` beside an adapter's tensors: who made it, for which base, and the hash of every tensor file.

PEFT and the engines do not read it. An adapter without it is as good; one that contradicts it is not. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lora_plugins_sdk.errors import Diagnostic, LoraError
from lora_plugins_sdk.json_files import read_json_object

META_FILE = "adapter_meta.json"
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ON_PURPOSE = f"take the adapter as it was exported; after a change on purpose, remove {META_FILE}"
_DISTRIBUTIONS = ("lora-plugins-sdk", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOrigin:
    """Where an adapter comes from. Nothing of it depends on the topology or on the time.

    Args:
        plugin: name of the model plugin.
        plugin_version: its distribution's version; empty when it was not installed as a package.
        table: `ParameterTable.logical_digest`.
        base_fingerprint: `base_fingerprint` of the base it was trained on.
        step: finished training steps.
        adapter_version: stamp under which a rollout engine got it.
        engine: the engine that its names are for; None for PEFT's own.
    """

    plugin: str | None = None
    plugin_version: str | None = None
    table: str | None = None
    base_fingerprint: str | None = None
    step: int | None = None
    adapter_version: int | None = None
    engine: str | None = None


def engine_problems(subject: str, origin: AdapterOrigin | None) -> Iterator[Diagnostic]:
    """Why an adapter in an engine's terms cannot be used: it is for that engine alone.

    Args:
        subject: the adapter, for the message.
        origin: where it comes from, if that is known.
    """
    if origin is not None and origin.engine is not None:
        yield Diagnostic(
            subject=subject,
            reason=f"is an export for {origin.engine}, under names and targets of that engine's own",
            cure="give the PEFT directory that it was exported from, or turn it back: lora-plugins export "
            "ADAPTER --output DIR --base BASE",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A tensor file: size in bytes and SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterMeta:
    """What `adapter_meta.json` says.

    Args:
        origin: where the adapter comes from.
        files: name of each tensor file -> what it is.
        lora: what `adapter_config.json` says of the scale: `r`, `lora_alpha`, `use_rslora`.
        versions: of the distributions that wrote it.
    """

    origin: AdapterOrigin
    files: Mapping[str, StoredFile]
    lora: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """The file's text; the same for the same adapter."""
        body = {
            "format": FORMAT,
            "origin": asdict(self.origin),
            "files": {name: asdict(file) for name, file in self.files.items()},
            "lora": dict(self.lora),
            "versions": dict(self.versions),
        }
        return json.dumps(body, indent=2, sort_keys=True) + "\n"


def describe_adapter(
    config: Mapping[str, Any], origin: AdapterOrigin | None, files: Mapping[str, StoredFile]
) -> AdapterMeta:
    """The meta file of an adapter that is being written here."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return AdapterMeta(origin=origin or AdapterOrigin(), files=files, lora=scale_keys(config), versions=versions)


def scale_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of `adapter_config.json` decides the size of the delta."""
    return {"r": config.get("r"), "lora_alpha": config.get("lora_alpha"), "use_rslora": bool(config.get("use_rslora"))}


def read_meta(directory: str | Path) -> AdapterMeta | None:
    """The meta file of an adapter directory; None when there is none.

    Raises:
        LoraError: it is not of this form.
    """
    path = Path(directory) / META_FILE
    if not os.path.lexists(path):
        return None
    cure = f"export the adapter again, or remove {META_FILE}"
    found = read_json_object(path, cure=cure)
    try:
        return _parse(found)
    except _Unfit as error:
        raise LoraError(str(path), reason=f"is no adapter's meta file: {error}", cure=cure) from None


def contradictions(meta: AdapterMeta, config: Mapping[str, Any], files: Mapping[str, Path]) -> Iterator[Diagnostic]:
    """Where an adapter differs from its meta file; every tensor file is read once.

    Args:
        meta: what was written with it.
        config: its `adapter_config.json`.
        files: name -> path of each tensor file that there is.

    Raises:
        LoraError: a file cannot be read.
    """
    for key, value in scale_keys(config).items():
        if value != meta.lora.get(key):
            yield Diagnostic(
                subject=f"{key}={value!r} in adapter_config.json",
                reason=f"it was exported with {meta.lora.get(key)!r}",
                cure=_ON_PURPOSE,
            )
    for name in sorted(meta.files.keys() | files.keys()):
        if name not in files:
            yield Diagnostic(subject=name, reason="is missing from the adapter", cure=_ON_PURPOSE)
        elif name not in meta.files:
            yield Diagnostic(subject=name, reason="was not there when the adapter was exported", cure=_ON_PURPOSE)
        elif stored_file(files[name]) != meta.files[name]:
            yield Diagnostic(subject=name, reason="differs from what was exported", cure=_ON_PURPOSE)


def stored_file(path: Path) -> StoredFile:
    """Size and hash of a file.

    Raises:
        LoraError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return StoredFile(size=file.tell(), sha256=digest)
    except OSError as error:
        raise LoraError(
            str(path), reason=f"cannot be read ({error.strerror})", cure="give a readable directory"
        ) from error


class _Unfit(ValueError):
    """Why a parsed file is no meta file."""


def _parse(found: Mapping[str, Any]) -> AdapterMeta:
    if found.get("format") != FORMAT or isinstance(found.get("format"), bool):
        raise _Unfit(f"its format is {str(found.get('format'))[:50]}, this version reads {FORMAT}")
    origin, files = _table(found, "origin"), _table(found, "files")
    known = {one.name for one in fields(AdapterOrigin)}
    if origin.keys() - known:
        raise _Unfit(f"origin has the unknown key {sorted(origin.keys() - known)[0][:100]!r}")
    for key in ("step", "adapter_version"):
        _expect(origin, key, _is_count)
    for key in ("plugin", "plugin_version", "engine"):
        _expect(origin, key, lambda value: isinstance(value, str))
    for key in ("table", "base_fingerprint"):
        _expect(origin, key, _is_sha256)
    stored = {}
    for name, file in files.items():
        if not isinstance(file, dict) or not _is_count(file.get("size")) or not _is_sha256(file.get("sha256")):
            raise _Unfit(f"files says not what {name[:100]!r} is")
        stored[name] = StoredFile(size=file["size"], sha256=file["sha256"])
    versions = {name[:100]: str(value)[:100] for name, value in _table(found, "versions").items()}
    return AdapterMeta(origin=AdapterOrigin(**origin), files=stored, lora=_table(found, "lora"), versions=versions)


def _table(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = found.get(key)
    if not isinstance(value, dict):
        raise _Unfit(f"it has no table {key}")
    return value


def _expect(origin: Mapping[str, Any], key: str, fits: Callable[[object], bool]) -> None:
    if origin.get(key) is not None and not fits(origin[key]):
        raise _Unfit(f"origin.{key} is {str(origin[key])[:50]!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
