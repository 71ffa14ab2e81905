"""The typer application: the commands, and how an error leaves them."""

from __future__ import annotations

from typing import Annotated

import typer

from lora_plugins_sdk.cli.check import check
from lora_plugins_sdk.cli.describe import describe
from lora_plugins_sdk.cli.diff_adapters import diff
from lora_plugins_sdk.cli.doctor import doctor
from lora_plugins_sdk.cli.export_adapter import export_adapter
from lora_plugins_sdk.cli.inspect_adapter import inspect_adapter
from lora_plugins_sdk.cli.list_plugins import list_plugins
from lora_plugins_sdk.cli.merge import merge
from lora_plugins_sdk.command_line import run_command_line

app = typer.Typer(
    name="lora-plugins",
    help="Look at LoRA model plugins and at adapters. `list`, `describe`, `doctor`, `check --level 0` need no torch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_plugins)
app.command("describe")(describe)
app.command("doctor")(doctor)
app.command("check")(check)
app.command("merge")(merge)
app.command("export")(export_adapter)
app.command("inspect")(inspect_adapter)
app.command("diff")(diff)


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        # The context is entered until the command ends, so `main` sees the exception with its traceback.
        context.ensure_object(dict)["debug"] = True


def main() -> None:
    """Run the command line. A user's error is one message and exit code 2; `--debug` shows its traceback."""
    run_command_line(app, "lora-plugins")
