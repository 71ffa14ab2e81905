"""The quickstart, start to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lora_harness.engines import check_engine_name
from lora_harness.quickstart.model import model_config, too_narrow
from lora_harness.quickstart.previous import BASE_NAME, prepare_output
from lora_harness.quickstart.recipe import DEFAULT_STEPS, LORA_RANK, BaseRecipe, training_config


def run_quickstart(
    output: Path,
    engine: str = "local",
    model: str = "qwen3",
    seed: int = 0,
    steps: int | None = None,
    mode: str | None = None,
    sglang_python: Path | None = None,
) -> None:
    """Make a base, train a LoRA adapter on it with GRPO, and show the held-out reward before and after.

    The reward is the share of right answers among completions sampled at temperature 1, before and after alike;
    greedy decoding is shown beside it. Both are measured by transformers and PEFT from the files on disk, and
    ``reward_before`` and ``reward_after`` of summary.json are these figures.

    Args:
        output: receives ``base/``, ``adapter/`` and everything a run writes. An earlier quickstart there is
            replaced; its base is kept when it was made with the same seed and recipe.
        engine: rollout engine.
        model: architecture of an installed plugin that has a `quickstart_config`.
        seed: of everything random.
        steps: training steps, `DEFAULT_STEPS` when None.
        mode: how the policy reaches SGLang, "adapter" or "merge".
        sglang_python: interpreter that has SGLang, this one when None.

    Raises:
        LoraError: unknown engine or model, or an output directory that holds something else.
    """
    check_engine_name(engine)
    small = model_config(model)
    narrow = too_narrow(model, small, LORA_RANK)
    config = training_config(
        base=output / BASE_NAME,
        output=output,
        engine=engine,
        seed=seed,
        steps=DEFAULT_STEPS if steps is None else steps,
        mode=mode,
        sglang_python=sglang_python,
        exclude=narrow,
    )
    # Torch from here on: names and options are checked without it.
    from lora_harness.evaluate import evaluate
    from lora_harness.quickstart.base_model import make_base
    from lora_harness.report import Summary
    from lora_harness.train import run_training

    console = Console()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    if prepare_output(output):
        say(f"replacing the earlier quickstart in {output}")
    say(f"1/3 base: a small {model} learns three-digit addition from demonstrations that mostly forget to carry")
    base = make_base(config.model.path, seed=seed, recipe=BaseRecipe(model=small), say=say)
    made = "kept from an earlier run" if base.reused else "made"
    say(f"    {base.path} ({made}): right in {base.accuracy.sampled:.1%} of samples; it is frozen now")
    say(f"2/3 GRPO: {config.steps} steps, LoRA rank {config.lora.rank}; the reward is 1 for the right sum, else 0")
    if narrow:
        say(f"    without {', '.join(narrow)}, which are narrower than this rank in so small a model")
    result = run_training(config)
    say("3/3 evaluation of the files on disk with transformers and PEFT")
    drawn = {"sampled, temperature 1": (1.0, config.eval.samples), "greedy": (0.0, 1)}
    rewards = {
        name: tuple(
            evaluate(config, adapter=adapter, temperature=temperature, samples=samples).reward
            for adapter in (None, result.adapter)
        )
        for name, (temperature, samples) in drawn.items()
    }
    before, after = rewards["sampled, temperature 1"]
    replace(Summary.read(output), reward_before=before, reward_after=after).write(output)

    table = Table(title=f"right sums on {config.eval.count} held-out problems")
    for heading in ("completions", "base", "base + adapter"):
        table.add_column(heading, justify="left" if heading == "completions" else "right")
    for name, pair in rewards.items():
        table.add_row(name, *(f"{value:.1%}" for value in pair))
    console.print(table)
    say(f"plot:    {output / 'reward.png'}\nadapter: {result.adapter} (PEFT)\nbase:    {base.path} (transformers)")
