"""Adapters on the embedding, whose product is added transposed: merged, described, compared, exported or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offline_files import (
    ALPHA,
    HIDDEN,
    MODULES,
    PREFIX,
    RANK,
    VOCABULARY,
    adapter_tensors,
    base_tensors,
    make_adapter,
    make_base,
    slow_merge,
    weights,
)
from torch import Tensor

from lora_plugins_sdk import Architecture, LoraError, Projection, Site, SiteKind, read_adapter
from lora_plugins_sdk.offline import embeddings, shard
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.diff import diff_adapters
from lora_plugins_sdk.offline.export import export_files
from lora_plugins_sdk.offline.inspect import base_facts, pair_facts
from lora_plugins_sdk.offline.merge import merge, plan_merge

EMBEDDING = "model.embed_tokens"
SCALE = ALPHA / RANK
W = f"{EMBEDDING}.weight"


def lookup(module: str = EMBEDDING, tokens: int = VOCABULARY) -> dict[str, Tensor]:
    """PEFT's two tensors of an embedding, as it names and shapes them."""
    torch.manual_seed(5)
    stem = f"{PREFIX}{module}.lora_embedding_"
    return {f"{stem}A": torch.randn(RANK, tokens), f"{stem}B": torch.randn(HIDDEN, RANK)}


def expected(weight: Tensor, factors: dict[str, Tensor]) -> Tensor:
    """PEFT's formula: the transposed product beside the rows of the tokens that it has."""
    a, b = (one.double() for one in factors.values())
    delta = SCALE * (b @ a).T
    return torch.cat([weight[: len(delta)].double() + delta, weight[len(delta) :].double()]).float()


def planned(place: Path, adapter: dict[str, Tensor], base: dict[str, Tensor] | None = None, **config: Any) -> Any:
    """A merge into the small base; `config` of the base, `targets` of the adapter."""
    more = {"target_parameters": config.pop("parameters")} if "parameters" in config else {}
    return plan_merge(
        make_base(place / "base", base, **config), make_adapter(place / "adapter", adapter, **more), place / "merged"
    )


@pytest.mark.parametrize("chunk", [HIDDEN * 2, 2**18])
def test_the_transposed_product_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(shard, "_CHUNK_ELEMENTS", chunk)
    report = merge(planned(tmp_path, {**adapter_tensors(), **lookup()}))
    assert report.folds == len(MODULES) + 1
    sums = slow_merge(base_tensors(), adapter_tensors(), SCALE) | {W: expected(base_tensors()[W], lookup())}
    for name, tensor in weights(tmp_path / "merged").items():
        torch.testing.assert_close(tensor, sums[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("extra", [3, -3], ids=["adapter padded", "base padded"])
def test_a_padded_vocabulary(tmp_path: Path, extra: int) -> None:
    """B42: zero columns of A beyond the vocabulary are trimmed; rows of the base beyond it stay, bit for bit."""
    base, adapter = base_tensors(), lookup()
    if extra > 0:
        adapter = {
            name: torch.nn.functional.pad(one, (0, extra)) if name.endswith("_A") else one
            for name, one in adapter.items()
        }
    else:
        base[W] = torch.cat([base[W], torch.full((-extra, HIDDEN), 7.0)])
    plan = planned(tmp_path, adapter, base)
    (fold,) = plan.folds[W]
    assert fold.trimmed == max(extra, 0)
    merge(plan)
    found = weights(tmp_path / "merged")[W]
    torch.testing.assert_close(found, expected(base[W], lookup()), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[VOCABULARY:], base[W][VOCABULARY:])


def test_content_for_tokens_that_the_base_lacks(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="2 of the 2 columns of lora_embedding_A beyond the base's 11 are not zero"):
        planned(tmp_path, lookup(tokens=VOCABULARY + 2))


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_embeddings(tmp_path: Path, config: dict[str, Any]) -> None:
    """B42: the head would change with it."""
    with pytest.raises(LoraError, match="a fold into it would change both") as error:
        planned(tmp_path, lookup(), **config)
    (found,) = error.value.diagnostics
    assert found.subject == EMBEDDING and "untie the base first" in found.cure


@pytest.mark.parametrize("says", [None, False])
def test_a_base_without_a_head(tmp_path: Path, says: bool | None) -> None:
    """B42: whether it is tied is for the config to say; older transformers tie it where it does not."""
    base = base_tensors()
    del base["lm_head.weight"]
    config = make_base(tmp_path / "base", base) / "config.json"
    kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "tie_word_embeddings"}
    config.write_text(json.dumps(kept if says is None else {**kept, "tie_word_embeddings": says}))
    adapter = make_adapter(tmp_path / "adapter", lookup())
    if says is None:
        with pytest.raises(LoraError, match=r"has no lm_head\.weight, and its config no tie_word_embeddings"):
            plan_merge(tmp_path / "base", adapter, tmp_path / "merged")
    else:
        assert len(plan_merge(tmp_path / "base", adapter, tmp_path / "merged").folds) == 1


def linear(module: str, out: int = HIDDEN) -> dict[str, Tensor]:
    return adapter_tensors({module: (out, HIDDEN)})


@pytest.mark.parametrize(
    ("factors", "square", "message"),
    [
        (lookup("model.layers.0.self_attn.q_proj", HIDDEN), False, "q_proj: is no embedding, and has lora_embedding_A"),
        (lookup("lm_head"), False, "lm_head: is no embedding, and has lora_embedding_A"),
        (linear(EMBEDDING, VOCABULARY), False, "embed_tokens: is an embedding, and has lora_A.weight"),
        (linear(EMBEDDING), True, "embed_tokens: is an embedding, and has lora_A.weight"),
        ({**linear(EMBEDDING), **lookup(tokens=HIDDEN)}, True, "has factors of a linear and of an embedding"),
    ],
)
@pytest.mark.parametrize("command", ["merge", "inspect", "export", "diff"])
def test_factors_of_the_other_kind(
    tmp_path: Path, factors: dict[str, Tensor], square: bool, message: str, command: str
) -> None:
    """A square weight takes both products; the names tell which is meant."""
    base = base_tensors() | ({W: torch.randn(HIDDEN, HIDDEN)} if square else {})
    make_base(tmp_path / "base", base)
    adapter = make_adapter(tmp_path / "adapter", factors)
    commands: dict[str, Callable[[], object]] = {
        "merge": lambda: plan_merge(tmp_path / "base", adapter, tmp_path / "merged"),
        "export": lambda: export_files(adapter, tmp_path / "out"),
        "inspect": lambda: read_plain_adapter(adapter),
        "diff": lambda: read_plain_adapter(adapter, tmp_path / "base"),
    }
    with pytest.raises(LoraError, match=message):
        commands[command]()


def test_a_linear_whose_name_does_not_tell(tmp_path: Path) -> None:
    """A square one outside the layers: with the base it is no embedding that anyone declared."""
    base = make_base(tmp_path / "base", {**base_tensors(), "projector.weight": torch.randn(HIDDEN, HIDDEN)})
    adapter = make_adapter(tmp_path / "adapter", lookup("projector", HIDDEN))
    with pytest.raises(LoraError, match="projector: is no embedding"):
        plan_merge(base, adapter, tmp_path / "merged")
    (problem,) = base_facts(read_plain_adapter(adapter), base).problems
    assert problem.subject == "projector" and "is no embedding" in problem.reason


def test_an_embedding_that_a_plugin_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name; and then a linear's factors beside it are refused."""
    site = Site(
        path="embedding.word_embeddings",
        kind=SiteKind.ROW,
        projections=(Projection(hf="words", in_dim="vocab_size", out_dim="hidden_size"),),
        embedding=True,
        all_linear=False,
    )
    architecture = Architecture(name="toy", model_types=("toy",), sites=(site,))
    monkeypatch.setattr(embeddings, "load_plugin", lambda name: SimpleNamespace(architecture=architecture))
    base = make_base(
        tmp_path / "base",
        {**base_tensors(), "words.weight": torch.randn(HIDDEN, HIDDEN)},
        vocab_size=HIDDEN,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
    )
    lookups = make_adapter(tmp_path / "lookups", lookup("words", HIDDEN))
    assert len(plan_merge(base, lookups, tmp_path / "merged").folds) == 1
    with pytest.raises(LoraError, match="words: is an embedding"):
        plan_merge(base, make_adapter(tmp_path / "linears", linear("words")), tmp_path / "merged")


def test_peft_may_have_targeted_the_parameter(tmp_path: Path) -> None:
    """Its factors then have a linear's names, and their product lies as the weight does."""
    factors = linear(EMBEDDING, VOCABULARY)
    merge(planned(tmp_path, factors, parameters=[W.removeprefix("model.")]))
    a, b = factors.values()
    torch.testing.assert_close(weights(tmp_path / "merged")[W], base_tensors()[W] + SCALE * b @ a)


def test_inspect_diff_and_export(tmp_path: Path) -> None:
    factors = lookup()
    a, b = factors.values()
    adapter = make_adapter(tmp_path / "adapter", factors, target_modules=["embed_tokens"])
    plain = read_plain_adapter(adapter)
    (facts,) = pair_facts(plain)
    assert (facts.module, facts.out, facts.width) == (EMBEDDING, HIDDEN, VOCABULARY)
    assert facts.norm_a == pytest.approx(float(a.norm())) and facts.norm_b == pytest.approx(float(b.norm()))
    assert facts.norm_delta == pytest.approx(SCALE * float((b @ a).norm()), rel=1e-5)
    found = base_facts(plain, make_base(tmp_path / "base"))
    assert not found.problems and [(one.adapted, one.total) for one in found.coverage] == [(1, 1)]

    moved = {name: one + name.endswith("_A") for name, one in factors.items()}
    other = read_plain_adapter(make_adapter(tmp_path / "other", moved, target_modules=["embed_tokens"]))
    compared = diff_adapters(plain, other)
    largest = SCALE * float((b @ torch.ones_like(a)).abs().max())
    assert (
        compared.deltas == {EMBEDDING: pytest.approx(largest, rel=1e-5)} and not diff_adapters(plain, plain).differs()
    )

    export_files(adapter, tmp_path / "out", base=tmp_path / "base")
    written = read_adapter(tmp_path / "out")
    assert written.tensors.keys() == factors.keys() and written.config["target_modules"] == ["embed_tokens"]
    assert all(torch.equal(written.tensors[name], one) for name, one in factors.items())
