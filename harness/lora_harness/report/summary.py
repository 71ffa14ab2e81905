"""``summary.json``: what a run did, in one small file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_plugins_sdk.errors import LoraError

FILE_NAME = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Totals of a finished run.

    Args:
        reward_before, reward_after: mean reward on the held-out prompts, before and after training.
        steps: training steps.
        tokens: drawn tokens of all training steps.
        seconds: wall-clock seconds from the first evaluation to the last.
        trained_parameters: number of adapter parameters.
        logprob_gap_max: largest difference between the engine's and the trainer's log-probability of a drawn token;
            None when it was not finite in some step.
        held_out_prompts: prompts in one evaluation.
        seed: the run's seed.
        model: directory of the base model.
    """

    reward_before: float
    reward_after: float
    steps: int
    tokens: int
    seconds: float
    trained_parameters: int
    logprob_gap_max: float | None
    held_out_prompts: int
    seed: int
    model: str

    def write(self, directory: Path) -> None:
        """Write ``summary.json`` into a run's output directory."""
        (directory / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Summary:
        """Read the summary of a finished run.

        Raises:
            LoraError: the directory has no summary of this form.
        """
        path = directory / FILE_NAME
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise LoraError(
                str(path), reason=f"is no run summary ({error})", cure="give a finished run's output"
            ) from None
