"""`lora-plugins describe`: the parameter table, and one clear error for each bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_plugins_sdk import LoraConfig, RunFacts, derive_table, load_plugin
from lora_plugins_sdk.cli.table_rows import COLUMNS, table_rows

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
PREFIX = "base_model.model.model.layers"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Path of a small Qwen3 config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def test_json_is_the_derived_table_itself(lora_plugins, config: str) -> None:
    result = lora_plugins(
        *("describe", "qwen3", "--hf-config", config, "--tp", "2", "--sp", "--rank", "8", "--alpha", "4"),
        *("--targets", "q_proj,linear_proj", "--targets", "gate_proj", "--format", "json"),
    )
    table = derive_table(
        load_plugin("qwen3"),
        CONFIG,
        LoraConfig(rank=8, alpha=4.0, target_modules=("q_proj", "linear_proj", "gate_proj")),
        RunFacts(tp=2, sequence_parallel=True),
    )
    assert result.code == 0
    assert result.out == table.to_json() + "\n"


def test_a_column_and_a_row_factor_have_the_shapes_of_their_shards(lora_plugins, config: str) -> None:
    result = lora_plugins(
        *("describe", "qwen3", "--hf-config", config, "--tp", "2", "--sp", "--rank", "8", "--format", "json")
    )
    rows = {row["hf_name"]: row for row in json.loads(result.out)["rows"]}
    assert len(rows) == 3 * 7 * 2
    expected = {
        "self_attn.q_proj.lora_A": ([8, 64], [8, 64], -1, "tp"),
        "self_attn.q_proj.lora_B": ([128, 8], [64, 8], 0, None),
        "self_attn.k_proj.lora_B": ([32, 8], [16, 8], 0, None),
        "self_attn.o_proj.lora_A": ([8, 128], [8, 64], 1, None),
        "self_attn.o_proj.lora_B": ([64, 8], [64, 8], -1, "tp"),
        "mlp.down_proj.lora_A": ([8, 96], [8, 48], 1, None),
    }
    for name, (full, local, dim, group) in expected.items():
        row = rows[f"{PREFIX}.2.{name}.weight"]
        found = (row["full_shape"], row["local_shape"], row["partition_dim"], row["grad_sum_group"])
        assert found == (full, local, dim, group), name
        assert row["serving_names"] == {"sglang": row["hf_name"]}


def test_table_and_markdown_fold_equal_layers(lora_plugins, config: str) -> None:
    arguments = ("describe", "qwen3", "--hf-config", config, "--tp", "2", "--targets", "o_proj,lm_head")
    table = lora_plugins(*arguments).out.splitlines()
    assert table[0].split()[:2] == ["LAYERS", "FACTOR"]
    assert [line.split()[0] for line in table[1:]] == ["0-2", "0-2", "-", "-"]
    assert f"{PREFIX}.*.self_attn.o_proj.lora_A.weight" in table[1]
    markdown = lora_plugins(*arguments, "--format", "markdown").out.splitlines()
    assert markdown[0] == f"| {' | '.join(COLUMNS)} |"
    name = f"{PREFIX}.*.self_attn.o_proj.lora_A.weight"
    assert markdown[2] == f"| 0-2 | A | [16, 128] | [16, 64] | 1 | - | {name} | {name} |"


def test_layers_that_differ_are_not_folded() -> None:
    targets = ("model.layers.0.self_attn.o_proj", "model.layers.2.self_attn.o_proj")
    table = derive_table(load_plugin("qwen3"), CONFIG, LoraConfig(rank=4, target_modules=targets), RunFacts())
    assert [cells[0] for cells in table_rows(table)] == ["0, 2", "0, 2"]


def test_a_padded_vocabulary(lora_plugins, config: str) -> None:
    """The local part of head and embedding has the padding that the trainer's model has: 300 rows are 512."""
    rows = json.loads(
        lora_plugins(
            *("describe", "qwen3", "--hf-config", config, "--tp", "2", "--make-vocab-size-divisible-by", "128"),
            *("--targets", "lm_head,embed_tokens", "--rank", "4", "--format", "json"),
        ).out
    )["rows"]
    shapes = {one["hf_name"].removeprefix("base_model.model."): one["local_shape"] for one in rows}
    assert shapes["model.embed_tokens.lora_embedding_A"] == [4, 256] and shapes["lm_head.lora_B.weight"] == [256, 4]


def test_a_directory_serves_as_hf_config(lora_plugins, config: str) -> None:
    assert lora_plugins("describe", "qwen3", "--hf-config", str(Path(config).parent)).code == 0


def test_a_plugin_file_can_be_described(lora_plugins, tmp_path: Path, toy_plugin: str) -> None:
    (tmp_path / "mine.py").write_text(toy_plugin)
    toy = {"model_type": "toy_model", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16}
    (tmp_path / "toy.json").write_text(json.dumps(toy))
    result = lora_plugins(
        *("describe", "toy", "--hf-config", str(tmp_path / "toy.json"), "--rank", "2"),
        *("--plugin", str(tmp_path / "mine.py"), "--format", "markdown"),
    )
    assert "| 0-1 | A | [2, 16] | [2, 16] | - | - |" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "0"], "rank=0: not a positive integer"),
        (["--rank", "65"], "rank=65: larger than the smaller side"),
        (["--alpha", "0"], "alpha=0.0: the delta would vanish"),
        (["--tp", "3"], "tensor parallel size 3: does not divide"),
        (["--pp", "2"], "pipeline parallel size 2: does not divide the model's 3 layers"),
        (["--tp", "0"], "tp: 0 is not a positive integer"),
        (["--sp"], "sequence_parallel: has no effect with tensor parallel size 1"),
        (["--targets", "q_prj"], "target 'q_prj': matches no projection of this model -> did you mean 'q_proj'?"),
        (["--targets", ""], "target_modules: names no module"),
        (["--exclude", "nothing"], "exclusion 'nothing': matches no projection"),
        (["--targets", "q_proj", "--exclude", "linear_qkv"], "nothing is left to train"),
        (["--scope", "audio"], "scope='audio': unknown scope"),
        (["--scope", "vision"], "nothing is left to train after exclusions and scope 'vision'"),
        (["--dtype", "int8"], "dtype='int8': unknown dtype"),
        (["--plugin", "nope"], "plugin 'nope': is not installed"),
    ],
)
def test_bad_input_is_one_clear_error(lora_plugins, config: str, arguments: list[str], message: str) -> None:
    result = lora_plugins("describe", "qwen3", "--hf-config", config, *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**CONFIG, "model_type": "llama"}), "model_type 'llama': architecture 'qwen3' serves qwen3"),
        (json.dumps({key: value for key, value in CONFIG.items() if key != "hidden_size"}), "'hidden_size': missing"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
    ],
)
def test_a_bad_hf_config_is_one_clear_error(lora_plugins, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    result = lora_plugins("describe", "qwen3", "--hf-config", str(tmp_path))
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_missing_hf_config_and_an_unknown_architecture_are_clear(lora_plugins, config: str) -> None:
    assert "cannot be read (No such file" in lora_plugins("describe", "qwen3", "--hf-config", config + "x").err
    result = lora_plugins("describe", "bert", "--hf-config", config)
    assert result.code == 2
    assert "architecture 'bert': no plugin serves it; there is " in result.err and "architecture 'qwen3'" in result.err
