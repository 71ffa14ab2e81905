"""Names: one per factor, readable by PEFT, complete pairs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from lora_plugins_sdk.run import RunFacts
from lora_plugins_sdk.site import packed_name
from lora_plugins_sdk.testing.conformance.check import Check, Level
from lora_plugins_sdk.testing.conformance.context import Context
from lora_plugins_sdk.testing.conformance.finding import Finding, factor_finding

_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight"
    r"|base_model\.model\.(?P<embedding>.+)\.lora_embedding_(?P<lookup>[AB])"
)


def _names(context: Context) -> Iterator[Finding]:
    table = context.subject.table(RunFacts())
    for row in table.rows:
        context.exercised([row.host_module])
        match = _PEFT_NAME.fullmatch(row.hf_name)
        if match is None:
            end = f"lora_embedding_{row.factor}" if row.embedding else f"lora_{row.factor}.weight"
            cause = f"{row.hf_name} is not base_model.model.<module>.{end}, so PEFT would skip it"
            yield factor_finding("name", row, cause=cause)
            continue
        module, factor = match["embedding"] or match["module"], match["lookup"] or match["factor"]
        wanted = packed_name(row.hf_module) if row.packed else row.hf_module
        if (module, factor, match["lookup"] is not None) != (wanted, row.factor, row.embedding):
            cause = f"{row.hf_name} would be loaded as {module} lora_{'embedding_' * bool(match['lookup'])}{factor}"
            yield factor_finding("name", row, cause=cause)


def _unique(context: Context) -> Iterator[Finding]:
    table = context.subject.table(RunFacts())
    for kind in ("init_key", "hf_name", "serving name"):
        users = defaultdict(list)
        for row in table.rows:
            context.exercised([row.host_module])
            keys = row.serving_names.items() if kind == "serving name" else [getattr(row, kind)]
            for key in keys:
                users[key].append(row)
        for key, rows in users.items():
            for row in rows[1:]:
                yield factor_finding(kind, row, cause=f"{key} is also that of {rows[0].hf_module} {rows[0].factor}")


def _pairs(context: Context) -> Iterator[Finding]:
    table = context.subject.table(RunFacts())
    found = defaultdict(list)
    for row in table.rows:
        context.exercised([row.host_module])
        found[row.hf_module].append(row)
    for module, rows in found.items():
        factors = sorted(row.factor for row in rows)
        if factors != ["A", "B"]:
            cause = f"has factors {', '.join(factors)} instead of one A and one B"
            yield Finding(what="pair", site=rows[0].host_module, projection=module, cause=cause)
        elif rows[0].host_module != rows[1].host_module:
            cause = f"A lies on {rows[0].host_module}, B on {rows[1].host_module}"
            yield Finding(what="pair", site=rows[0].host_module, projection=module, cause=cause)
    declared = {path for modules in context.subject.site_modules().values() for path in modules}
    for row in table.rows:
        if row.host_module not in declared:
            yield factor_finding("site", row, cause="the table has a host module that no declared site has")


CHECKS = (
    Check(
        name="peft-names",
        level=Level.STATIC,
        proves="Every factor's file name is one that PEFT maps to this very module and factor.",
        run=_names,
        needs=("peft-names",),
    ),
    Check(
        name="unique-names",
        level=Level.STATIC,
        proves="No two factors share an init key, a PEFT name or an engine's name.",
        run=_unique,
    ),
    Check(
        name="pairs",
        level=Level.STATIC,
        proves="Every projection has one A and one B, on one host linear.",
        run=_pairs,
    ),
)
