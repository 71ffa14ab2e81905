"""Base checkpoints: loaded exactly, or refused with nothing written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, hf_weights, randomize, toy_inputs, toy_model, toy_plugin
from torch import Tensor, nn

from lora_plugins_sdk import (
    BaseWeight,
    LoraConfig,
    LoraError,
    ParallelRun,
    RunFacts,
    SelectedPlugin,
    adapter_of,
    attach,
    load_base_weights,
)

Tensors = dict[str, Tensor]
Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"


def checkpoint(directory: Path, edit: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    tensors = hf_weights(toy_model())
    if edit is not None:
        edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | config))
    return directory


def empty_model() -> ToyModel:
    model = toy_model()
    for parameter in model.parameters():
        parameter.data.fill_(-7)
    return model


def refused(directory: Path, model: nn.Module | None = None, **options: Any) -> LoraError:
    model = model if model is not None else empty_model()
    with pytest.raises(LoraError) as error:
        load_base_weights(model, toy_plugin(), directory, **options)
    assert all(bool((parameter == -7).all()) for parameter in model.parameters())
    return error.value


def test_every_parameter_is_loaded(tmp_path: Path) -> None:
    model, expected = empty_model(), toy_model()
    load_base_weights(model, toy_plugin(), checkpoint(tmp_path))
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert torch.equal(model(*toy_inputs()), expected(*toy_inputs()))


def test_an_attached_adapter_is_left_alone(tmp_path: Path) -> None:
    model = empty_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, target_modules=("*",)))
    randomize(model)
    before = [parameter.detach().clone() for parameter in adapter_of(model).parameters()]
    load_base_weights(model, toy_plugin(), checkpoint(tmp_path))
    assert all(map(torch.equal, adapter_of(model).parameters(), before))
    assert torch.equal(model.output_layer.weight, toy_model().output_layer.weight)


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = hf_weights(toy_model())
    names = sorted(tensors)
    where = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    model = empty_model()
    load_base_weights(model, toy_plugin(), tmp_path)
    assert torch.equal(model(*toy_inputs()), toy_model()(*toy_inputs()))


@pytest.mark.parametrize("with_copy", [False, True], ids=["alone", "with-copy"])
def test_tied_embeddings(tmp_path: Path, with_copy: bool) -> None:
    """B42: the head's weight is the embedding; checkpoints may hold a copy of it all the same."""

    def edit(tensors: Tensors) -> None:
        if not with_copy:
            del tensors["lm_head.weight"]

    model = empty_model()
    load_base_weights(model, toy_plugin(), checkpoint(tmp_path, edit, tie_word_embeddings=True))
    assert torch.equal(model.output_layer.weight, model.embedding.weight)
    assert torch.equal(model.embedding.weight, toy_model().embedding.weight)


@pytest.mark.parametrize(
    ("edit", "subject", "reason"),
    [
        (lambda tensors: tensors.pop(Q), Q, "is missing from the checkpoint"),
        (lambda tensors: tensors.update(stray=torch.zeros(1)), "stray", "has no place in the model"),
        (lambda tensors: tensors.update({Q: torch.zeros(11, 12)}), Q, "has shape [11, 12], the config gives [12, 12]"),
        (lambda tensors: tensors.update({Q: torch.zeros(12, 11)}), Q, "has shape [12, 11]"),
        (lambda tensors: tensors.update({NORM: torch.zeros(11)}), "layers.1", "would give [11]"),
        (
            lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(8, 12)}),
            "embedding.weight [7, 12]",
            "model.embed_tokens.weight would give [8, 12]",
        ),
    ],
    ids=["missing", "extra", "rows", "columns", "norm", "vocabulary"],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, edit: Any, subject: str, reason: str) -> None:
    found = refused(checkpoint(tmp_path, edit)).diagnostics
    assert len(found) == 1 and subject in found[0].subject and reason in found[0].reason and found[0].cure


def test_wrong_parts_of_a_right_total_are_found(tmp_path: Path) -> None:
    """B23: gate and up of 8 and 12 rows fill a host weight of 20 rows, at the wrong places."""

    def edit(tensors: Tensors) -> None:
        tensors[GATE], tensors[UP] = torch.zeros(8, 12), torch.zeros(12, 12)

    assert {one.subject for one in refused(checkpoint(tmp_path, edit)).diagnostics} == {GATE, UP}


def test_a_host_parameter_without_a_source_is_named(tmp_path: Path) -> None:
    model = empty_model()
    model.extra = nn.Parameter(torch.full((3,), -7.0))
    (found,) = refused(checkpoint(tmp_path), model).diagnostics
    assert found.subject == "extra" and "without a HF source" in found.reason


def test_a_model_built_from_another_config(tmp_path: Path) -> None:
    model = empty_model()
    model.output_layer.weight = nn.Parameter(torch.full((8, 12), -7.0).double())
    said = str(refused(checkpoint(tmp_path), model))
    assert "output_layer.weight [8, 12]" in said
    assert "if only its vocabulary is padded otherwise" in said and "make_vocab_size_divisible_by=2)" in said


def test_a_config_of_another_model_type(tmp_path: Path) -> None:
    assert "model_type 'other'" in str(refused(checkpoint(tmp_path, model_type="other")))


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert "holds no *.safetensors file" in str(refused(tmp_path))


def test_a_broken_weight_file(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert "is not a safetensors file" in str(refused(tmp_path))


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    save_file({Q: torch.zeros(12, 12)}, tmp_path / "consolidated.safetensors")
    assert f"{Q}: is in both consolidated.safetensors and model.safetensors" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is not JSON"),
        ("{}", "is no weight index"),
        ('{"weight_map": [1]}', "is no weight index"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "names 'absent.safetensors', which is not in the directory"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "names '../outside.safetensors', which is not"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names '/etc/passwd', which is not in the directory"),
        ('{"weight_map": {"a": 3}}', "is no weight index"),
    ],
)
def test_a_broken_index(tmp_path: Path, index: str, reason: str) -> None:
    directory = tmp_path / "base"
    directory.mkdir()
    checkpoint(directory)
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (directory / "model.safetensors.index.json").write_text(index)
    assert reason in str(refused(directory))


def test_only_this_ranks_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of two reads half of every split weight, whatever the size of the file."""
    from lora_plugins_sdk import ParallelRun, RunFacts
    from lora_plugins_sdk.hf_tensors import HfTensors

    sizes: dict[str, int] = {}
    for method in ("rows", "columns"):
        plain = getattr(HfTensors, method)

        def counted(self: HfTensors, name: str, start: int, stop: int, plain: Any = plain) -> Tensor:
            part = plain(self, name, start, stop)
            sizes[name] = sizes.get(name, 0) + part.numel()
            return part

        monkeypatch.setattr(HfTensors, method, counted)
    model = empty_model()
    for name, parameter in list(model.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        if "norm" in name or "patch" in name:
            continue
        rows, columns = parameter.shape
        if "linear_proj" in name or "linear_fc2" in name:
            columns //= 2
        else:
            rows = -(-rows // 2)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.zeros(rows, columns).double()))
    load_base_weights(model, toy_plugin(), checkpoint(tmp_path), ParallelRun(facts=RunFacts(tp=2), tp_rank=1))
    full = {name: tensor.numel() for name, tensor in hf_weights(toy_model()).items()}
    assert sizes.keys() == full.keys()
    for name, size in sizes.items():
        whole = "norm" in name or "patch" in name
        head = name in ("lm_head.weight", "model.embed_tokens.weight")  # 7 rows: 4 on rank 0, 3 on rank 1
        assert size == (full[name] if whole else 3 * 12 if head else full[name] // 2), name
    assert torch.equal(model.output_layer.weight[-1], torch.zeros(12).double())


def test_a_misspelt_site_path_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    plugin = toy_plugin()
    wrong = [replace(site, path=site.path.replace("linear_fc2", "linear_fc_2")) for site in plugin.architecture.sites]
    plugin = SelectedPlugin.of(replace(plugin.architecture, sites=tuple(wrong)))
    with pytest.raises(LoraError) as error:
        load_base_weights(empty_model(), plugin, checkpoint(tmp_path))
    (first, second) = error.value.diagnostics
    assert first.subject == "decoder.layers.0.mlp.linear_fc2.weight" and first.cure == second.cure
    assert "not in the model: decoder.layers.{layer}.mlp.linear_fc_2.weight" in first.cure
    assert "site's path" in first.cure and "base_weights" in first.cure


@pytest.mark.parametrize(
    ("host", "stages"),
    [
        ("decoder.layers.{layer}.mlp.linear_fc1.bias", 1),
        ("decoder.layers.{layer}.mlp.linear_fc1.bias", 2),
        ("decoder.layers.{layer}.mlp.shared.bias", 1),
    ],
    ids=["of a module", "of a module, of one stage", "of no module"],
)
def test_a_declared_tensor_that_the_model_has_no_parameter_for_is_named(tmp_path: Path, host: str, stages: int) -> None:
    """A model that was built without its biases: the checkpoint's would be lost, and nothing else would show it."""
    architecture = toy_plugin().architecture
    bias = BaseWeight(host=host, hf=("model.layers.{layer}.mlp.bias",))
    plugin = SelectedPlugin.of(replace(architecture, base_weights=(*architecture.base_weights, bias)))
    names = [f"model.layers.{layer}.mlp.bias" for layer in range(2)]
    directory = checkpoint(tmp_path, lambda tensors: tensors.update({name: torch.ones(20) for name in names}))
    with pytest.raises(LoraError) as error:
        load_base_weights(empty_model(), plugin, directory, ParallelRun(facts=RunFacts(pp=stages)))
    assert [one.subject for one in error.value.diagnostics] == [host.format(layer=layer) for layer in range(2)]
    assert f"is declared for {names[0]}, and the model has no" in str(error.value)


def test_a_declared_tensor_of_another_stage_is_left_to_it(tmp_path: Path) -> None:
    model = empty_model()
    del model.output_layer
    load_base_weights(model, toy_plugin(), checkpoint(tmp_path), ParallelRun(facts=RunFacts(pp=2)))
    assert torch.equal(model.embedding.weight, toy_model().embedding.weight)
