"""Mistakes in a declaration are one error where the declaration is made."""

from dataclasses import replace
from pathlib import Path

import pytest
from sdk_toy import ARCHITECTURE

from lora_plugins_sdk import BaseWeight, LoraError, Projection, Site, SiteKind
from lora_plugins_sdk.discovery import discover

Q, K = (Projection(hf=f"model.layers.{{layer}}.{leaf}", in_dim="hidden_size", out_dim="8") for leaf in "qk")


@pytest.mark.parametrize(
    "path", ["decoder.layers.{layers}.linear", "decoder.layers.{}.linear", "decoder.{layer.linear"]
)
def test_an_unknown_placeholder_is_refused_in_every_path(path: str) -> None:
    makers = (
        lambda: Site(path=path, kind=SiteKind.ROW, projections=(Q,)),
        lambda: Projection(hf=path, in_dim="hidden_size", out_dim="hidden_size"),
        lambda: BaseWeight(host=path, hf=("norm.weight",)),
        lambda: BaseWeight(host="norm.weight", hf=(path,)),
    )
    for make in makers:
        with pytest.raises(LoraError, match="unknown placeholder") as error:
            make()
        assert path in str(error.value) and "{layer}" in error.value.diagnostics[0].cure


@pytest.mark.parametrize("kind", [SiteKind.ROW, SiteKind.REPLICATED])
def test_only_a_column_site_packs_several_projections(kind: SiteKind) -> None:
    with pytest.raises(LoraError, match=f"2 projections, and its kind is {kind}"):
        Site(path="linear", kind=kind, projections=(Q, K))
    assert len(Site(path="linear", kind=SiteKind.COLUMN, projections=(Q, K)).projections) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"kind": SiteKind.COLUMN},
        {"all_linear": True},
        {"path": "decoder.layers.{layer}.word_embeddings"},
        {"method": "gating"},
        {"projections": (replace(Q, hf="q", stack="2"),)},
        {"projections": (replace(Q, hf="q", padded_to="9"),)},
    ],
)
def test_an_embedding_is_a_row_site_by_itself_that_a_user_asks_for(change: dict) -> None:
    right: dict = {
        "path": "embedding.word_embeddings",
        "kind": SiteKind.ROW,
        "projections": (replace(Q, hf="q"),),
        "embedding": True,
        "all_linear": False,
    }
    assert Site(**right).embedding
    with pytest.raises(LoraError, match="what no embedding has"):
        Site(**right | change)


def test_a_site_has_a_projection() -> None:
    with pytest.raises(LoraError, match="0 projections"):
        Site(path="linear", kind=SiteKind.COLUMN, projections=())


@pytest.mark.parametrize("expression", ["hidden_size / 2", "hidden size", "", "int(hidden_size)"])
def test_a_width_that_is_no_integer_expression_is_refused_at_once(expression: str) -> None:
    makers = (
        lambda: Projection(hf="q", in_dim=expression, out_dim="1"),
        lambda: Projection(hf="q", in_dim="1", out_dim=expression),
        lambda: replace(ARCHITECTURE, num_layers=expression),
        lambda: replace(ARCHITECTURE, fallbacks={"head_dim": expression}),
    )
    for make in makers:
        with pytest.raises(LoraError, match="not an integer expression"):
            make()


def test_a_host_weight_is_declared_once() -> None:
    with pytest.raises(LoraError, match=r"'output_layer\.weight' twice"):
        replace(ARCHITECTURE, sites=(*ARCHITECTURE.sites, ARCHITECTURE.sites[-1]))
    head = BaseWeight(host="output_layer.weight", hf=("lm_head.weight",))
    with pytest.raises(LoraError, match=r"'output_layer\.weight' twice"):
        replace(ARCHITECTURE, base_weights=(head,))


def test_a_plugin_with_such_a_mistake_is_broken_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from lora_plugins_sdk import Projection\nProjection(hf='layers.{layers}.q', in_dim='1', out_dim='1')"
    )
    (row,) = (one for one in discover(files=[file]) if one.name == "wrong")
    assert row.status == "broken" and row.error is not None and "'layers'" in row.error
