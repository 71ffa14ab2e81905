"""An adapter goes through SGLang's form on a published base: what was trained comes back, and can be merged."""

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from inkling_tiny import PUBLISHED_CONFIG, PUBLISHED_TEXT, in_transformers_words, make_model
from safetensors.torch import save_file

from lora_plugin_inkling.model.published import to_published
from lora_plugin_inkling.official import OFFICIAL
from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    RunFacts,
    derive_table,
    load_plugin,
    module_names,
    read_adapter,
    write_adapter,
)
from lora_plugins_sdk.cli.export_adapter import Form, export_adapter
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.diff import diff_adapters
from lora_plugins_sdk.offline.export import export_files
from lora_plugins_sdk.offline.inspect import base_facts
from lora_plugins_sdk.offline.merge import plan_merge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    published = to_published(make_model(in_transformers_words(PUBLISHED_TEXT)).state_dict())
    save_file({name: one.contiguous() for name, one in published.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    return folder


def random_adapter(sharing: str) -> PeftAdapter:
    """Factors of every target, zero for padding tokens alone, as a run on the published base exports them."""
    plugin = load_plugin(architecture="inkling")
    lora = LoraConfig(rank=4, alpha=8, target_modules=("all-linear", "embed_tokens", "lm_head"), expert_sharing=sharing)  # type: ignore[arg-type]
    tensors = {}
    for row in derive_table(plugin, PUBLISHED_CONFIG, lora, RunFacts()).rows:
        draw = torch.Generator().manual_seed(zlib.crc32(row.init_key.encode()))
        factor = torch.randn(row.full_shape, generator=draw)
        if row.embedding and row.factor == "A":
            factor[:, PUBLISHED_CONFIG["text_config"]["unpadded_vocab_size"] :] = 0
        tensors |= plugin.export_tensor(row, factor)
    targets = sorted({name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in tensors})
    return PeftAdapter(
        tensors=tensors, config={"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    )


@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_there_and_back_and_merged(base: Path, tmp_path: Path, sharing: str) -> None:
    """B30, B31: HF's names again, not those of the base's files, and one shared factor of the shared experts."""
    adapter = random_adapter(sharing)
    write_adapter(adapter, tmp_path / "peft")
    report = export_files(tmp_path / "peft", tmp_path / "served", form="sglang", base=base)
    flag = "--experts-shared-outer-loras" if sharing == "outer" else "--no-experts-shared-outer-loras"
    assert flag in report.engine_arguments and not report.left_out and not report.unpublished
    export_files(tmp_path / "served", tmp_path / "back", base=base)
    back = read_adapter(tmp_path / "back")
    assert back.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(back.tensors[name], one) for name, one in adapter.tensors.items())
    plan_merge(base, tmp_path / "back", tmp_path / "merged")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter under HF's names and under those of the official schema."""
    folder = tmp_path_factory.mktemp("both")
    adapter = random_adapter("outer")
    modules = module_names(load_plugin(architecture="inkling").architecture, PUBLISHED_CONFIG)
    write_adapter(adapter, folder / "hf")
    write_adapter(OFFICIAL.write(adapter, modules), folder / "official")
    assert "base_model.model.model.llm.layers.0.attn.wq_du.lora_A.weight" in read_adapter(folder / "official").tensors
    return {name: folder / name for name in ("hf", "official")}


@pytest.mark.parametrize("form", ["peft", "sglang"])
def test_the_official_schema_is_exported_under_the_same_names(
    base: Path, both: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """SGLang serves all of it, and PEFT finds nothing under the official names."""
    found = {}
    for name, adapter in both.items():
        report = export_files(adapter, tmp_path / name, form=form, base=base)
        assert not report.left_out
        found[name] = read_adapter(tmp_path / name)
    assert found["official"].config == found["hf"].config
    assert found["official"].tensors.keys() == found["hf"].tensors.keys()
    assert all(torch.equal(found["official"].tensors[name], one) for name, one in found["hf"].tensors.items())
    if form == "sglang":  # whose own names are no schema
        export_files(tmp_path / "official", tmp_path / "back", base=base)
        assert read_adapter(tmp_path / "back").tensors.keys() == read_adapter(both["hf"]).tensors.keys()
        (problem,) = base_facts(read_plain_adapter(tmp_path / "hf", base), base).problems
        with pytest.raises(LoraError) as error:
            plan_merge(base, tmp_path / "hf", tmp_path / "merged")
        assert "is an export for sglang" in problem.reason and error.value.diagnostics == (problem,)


def test_the_official_schema_is_merged_inspected_and_compared(
    base: Path, both: dict[str, Path], tmp_path: Path
) -> None:
    plans = [plan_merge(base, adapter, tmp_path / "merged") for adapter in both.values()]
    assert plans[0].folds.keys() == plans[1].folds.keys()
    hf, official = (read_plain_adapter(adapter, base) for adapter in both.values())
    facts = base_facts(official, base)
    assert not facts.problems and facts.coverage == base_facts(hf, base).coverage
    assert all(one.adapted == one.total for one in facts.coverage), "each expert is one of those that the model has"
    assert not diff_adapters(hf, official).differs()


def test_a_base_that_sglang_would_build_otherwise_is_noted(
    base: Path, both: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The form is the same; only that base cannot be served."""
    shutil.copytree(base, tmp_path / "base")
    text = {**PUBLISHED_TEXT, "gate_activation": "softmax", "use_sconv": False}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**PUBLISHED_CONFIG, "text_config": text}))
    export_adapter(both["hf"], tmp_path / "out", form=Form.SGLANG, base=tmp_path / "base")
    said = capsys.readouterr().out
    assert 'its config.json lacks use_sconv = true, gate_activation = "sigmoid" in its text_config' in said
    export_adapter(both["hf"], tmp_path / "again", form=Form.SGLANG, base=base)
    assert "note:" not in capsys.readouterr().out
