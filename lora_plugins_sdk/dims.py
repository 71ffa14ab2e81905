"""Widths as expressions over a HF config, so that a layout is known without a model."""

from __future__ import annotations

import ast
import difflib
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.json_files import read_json_object

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def check_expression(expression: str) -> None:
    """Refuse what is no integer expression for any config: `+ - * //` over config keys and integers, parentheses.

    Raises:
        LoraError: the expression uses anything else, or is no expression.
    """
    _check(_parse(expression), expression)


def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise _not_integer(expression) from error


def _check(node: ast.expr, expression: str) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left, expression)
        _check(node.right, expression)
    elif not isinstance(node, ast.Name) and not (isinstance(node, ast.Constant) and type(node.value) is int):
        raise _not_integer(expression)


def _not_integer(expression: str) -> LoraError:
    return LoraError(
        f"dimension {expression!r}",
        reason="not an integer expression",
        cure="use config keys, integers, + - * // and ()",
    )


class ModelDims:
    """Integer sizes of one model: a HF config plus the fallbacks an architecture declares.

    Args:
        config: a HF `config.json` as a mapping.
        fallbacks: expression per key, used where the config lacks the key or holds null
            (for example `head_dim` -> `hidden_size // num_attention_heads`).
    """

    def __init__(self, config: Mapping[str, Any], fallbacks: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.fallbacks = dict(fallbacks or {})

    def resolve(self, expression: str) -> int:
        """Value of an expression over config keys: integers, names, `+ - * //` and parentheses.

        Raises:
            LoraError: a key is missing or not an integer, or the expression uses anything else.
        """
        return self._value(_parse(expression), expression)

    def flag(self, key: str) -> bool:
        """A boolean config key; false when the config lacks it."""
        return bool(self.config.get(key, False))

    def _value(self, node: ast.expr, expression: str) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node.id, expression)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left, expression), self._value(node.right, expression)
            if isinstance(node.op, ast.FloorDiv) and right == 0:
                raise LoraError(
                    f"dimension {expression!r}",
                    reason="would divide by zero",
                    cure="use the config.json that belongs to this model type",
                )
            return _OPERATORS[type(node.op)](left, right)
        raise _not_integer(expression)

    def _name(self, key: str, expression: str) -> int:
        value = self.config.get(key)
        if value is None and key in self.fallbacks:
            return self.resolve(self.fallbacks[key])
        if isinstance(value, bool) or not isinstance(value, int):
            state = f"{value!r}, not an integer" if key in self.config else "missing"
            close = difflib.get_close_matches(key, {*self.config, *self.fallbacks} - {key}, n=1)
            respell = f", or correct the expression if {close[0]!r} is meant" if close else ""
            raise LoraError(
                f"config key {key!r}",
                reason=f"{state}; dimension {expression!r} needs it",
                cure=f"use the config.json that belongs to this model type{respell}",
            )
        return value


def read_hf_config(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A HF config as a mapping, from a mapping, a `config.json` or a directory that holds one.

    Raises:
        LoraError: no such file, or its content is not one JSON object.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if os.path.isdir(path) else path
    return read_json_object(path, cure="give a HF directory or the model's own config.json")
