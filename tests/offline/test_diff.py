"""What `diff` finds between two adapters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import ALPHA, HIDDEN, INNER, MODULES, PREFIX, RANK, A, B, adapter_tensors, make_adapter
from torch import Tensor

from lora_plugins_sdk.offline import products
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.diff import AdapterDiff, diff_adapters

UP = "model.layers.0.mlp.up_proj"


def diff(place: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> AdapterDiff:
    """The plain adapter against an edited one."""
    one = read_plain_adapter(make_adapter(place / "a"))
    return diff_adapters(one, read_plain_adapter(make_adapter(place / "b", tensors, **config)))


def test_an_adapter_and_itself(tmp_path: Path) -> None:
    found = diff(tmp_path)
    assert not found.differs() and found.deltas == dict.fromkeys(sorted(MODULES), 0.0)


def test_bookkeeping_of_the_writer_is_no_difference(tmp_path: Path) -> None:
    config = {"inference_mode": True, "peft_version": "9", "use_rslora": False, "bias": "none", "lora_dropout": 0.0}
    targets = ["up_proj", "q_proj", "lm_head", "down_proj"]
    assert not diff(tmp_path, target_modules=targets, **config).differs()


@pytest.mark.parametrize("chunk", [1, 2**21])
def test_the_largest_entry_of_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(products, "_CHUNK_ELEMENTS", chunk)
    tensors = adapter_tensors()
    tensors[B] = tensors[B] + torch.randn(INNER, RANK)
    found = diff(tmp_path, tensors)
    plain = adapter_tensors()
    expected = ALPHA / RANK * (tensors[B].double() @ tensors[A].double() - plain[B].double() @ plain[A].double())
    assert found.deltas[UP] == pytest.approx(float(expected.abs().max()), rel=1e-9)
    assert {module for module, delta in found.deltas.items() if delta} == {UP}
    assert found.differs() and found.differs(found.deltas[UP] * 0.99) and not found.differs(found.deltas[UP])


def test_a_rotation_within_the_rank_is_no_difference(tmp_path: Path) -> None:
    tensors = adapter_tensors()
    turn = torch.linalg.qr(torch.randn(RANK, RANK))[0]
    tensors[A], tensors[B] = turn @ tensors[A], tensors[B] @ turn.T
    found = diff(tmp_path, tensors)
    assert 0 < found.deltas[UP] < 1e-5 and not found.differs(1e-5)


def test_another_rank_with_the_same_product(tmp_path: Path) -> None:
    tensors = {}
    for name, one in adapter_tensors().items():
        dim = 0 if "lora_A" in name else 1
        tensors[name] = torch.cat([one, torch.zeros_like(one)], dim=dim)
    found = diff(tmp_path, tensors, r=2 * RANK, lora_alpha=2 * ALPHA)
    assert max(found.deltas.values()) < 1e-12 and found.config == {
        "lora_alpha": (ALPHA, 2 * ALPHA),
        "r": (RANK, 2 * RANK),
    }
    assert found.differs(1.0)


def test_the_scale_counts(tmp_path: Path) -> None:
    """B34: the same factors with another scale are another adapter."""
    found = diff(tmp_path, use_rslora=True)
    plain = adapter_tensors()
    expected = (ALPHA / math.sqrt(RANK) - ALPHA / RANK) * float((plain[B].double() @ plain[A].double()).abs().max())
    assert found.deltas[UP] == pytest.approx(expected) and found.config == {"use_rslora": (None, True)}


def test_modules_and_shapes(tmp_path: Path) -> None:
    tensors = adapter_tensors({**MODULES, "extra": (4, 4)})
    del tensors[A], tensors[B]
    tensors[f"{PREFIX}lm_head.lora_B.weight"] = torch.zeros(20, RANK)
    found = diff(tmp_path, tensors)
    assert (found.only_a, found.only_b) == ((UP,), ("extra",))
    assert found.shapes == {"lm_head": (MODULES["lm_head"], (20, HIDDEN))} and "lm_head" not in found.deltas
    assert found.differs(1e9)


def test_whole_weights(tmp_path: Path) -> None:
    head = f"{PREFIX}lm_head.base_layer.weight"
    one = read_plain_adapter(make_adapter(tmp_path / "a", {**adapter_tensors(), head: torch.zeros(3, 3)}))
    other = read_plain_adapter(make_adapter(tmp_path / "b", {**adapter_tensors(), head: torch.ones(3, 3)}))
    plain = read_plain_adapter(make_adapter(tmp_path / "c"))
    assert diff_adapters(one, other).only_a == diff_adapters(one, other).only_b == ("lm_head.weight",)
    assert diff_adapters(one, plain).only_a == ("lm_head.weight",) and not diff_adapters(one, one).differs()
