"""The quickstart, start to end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lora_harness.config import TrainConfig
from lora_harness.engines import check_engine_name
from lora_harness.engines.capabilities import refuse_unfit_targets
from lora_harness.engines.sglang.interpreter import refuse_without_sglang
from lora_harness.quickstart.model import model_config, too_narrow
from lora_harness.quickstart.previous import BASE_NAME, earlier_run_aside, replaced_base
from lora_harness.quickstart.recipe import DEFAULT_STEPS, BaseRecipe, training_config
from lora_harness.quickstart.tokenizer import VOCABULARY
from lora_plugins_sdk import load_plugin


def run_quickstart(
    output: Path,
    engine: str = "local",
    model: str = "qwen3",
    seed: int = 0,
    steps: int | None = None,
    mode: str | None = None,
    sglang_python: Path | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Make a base, train a LoRA adapter on it with GRPO, and show the held-out reward before and after.

    The reward is the share of right answers among completions sampled at temperature 1, before and after alike;
    greedy decoding is shown beside it. Both are measured by transformers and PEFT from the files on disk, and
    ``reward_before`` and ``reward_after`` of summary.json are these figures. Every started rank calls it; the first
    makes the base and evaluates, all train.

    Args:
        output: receives ``base/``, ``adapter/`` and everything a run writes. An earlier quickstart there is
            replaced as soon as nothing refuses the new run; its base is kept when it was made with the same seed and
            recipe.
        engine: rollout engine.
        model: architecture of an installed plugin that has a `quickstart_config`.
        seed: of everything random.
        steps: training steps, `DEFAULT_STEPS` when None.
        mode: how the policy reaches SGLang, "adapter" or "merge".
        sglang_python: interpreter that has SGLang, this one when None.
        overrides: `KEY=VALUE` of further options of a training config, the parallel sizes for example.

    Raises:
        LoraError: unknown engine, model or target, an override that the run cannot have, another number of processes
            than the parallel sizes need, or an output directory that holds something else.
    """
    check_engine_name(engine)
    small = model_config(model)
    config = training_config(
        base=output / BASE_NAME,
        output=output,
        engine=engine,
        seed=seed,
        steps=DEFAULT_STEPS if steps is None else steps,
        mode=mode,
        sglang_python=sglang_python,
        overrides=overrides,
    )
    plugin, sized = load_plugin(architecture=model), small | {"vocab_size": len(VOCABULARY)}
    narrow = too_narrow(plugin, sized, config.lora.to_sdk(seed=seed))
    excluded = (*config.lora.exclude_modules, *narrow)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"exclude_modules": excluded})})
    # Torch from here on: names and options are checked without it.
    from lora_harness.launch import run_facts, started
    from lora_harness.ranks import is_first_rank, on_first_rank
    from lora_harness.train import Trainer

    # Training would find it too, minutes later: the base is made first.
    refuse_unfit_targets(config, plugin, sized, run_facts(config.parallel))
    with started(config) as run:
        say = _say if is_first_rank() else _stay_silent
        with ExitStack() as stack:
            on_first_rank(lambda: refuse_without_sglang(config.rollout.sglang))
            aside = earlier_run_aside(output)
            earlier = on_first_rank(lambda: stack.enter_context(aside))
            on_first_rank(lambda: _make_base(config, model, BaseRecipe(model=small)))
            say(
                f"2/3 GRPO: {config.steps} steps, LoRA rank {config.lora.rank}; the reward is 1 for a right sum, else 0"
            )
            if narrow:
                say(f"    without {', '.join(narrow)}, which are narrower than this rank in so small a model")
            trainer = Trainer(config, run)
        if earlier:
            say(f"    replacing the earlier quickstart in {output}")
        result = trainer.train()
        on_first_rank(lambda: _compare(config, result.adapter))


def _make_base(config: TrainConfig, model: str, recipe: BaseRecipe) -> None:
    """Step 1, on one rank while the others wait."""
    from lora_harness.quickstart.base_model import make_base

    _say(f"1/3 base: a small {model} learns three-digit addition from demonstrations that mostly forget to carry")
    replaced = replaced_base(config.output)
    base = make_base(config.model.path, seed=config.seed, recipe=recipe, replaced=replaced, say=_say)
    made = "kept from an earlier run" if base.reused else "made"
    _say(f"    {base.path} ({made}): right in {base.accuracy.sampled:.1%} of samples; it is frozen now")


def _compare(config: TrainConfig, adapter: Path) -> None:
    """Step 3, on one rank: the reward before and after, from the files."""
    from lora_harness.evaluate import evaluate
    from lora_harness.report import Summary

    _say("3/3 evaluation of the files on disk with transformers and PEFT")
    drawn = {"sampled, temperature 1": (1.0, config.eval.samples), "greedy": (0.0, 1)}
    rewards = {
        name: tuple(
            evaluate(config, adapter=one, temperature=temperature, samples=samples).reward for one in (None, adapter)
        )
        for name, (temperature, samples) in drawn.items()
    }
    before, after = rewards["sampled, temperature 1"]
    replace(Summary.read(config.output), reward_before=before, reward_after=after).write(config.output)

    table = Table(title=f"right sums on {config.eval.count} held-out problems")
    for heading in ("completions", "base", "base + adapter"):
        table.add_column(heading, justify="left" if heading == "completions" else "right")
    for name, pair in rewards.items():
        table.add_row(name, *(f"{value:.1%}" for value in pair))
    Console().print(table)
    base = config.model.path
    _say(f"plot:    {config.output / 'reward.png'}\nadapter: {adapter} (PEFT)\nbase:    {base} (transformers)")


def _say(text: str) -> None:
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def _stay_silent(text: str) -> None:
    """What the other ranks say."""
