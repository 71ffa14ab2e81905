"""`lora-plugins check`: text, JSON, exit codes, and level 0 without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def test_text(lora_plugins: Command) -> None:
    result = lora_plugins("check", "qwen3", "--level", "0")
    assert result.code == 0
    assert "packs" in result.out and "linear_qkv" in result.out
    assert "NOT RUN snapshot: no snapshot file was named" in result.out
    assert "NOT RUN L2 parallel layouts against one process: not asked for" in result.out
    assert "NOT COVERED serving" in result.out


def test_json_is_all_that_is_printed(lora_plugins: Command, wrong_plugin: Path) -> None:
    result = lora_plugins("check", "qwen3", "--plugin", str(wrong_plugin), "--level", "0", "--report", "json")
    assert result.code == 1
    report = json.loads(result.out)
    assert report["conforms"] is False
    assert report["levels_not_asked_for"] == [1, 2, 3]
    assert report["coverage"]["sites"]["decoder.layers.{layer}.mlp.linear_fc1"] == 4
    assert report["coverage"]["not_exercised"] == []
    (case,) = [case for case in report["cases"] if case["check"] == "peft-names"]
    finding = case["findings"][0]
    assert finding["projection"] == "model.embed_tokens"
    assert finding["text"].startswith("name of site embedding.word_embeddings")


def test_failures_are_shown(lora_plugins: Command, wrong_plugin: Path) -> None:
    result = lora_plugins("check", "qwen3", "--plugin", str(wrong_plugin), "--level", "0")
    assert result.code == 1
    assert "FAILED peft-names: failed" in result.out
    assert "would be loaded as model.layers.1.self_attn.q_proj lora_A" in result.out
    assert "more" in result.out, "long lists are cut, and say so"


def test_a_site_that_nobody_exercises_is_seen(lora_plugins: Command, tmp_path: Path) -> None:
    from lora_plugin_qwen3.architecture import ARCHITECTURE

    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(ARCHITECTURE.tiny_config) | {"tie_word_embeddings": True}))
    result = lora_plugins("check", "qwen3", "--level", "0", "--hf-config", str(config))
    assert result.code == 0
    assert "NOT EXERCISED output_layer" in result.out


def test_a_config_narrower_than_the_rank(lora_plugins: Command, tmp_path: Path) -> None:
    from lora_plugin_qwen36_moe.architecture import ARCHITECTURE

    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(ARCHITECTURE.tiny_config) | {"moe_intermediate_size": 6}))
    options = ("check", "qwen36_moe", "--level", "0", "--hf-config", str(config))
    result = lora_plugins(*options)
    assert result.code == 2 and "use a rank of at most 6" in result.err and not result.out
    assert lora_plugins(*options, "--rank", "4").code == 0


@pytest.mark.parametrize(("sharing", "said"), [("outer", "expert_sharing"), ("inner", "expert_sharing='inner'")])
def test_options_that_fit_no_adapter(lora_plugins: Command, sharing: str, said: str) -> None:
    result = lora_plugins("check", "qwen3", "--level", "0", "--expert-sharing", sharing)
    assert result.code == 2 and said in result.err and not result.out


def test_snapshot_options(lora_plugins: Command, tmp_path: Path) -> None:
    file = str(tmp_path / "table.md")
    assert "give --snapshot FILE" in lora_plugins("check", "qwen3", "--level", "0", "--update-snapshot").err
    assert lora_plugins("check", "qwen3", "--level", "0", "--snapshot", file).code == 1
    assert lora_plugins("check", "qwen3", "--level", "0", "--snapshot", file, "--update-snapshot").code == 0
    assert lora_plugins("check", "qwen3", "--level", "0", "--snapshot", file).code == 0


def test_an_architecture_without_a_tiny_config(
    lora_plugins: Command, install: Callable[..., Path], toy_plugin: str
) -> None:
    install("toy", toy_plugin)
    result = lora_plugins("check", "toy", "--level", "0")
    assert result.code == 2
    assert "declares no tiny_config" in result.err


def test_level_0_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from lora_plugins_sdk.cli import main\n"
        "sys.argv = ['lora-plugins', 'check', 'qwen3', '--level', '0']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, stdout=subprocess.DEVNULL)
