"""Adapters under the names of another schema: both directions from one declaration, and through an import."""

from dataclasses import replace

import pytest
import torch
from sdk_toy import ARCHITECTURE, HF_CONFIG
from sdk_toy_host import ToyModel, randomize, toy_model
from torch import Tensor

from lora_plugins_sdk import (
    AdapterSchema,
    LoraConfig,
    LoraError,
    PeftAdapter,
    SelectedPlugin,
    attach,
    export_adapter,
    import_adapter,
    module_names,
)

SCHEMA = AdapterSchema(
    name="short",
    prefix="net.",
    wrappers=("model", "net"),
    parts={"attn": "self_attn", "wq": "q_proj", "q": "q_proj", "w2": "down_proj", "head": "lm_head"},
)
MODULES = module_names(ARCHITECTURE, HF_CONFIG)
*OTHERS, HEAD_SITE = ARCHITECTURE.sites
(LM_HEAD,) = HEAD_SITE.projections
PADDED = replace(HEAD_SITE, projections=(replace(LM_HEAD, padded_to="vocab_size + 3"),))
PLUGIN = SelectedPlugin.of(replace(ARCHITECTURE, adapter_schemas=(SCHEMA,), sites=(*OTHERS, PADDED)))
LORA = LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "down_proj", "lm_head"))
HEAD = "base_model.model.lm_head.lora_B.weight"


def adapted(seed: int) -> ToyModel:
    model = toy_model()
    attach(model, PLUGIN, HF_CONFIG, LORA)
    randomize(model, seed)
    return model


def saved() -> PeftAdapter:
    return export_adapter(adapted(seed=1))


def same(found: PeftAdapter, expected: PeftAdapter) -> bool:
    return found.tensors.keys() == expected.tensors.keys() and all(
        torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items()
    )


def test_written_and_read() -> None:
    written = SCHEMA.write(saved(), MODULES)
    assert sorted(name.removesuffix(".lora_A.weight") for name in written.tensors if "lora_A" in name) == [
        "base_model.model.head",
        "base_model.model.net.layers.0.attn.wq",
        "base_model.model.net.layers.0.mlp.w2",
        "base_model.model.net.layers.1.attn.wq",
        "base_model.model.net.layers.1.mlp.w2",
    ]
    assert written.config["target_modules"] == ["head", "w2", "wq"]
    back = SCHEMA.read(written, MODULES)
    assert same(back, saved()) and back.config == saved().config


def test_hf_names_stay() -> None:
    adapter = saved()
    assert SCHEMA.read(adapter, MODULES) is adapter


def test_an_import_reads_it() -> None:
    """Whatever stands before a module, and the other name of a part."""
    tensors = {
        name.replace("base_model.model.net.", "base_model.model.model.net.").replace("wq", "q"): tensor
        for name, tensor in SCHEMA.write(saved(), MODULES).tensors.items()
    }
    model = adapted(seed=2)
    assert not same(export_adapter(model), saved())
    import_adapter(model, replace(saved(), tensors=tensors))
    assert same(export_adapter(model), saved())


def test_what_the_schema_has_no_name_for() -> None:
    adapter = saved()
    whole = replace(adapter, tensors={**adapter.tensors, "base_model.model.model.norm.weight": torch.ones(12)})
    with pytest.raises(LoraError, match=r"model\.norm\.weight: has no name in the short schema"):
        SCHEMA.write(whole, MODULES)


def test_what_is_read_and_belongs_nowhere_is_refused_by_the_import() -> None:
    written = SCHEMA.write(saved(), MODULES)
    other = "base_model.model.net.layers.7.attn.wq.lora_A.weight"
    with pytest.raises(LoraError, match=r"layers\.7\.attn\.wq\.lora_A\.weight: has no place"):
        import_adapter(adapted(seed=2), replace(written, tensors={**written.tensors, other: torch.zeros(2, 12)}))


@pytest.mark.parametrize("twice", ["net.layers.0.attn.q", "model.layers.0.self_attn.q_proj"])
def test_two_names_of_one_module_are_refused(twice: str) -> None:
    """One of the two would be dropped."""
    written = SCHEMA.write(saved(), MODULES)
    other = f"base_model.model.{twice}.lora_A.weight"
    with pytest.raises(
        LoraError, match=r"lora_A\.weight: and .*lora_A\.weight are both .*layers\.0\.self_attn\.q_proj"
    ):
        SCHEMA.read(replace(written, tensors={**written.tensors, other: torch.zeros(2, 12)}), MODULES)


def with_rows(extra: Tensor) -> PeftAdapter:
    adapter = saved()
    return replace(adapter, tensors={**adapter.tensors, HEAD: torch.cat([adapter.tensors[HEAD], extra])})


def test_rows_of_a_padded_vocabulary_are_cut() -> None:
    """B42: HF's head has rows for no token; a B that was trained beside them is zero there."""
    model = adapted(seed=2)
    import_adapter(model, with_rows(torch.zeros(3, 2)))
    assert same(export_adapter(model), saved())


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (torch.eye(3)[:, :2], "has 10 rows, and those beyond 7 are padding and not all zero"),
        (torch.full((3, 2), float("nan")), "has 10 rows, and those beyond 7 are padding and not all zero"),
        (torch.zeros(2, 2), r"is of another size: shape \[9, 2\], expected \[7, 2\]"),
    ],
    ids=["trained", "not-a-number", "another-vocabulary"],
)
def test_other_rows_than_padding_are_refused(extra: torch.Tensor, words: str) -> None:
    """B42: they would be dropped."""
    model = adapted(seed=2)
    before = export_adapter(model)
    with pytest.raises(LoraError, match=rf"lm_head\.lora_B\.weight: {words}"):
        import_adapter(model, with_rows(extra))
    assert same(export_adapter(model), before)
