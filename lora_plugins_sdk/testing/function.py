"""Name a function in one process and find it again in another, also when its file is not on ``sys.path``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.module_files import import_file


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionReference:
    """A module-level function by module name, qualified name and source file."""

    module: str
    qualname: str
    file: Path | None

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Reference to `function`.

        Raises:
            LoraError: a lambda, a nested function, a partial: another process cannot look it up by name.
        """
        module = sys.modules.get(getattr(function, "__module__", ""))
        qualname = getattr(function, "__qualname__", "<locals>")
        found = None
        if module is not None and "<" not in qualname:
            try:
                found = attrgetter(qualname)(module)
            except AttributeError:
                found = None
        if module is None or found is not function:
            raise LoraError(
                repr(function),
                reason="other processes cannot find it by name",
                cure="pass a function defined at the top level of a module, and its variables as arguments",
            )
        file = getattr(module, "__file__", None)
        return cls(module=module.__name__, qualname=qualname, file=Path(file).resolve() if file else None)

    def resolve(self) -> Callable[..., Any]:
        """Import the module (by name if that leads to the same file, else from the file); its function."""
        return attrgetter(self.qualname)(self._import())

    def _import(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        if self.module == "__main__":
            # As multiprocessing does: the script's `if __name__ == "__main__"` must not run again.
            module = self._load("__mp_main__", self.file)
            sys.modules["__main__"] = module
            return module
        known = sys.modules.get(self.module)
        if known is not None:
            return known if self._is_mine(known) else self._load(self.module, self.file)
        self._extend_path(self.file)
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            return self._load(self.module, self.file)
        return module if self._is_mine(module) else self._load(self.module, self.file)

    def _is_mine(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return file is not None and Path(file).resolve() == self.file

    def _extend_path(self, file: Path) -> None:
        """Put the top package's folder on ``sys.path``; pytest's importlib mode leaves it off."""
        names = self.module.split(".")
        folders = (file.parent if file.name == "__init__.py" else file.with_suffix("")).parts
        if list(folders[-len(names) :]) == names:
            root = str(Path(*folders[: -len(names)]))
            if root not in sys.path:
                sys.path.append(root)

    @staticmethod
    def _load(name: str, file: Path) -> ModuleType:
        if name == "__mp_main__" and getattr(sys.modules.get(name), "__file__", None) == str(file):
            return sys.modules[name]
        return import_file(name, file)
