"""Level 0 finds what is wrong without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lora_plugins_sdk import BlockLayout, Concat, ModelDims, Run, SelectedPlugin, hookimpl
from lora_plugins_sdk.targets import candidates
from lora_plugins_sdk.testing.conformance import Context, Level, Result, Subject, cases, run_case
from lora_plugins_sdk.testing.conformance.static.packs import pack_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossedPack:
    """Declares one block, though TP splits the weight: ranks would hold other rows than they think."""

    def resolve(self, dims: ModelDims, sections: Sequence[Sequence[int]], tp: int, multiple: int = 1) -> BlockLayout:
        return BlockLayout.in_order(blocks=1, shares=sections, sections=sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortPack:
    """Loses the last rows of every projection when their number is odd."""

    def resolve(self, dims: ModelDims, sections: Sequence[Sequence[int]], tp: int, multiple: int = 1) -> BlockLayout:
        shares = [[count // tp for count in projection] for projection in sections]
        return BlockLayout.in_order(blocks=tp, shares=shares, sections=sections)


def _check(subject: Subject, name: str, **options: Any) -> Result:
    (case,) = [case for case in cases(Level.STATIC) if case.id == name]
    return run_case(Context(subject, **options), case)


def _with_fc1_pack(pack: Any) -> Subject:
    subject = Subject.of("qwen3")
    architecture = subject.selected.architecture
    sites = [replace(site, pack=pack) if site.name == "linear_fc1" else site for site in architecture.sites]
    subject.__dict__["selected"] = SelectedPlugin.of(replace(architecture, sites=tuple(sites)))
    return subject


@pytest.mark.parametrize(
    ("pack", "words"),
    [(CrossedPack(), "1 blocks cannot be split over 2 ranks"), (ShortPack(), "no place in the host weight")],
)
def test_wrong_packs(pack: Any, words: str) -> None:
    """B23: gate|up split wrongly per TP shard."""
    result = _check(_with_fc1_pack(pack), "packs")
    (finding,) = result.findings
    assert finding.site == "decoder.layers.0.mlp.linear_fc1"
    assert words in finding.cause


def test_right_packs() -> None:
    assert not _check(_with_fc1_pack(Concat()), "packs").findings


def test_slabs_in_another_order() -> None:
    class Exchanged(BlockLayout):
        def local_order(self, projection: int, tp: int) -> tuple[tuple[int, int], ...]:
            return super().local_order(projection, tp)[::-1]

    layout = {
        "blocks": 2,
        "runs": (Run(projection=0, section=1, rows=2), Run(projection=1, rows=2), Run(projection=0, rows=1)),
        "sections": ((2, 4), (4,)),
    }
    assert pack_problem(BlockLayout(**layout), 2) is None
    assert "rank 0 of 2 reads rows [0, 2, 3] and holds rows [2, 3, 0] of projection 0" in str(
        pack_problem(Exchanged(**layout), 2)
    )


def test_spans_that_reach_into_another_projection() -> None:
    class Late(BlockLayout):
        def spans(self, projection: int) -> tuple[tuple[int, int], ...]:
            return tuple((start + projection, rows) for start, rows in super().spans(projection))

    layout = {"blocks": 2, "shares": ((2,), (1,), (1,)), "sections": ((4,), (2,), (2,))}
    assert pack_problem(BlockLayout.in_order(**layout), 2) is None
    assert "in its spans and holds rows" in str(pack_problem(Late.in_order(**layout), 2))


def test_names_of_another_layer(wrong_plugin: Path) -> None:
    result = _check(Subject.of("qwen3", plugin=str(wrong_plugin)), "peft-names")
    first = next(one for one in result.findings if one.site == "decoder.layers.0.self_attention.linear_qkv")
    assert first.factor == "A"
    assert "would be loaded as model.layers.1.self_attn.q_proj lora_A" in first.cause


def test_a_plugin_that_imports_torch(right_plugin: Path) -> None:
    right_plugin.write_text("import torch\n" + right_plugin.read_text())
    result = _check(Subject.of("qwen3", plugin=str(right_plugin)), "torch-free")
    assert any("imports torch" in finding.cause for finding in result.findings)


def test_snapshot(tmp_path: Path) -> None:
    subject, path = Subject.of("qwen3"), tmp_path / "tables" / "qwen3.md"
    missing = _check(subject, "snapshot", snapshot=path, how_to_update="the option")
    assert "does not exist: write it with the option" in missing.findings[0].cause
    assert not _check(subject, "snapshot", snapshot=path, update_snapshot=True).findings
    assert not _check(subject, "snapshot", snapshot=path).findings
    path.write_text(path.read_text().replace("[48, 8]", "[44, 8]"))
    changed = _check(subject, "snapshot", snapshot=path)
    assert "- | 0-3 | B | [44, 8]" in changed.findings[0].cause
    assert "+ | 0-3 | B | [48, 8]" in changed.findings[0].cause
    assert _check(subject, "snapshot").reason == "no snapshot file was named"


def test_targets_that_pick_something_else() -> None:
    subject = Subject.of("qwen3")
    architecture = subject.selected.architecture

    class AlwaysEverything:
        @hookimpl
        def lora_normalize_targets(self, hf_config: Any) -> frozenset[str]:
            return frozenset(one.hf for one in candidates(architecture, hf_config))

    subject.__dict__["selected"] = SelectedPlugin.of(architecture, AlwaysEverything())
    findings = _check(subject, "targets").findings
    texts = [str(finding) for finding in findings]
    assert any("target all-linear" in text and "takes lm_head, which it does not name" in text for text in texts)
    assert any("without q_proj" in text and "which is excluded" in text for text in texts)
