"""Training configs: what is accepted, what is refused and how it says so, and that a dump reloads equal."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_harness.config import ReasoningGymTask, TrainConfig, dump_config, load_config, parse_config
from lora_harness.config.rules import RULES
from lora_plugins_sdk.errors import LoraError

MINIMAL = """
steps = 20

[model]
path = "base"

[task]
kind = "reasoning_gym"
dataset = "chain_sum"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def subjects(file: Path, *overrides: str) -> dict[str, str]:
    """The refused keys of a config, each with its reason and cure."""
    with pytest.raises(LoraError) as caught:
        load_config(file, overrides)
    assert all(str(one) in str(caught.value) for one in caught.value.diagnostics)
    return {one.subject: f"{one.reason} -> {one.cure}" for one in caught.value.diagnostics}


def test_minimal_config_and_its_defaults(file):
    config = load_config(file)
    assert config.steps == 20 and config.model.path == Path("base")
    assert config.algorithm.group_size == 8 and config.lora.target_modules == ("all-linear",)
    assert config.algorithm.clip_low is None and config.algorithm.kl_estimator is None


def test_overrides_are_typed_as_toml(file):
    config = load_config(
        file,
        [
            "steps=7",
            "optimizer.lr=1e-3",
            'lora.target_modules=["q_proj", "v_proj"]',
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "output=runs/a=b",
            'task.params={min_terms = 2, ops = ["+"]}',
            "task.params.max_terms=3",
        ],
    )
    assert config.steps == 7 and config.optimizer.lr == 1e-3
    assert config.lora.target_modules == ("q_proj", "v_proj")
    assert config.parallel.sequence_parallel and config.output == Path("runs/a=b")
    assert isinstance(config.task, ReasoningGymTask)
    assert config.task.params == {"min_terms": 2, "ops": ["+"], "max_terms": 3}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.minibatches=2", "algorithm.clip_high=0.28", "algorithm.kl_coef=0.05"],
        ["optimizer.schedule='cosine'", "optimizer.warmup_steps=3", "parallel.tp=2", "lora.use_rslora=true"],
        ["task={kind='jsonl', train_path='a.jsonl', scorer='math_verify'}"],
        ["task={kind='jsonl', train_path='a.jsonl', eval_path='b.jsonl', scorer='mine:reward'}"],
        ["task={kind='function', prompts='m.n:f', reward='m:g', params={deep={list=[1,2.5,{x=true}]}}}"],
        ["task.chat_template=true", 'task.system_prompt="quote \\" and \\n newline"', "eval.every=5"],
    ],
)
def test_dump_reloads_equal(file, overrides):
    config = load_config(file, overrides)
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_dump_shows_what_holds_and_nothing_without_effect(file):
    plain = tomllib.loads(dump_config(load_config(file)))
    assert "clip_low" not in plain["algorithm"] and "kl_estimator" not in plain["algorithm"]
    overrides = ["algorithm.epochs=2", "algorithm.kl_coef=0.1", "optimizer.schedule='linear'"]
    active = tomllib.loads(dump_config(load_config(file, overrides)))
    assert (active["algorithm"]["clip_low"], active["algorithm"]["clip_high"]) == (0.2, 0.2)
    assert active["algorithm"]["kl_estimator"] == "k3" and active["optimizer"]["min_lr"] == 0.0


def test_lora_section_is_the_sdk_config(file):
    sdk = load_config(file, ["lora.rank=4", "lora.alpha=8", "lora.use_rslora=true"]).lora.to_sdk(seed=5)
    assert (sdk.rank, sdk.scale, sdk.seed, sdk.dropout) == (4, 4.0, 5, 0.0)


def test_a_config_does_not_change(file):
    config = load_config(file)
    with pytest.raises(ValueError, match="frozen"):
        config.algorithm.group_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("stpes=3", "stpes", "did you mean 'steps'?"),
        ("lora.rnk=3", "lora.rnk", "did you mean 'rank'?"),
        ("algorithm.zzz=3", "algorithm.zzz", "known keys here: prompts_per_step"),
        ("task.datset='x'", "task.datset", "did you mean 'dataset'?"),
        ("rollout.group_size=3", "rollout.group_size", "write algorithm.group_size"),
        ("lora.every=3", "lora.every", "write checkpoint.every or write eval.every"),
        ("model.seed=3", "model.seed", "seed stands at the top: write it above the first [table]"),
        ("task.reward='m:f'", "task.reward", "known keys here: "),  # a key of another kind of task
        ("parallel.tp='2'", "parallel.tp", "expected: tensor parallel size, 1 or more"),
        ("parallel.tp=0", "parallel.tp", "expected: tensor parallel size, 1 or more"),
        ("steps=true", "steps", "expected: training steps"),
        ("lora.rank=0", "lora.rank", "0 is not accepted"),
        ("lora.dropout=0.1", "lora.dropout", "RL trains with dropout 0"),
        ("optimizer.lr=nan", "optimizer.lr", "expected: peak learning rate"),
        ("optimizer.lr=1e-4x", "optimizer.lr", "expected: peak learning rate"),
        ("rollout.temperature=0.0", "rollout.temperature", "greedy samples are all alike"),
        ("rollout.engine='vllm'", "rollout.engine", "'local'"),
        ("algorithm.group_size=1", "algorithm.group_size", "1 makes every advantage zero"),
        ("lora.target_modules=[]", "lora.target_modules", "expected: list of projection names"),
        ("lora.target_modules=[1]", "lora.target_modules", "1 is not accepted"),
        ("model=3", "model", "expected: a table of model options"),
        ("task={dataset='x'}", "task.kind", "is required -> use one of 'reasoning_gym', 'jsonl', 'function'"),
        ("task.kind='gym'", "task.kind", "'gym' is unknown -> use one of 'reasoning_gym'"),
        ("task={kind='jsonl'}", "task.train_path", "is required -> set it: JSONL file"),
        ("task={kind='jsonl', train_path='a', scorer='fuzzy'}", "task.scorer", "'math_verify' or a reward"),
        ("task={kind='function', prompts='a.b', reward='a:b'}", "task.prompts", "module:function"),
        # rules between options
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel", "set parallel.tp to 2 or more"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low", "algorithm.minibatches or algorithm.epochs"),
        ("algorithm.clip_high=0.1", "algorithm.clip_high", "has no effect with one optimizer update per step"),
        ("algorithm.kl_estimator='k3'", "algorithm.kl_estimator", "set algorithm.kl_coef above 0"),
        ("algorithm.minibatches=3", "algorithm.minibatches", "choose a divisor"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas", "not both in [0, 1)"),
        ("optimizer.min_lr=0.0", "optimizer.min_lr", "has no effect with optimizer.schedule = 'constant'"),
        ("optimizer={schedule='linear', lr=0.1, min_lr=0.2}", "optimizer.min_lr", "is not below optimizer.lr"),
        ("optimizer.warmup_steps=20", "optimizer.warmup_steps", "is not below steps = 20"),
        ("eval.every=20", "eval.every", "evaluation before and after always runs"),
        ("eval.samples=2", "eval.samples", "set eval.temperature above 0"),
        ("checkpoint.every=21", "checkpoint.every", "has no effect above steps = 20"),
        ("checkpoint.keep=2", "checkpoint.keep", "or set checkpoint.every"),
        ("checkpoint={every=1, keep=0}", "checkpoint.keep", "1 or more"),
        ("warm_start.reference='base'", "warm_start.reference", "or set warm_start.adapter"),
        ("warm_start={adapter='a', reference='sft'}", "warm_start.reference", "the frozen 'warm_start'"),
        ("task.template='Q:'", "task.template", "put {prompt} where the prompt belongs"),
        ("task.system_prompt='Be brief.'", "task.system_prompt", "set task.chat_template = true"),
        (
            "task={kind='jsonl', train_path='a', eval_path='b', eval_fraction=0.5}",
            "task.eval_fraction",
            "remove one of the two",
        ),
        ("task.params.seed=3", "task.params.seed", "is set by the harness"),
        ("task={kind='function', prompts='a:f', reward='a:g', params={split=1}}", "task.params.split", "remove it"),
    ],
)
def test_a_refusal_names_the_key_and_the_cure(file, override, key, said):
    found = subjects(file, override)
    assert list(found) == [key]
    assert said in found[key]


def test_everything_wrong_is_shown_together(file):
    """B44 (dropout) among unknown keys, wrong types, contradictions and options without effect."""
    found = subjects(
        file,
        "lora.dropout=0.1",
        "lora.rank='x'",
        "steps=-1",
        "model.pth='x'",
        "algorithm.kl_estimator='k1'",
        "eval.samples=4",
    )
    assert set(found) == {"lora.dropout", "lora.rank", "steps", "model.pth", "algorithm.kl_estimator", "eval.samples"}


def test_each_rule_reads_parts_that_exist():
    """A rule whose parameter is misspelt would never run."""
    names = {name for rule in RULES for name in rule.__annotations__ if name != "return"}
    assert names <= set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["steps"], "is not KEY=VALUE"),
        (["=3"], "is not KEY=VALUE"),
        (["a..b=3"], "is not KEY=VALUE"),
        (["steps=3", "steps=4"], "steps is set twice"),
        (["steps.x=4"], "steps is not a table"),
    ],
)
def test_malformed_overrides(file, overrides, said):
    with pytest.raises(LoraError, match=said):
        load_config(file, overrides)


def test_unreadable_files(tmp_path):
    with pytest.raises(LoraError, match="No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("steps = \n")
    with pytest.raises(LoraError, match=r"is not TOML: .*line 1.* -> correct that line"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "run.yaml").write_text("steps: 2\n")
    with pytest.raises(LoraError, match=r"run\.yaml: is not TOML: .* -> write the config in TOML"):
        load_config(tmp_path / "run.yaml")


def test_every_option_is_described():
    """Descriptions are shown as the cure of a wrong value."""

    def undescribed(model: Any, at: str = "") -> list[str]:
        return [at + name for name, field in model.model_fields.items() if not field.description]

    from lora_harness import config as c

    sections = [
        c.ModelSection, c.LoraSection, c.ParallelSection, c.RolloutSection, c.AlgorithmSection,
        c.OptimizerSection, c.EvalSection,
    ]  # fmt: skip
    tasks = [c.ReasoningGymTask, c.JsonlTask, c.FunctionTask]
    assert [name for section in sections for name in undescribed(section)] == []
    assert {name for task in tasks for name in undescribed(task)} == {"kind"}


def test_config_needs_no_torch():
    code = "import sys, lora_harness.config; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
