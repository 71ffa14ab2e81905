"""A plugin stays small: what it says beside the modules of its model, in lines of code."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    """Lines that are not blank, not a comment alone and not part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_what_counts() -> None:
    source = '"""Two\nlines."""\n\n# Why.\ndef f(\n    x,  # shape\n):\n    """One."""\n    return """text\nof two"""\n'
    assert code_lines(source) == 5


@pytest.mark.parametrize(("plugin", "most"), [("inkling", 150), ("qwen3", 150), ("qwen3_moe", 150)])
def test_a_plugin_without_its_model_is_small(plugin: str, most: int) -> None:
    """`model.py` and `model/` build the base on megatron-core, which has nothing to do with LoRA."""
    package = PLUGINS / plugin / f"lora_plugin_{plugin}"
    files = [one for one in package.rglob("*.py") if one.relative_to(package).parts[0] not in ("model", "model.py")]
    counts = {one.name: code_lines(one.read_text()) for one in files}
    assert "architecture.py" in counts and sum(counts.values()) <= most, counts
