"""The command `lora-grpo`. Torch is imported only by the commands that compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lora_harness.quiet import quiet_libraries
from lora_plugins_sdk.command_line import run_command_line
from lora_plugins_sdk.errors import LoraError

app = typer.Typer(
    name="lora-grpo",
    help="Train LoRA adapters with GRPO on Megatron-core models.\n\nStart with `lora-grpo quickstart`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="Training config; `lora-grpo options` lists what it may hold.")
]
_OVERRIDE_HELP = (
    "Override one option, e.g. `--set optimizer.lr=1e-4`. Values are TOML; text without quotes is a string. "
    "May be repeated."
)
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_OVERRIDE_HELP)]


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        context.ensure_object(dict)["debug"] = True
    else:
        quiet_libraries()


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Continue from a checkpoint, or from the newest one of a run's directory; `auto` takes the newest of "
            "the output directory, and starts anew when there is none.",
        ),
    ] = None,
    load_weights_only: Annotated[
        bool,
        typer.Option(
            "--load-weights-only",
            help="With `--resume PATH`: take the adapter's weights alone and begin a new run at step 0.",
        ),
    ] = False,
) -> None:
    """Train an adapter as a config says.

    Writes into the config's `output` directory: `adapter/` (PEFT), `metrics.jsonl` (a row a step), `reward.png`,
    `summary.json` (held-out reward before and after), `tensorboard/` and `config.toml` (what the run really used).

    One process:

        lora-grpo train run.toml --set steps=200 --set output=runs/a

    Several, with `parallel.tp` and `parallel.pp` of the config; what is left over is data parallel:

        torchrun --nproc-per-node 4 -m lora_harness train run.toml --set parallel.tp=2

    With `checkpoint.every` set, a run that was cut off continues, also under other parallel sizes:

        lora-grpo train run.toml --set checkpoint.every=50 --resume auto
    """
    from lora_harness.config import load_config
    from lora_harness.report import refuse_used_output

    if load_weights_only:
        from lora_harness.start import refuse_unnamed_weights

        # Before the output: a used one would tell to add another --resume.
        refuse_unnamed_weights(resume, weights_only=True)
    loaded = load_config(config, overrides or ())
    if resume is None:
        refuse_used_output(loaded.output)
    if os.environ.get("RANK", "0") == "0":
        # Importing torch and reading a large model take a while in which nothing else is shown.
        typer.echo(f"loading the data and the model {loaded.model.path} ...")
    from lora_harness.train import run_training

    run_training(loaded, resume=resume, load_weights_only=load_weights_only)


@app.command("eval")
def evaluate(
    config: ConfigFile,
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="PEFT directory of an adapter; without it the base is evaluated.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate the base model, or an adapter, on the config's held-out prompts.

    Reads the adapter with transformers and PEFT, which share no code with the trainer.

        lora-grpo eval runs/a/config.toml --adapter runs/a/adapter
    """
    from lora_harness.config import load_config

    loaded = load_config(config, overrides or ())
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        from lora_plugins_sdk.staging import directory_problem

        reason = directory_problem(adapter) or "has no adapter_config.json"
        raise LoraError(f"--adapter {adapter}", reason=reason, cure="give a PEFT directory, e.g. RUN/adapter")
    from lora_harness.evaluate import run_evaluation

    run_evaluation(loaded, adapter=adapter)


@app.command()
def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output directories of runs, or metrics.jsonl files.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.png", help="Picture to write. [reward.png of the first RUN]"),
    ] = None,
) -> None:
    """Draw the reward of one or more runs into one picture, and print their steps as tables.

    lora-grpo plot runs/a runs/b -o compare.png
    """
    from rich.console import Console

    from lora_harness.report.plot_runs import plot_runs

    directory = runs[0] if runs[0].is_dir() else runs[0].parent
    plot_runs(runs, output or directory / "reward.png", Console())


@app.command()
def quickstart(
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Receives the model and everything the run writes.")
    ] = Path("runs/quickstart"),
    engine: Annotated[str, typer.Option(metavar="NAME", help="Rollout engine: local or sglang.")] = "local",
    mode: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="How the policy reaches SGLang: adapter or merge. [merge, with a warning]"),
    ] = None,
    sglang_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Interpreter that has SGLang. [this one]")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Architecture to build small and train; `lora-plugins list` shows them.")
    ] = "qwen3",
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. [as many as the task needs]")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=f"{_OVERRIDE_HELP} Not for `model.path` and `task`, which are made, nor for what has an option here: "
            "`output`, `seed`, `steps`, `rollout.engine`, `rollout.mode`, `rollout.sglang.python`.",
        ),
    ] = None,
) -> None:
    """From nothing to a trained adapter in minutes, on a CPU.

    Makes a small model, teaches it arithmetic badly, freezes it, trains a LoRA adapter with GRPO, and shows the
    held-out reward before and after.

    On several processes, with the parallel sizes of a training config:

        torchrun --nproc-per-node 2 -m lora_harness quickstart --model inkling --set parallel.tp=2 \\
            --set parallel.ep=2 --set parallel.etp=1 --set parallel.sequence_parallel=true
    """
    from lora_harness.quickstart import run_quickstart

    run_quickstart(
        output=output,
        engine=engine,
        model=model,
        seed=seed,
        steps=steps,
        mode=mode,
        sglang_python=sglang_python,
        overrides=overrides or (),
    )


@app.command()
def options() -> None:
    """List every option of a training config with its default and meaning."""
    from rich.console import Console

    from lora_harness.config.catalogue import option_table

    Console().print(option_table())


def main() -> None:
    """Run the command line. A user's error is one message and exit code 2; `--debug` shows its traceback."""
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    run_command_line(app, f"lora-grpo{rank}")
