"""An engine that dies while several ranks draw from it: all ranks hear it, none waits for another for ever.

Engines are files here: one that is gone is an engine that died. `tests/sglang/test_engine_lifetime.py` kills real ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from lora_harness.engines import Completion, EngineCapabilities, GenerationRequest, SamplingParams
from lora_harness.engines.sglang.client import SglangCompletion, SglangRequest
from lora_harness.engines.sglang.engine import MOST_RESTARTS, SglangEngine
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_harness.rollouts import RolloutCollector
from lora_harness.tasks import Example
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.testing import Layout, run_world

pytestmark = pytest.mark.world

RANKS = Layout(dp=2)
SAMPLING = SamplingParams(max_new_tokens=2)
DEADLY = 10
SEEDS = (1, 2, 3, 4)


class Client:
    """Draws a prompt's first token and the seed. Prompts that begin with a deadly token end an engine, `deaths` times.

    Args:
        alive: the engine.
        deaths: after so many restarts the engine survives what is deadly.
        owner: whether this rank started the engine.
    """

    def __init__(self, alive: Path, deaths: int, owner: bool) -> None:
        self.name, self._alive, self._deaths, self._owner = alive.name, alive, deaths, owner

    def generate(self, requests: Sequence[SglangRequest]) -> list[SglangCompletion]:
        if any(one.prompt_ids[0] == DEADLY for one in requests) and restarts(self._alive) < self._deaths:
            # Rank 0 has its answer by then, so that it meets nothing itself.
            while f"{self.name}-rank0" not in answers(self._alive.parent):
                time.sleep(0.01)
            self._alive.unlink(missing_ok=True)
        if not self.healthy():
            raise LoraError(f"engine {self.name}", reason="broke the connection", cure="look at it")
        if any(one.seed == 13 for one in requests):
            raise LoraError(f"engine {self.name}", reason="refused seed 13", cure="use another")
        count(self._alive.parent / f"answers-{self.name}-rank{dist.get_rank()}")
        return [
            SglangCompletion(token_ids=(one.prompt_ids[0], one.seed), logprobs=(-1.0, -2.0), finish_reason="length")
            for one in requests
        ]

    def healthy(self) -> bool:
        return self._alive.exists()

    def death(self) -> LoraError | None:
        if self.healthy() or not self._owner:
            return None
        return LoraError(f"log of {self.name}", reason="out of memory", cure="buy some")

    def close(self) -> None:
        pass


def count(file: Path) -> None:
    with file.open("a") as counter:
        counter.write("x")


def restarts(alive: Path) -> int:
    counter = alive.with_name(f"restarts-{alive.name}")
    return len(counter.read_text()) if counter.exists() else 0


def answers(folder: Path) -> dict[str, int]:
    """How often each engine answered each rank."""
    return {one.name.removeprefix("answers-"): len(one.read_text()) for one in sorted(folder.glob("answers-*"))}


def engine_on(folder: Path, *, engines: int = 1, deaths: int = 0, ours: bool = True) -> SglangEngine:
    """A run's engine; rank 0 may start what it is made of again."""
    owner = ours and dist.get_rank() == 0

    def client(index: int) -> Client:
        alive = folder / f"engine{index}"
        alive.touch()
        return Client(alive, deaths, owner)

    def restart(index: int) -> Client:
        count(folder / f"restarts-engine{index}")
        return client(index)

    group = EngineGroup([client(index) for index in range(engines)], restart=restart if owner else None)  # type: ignore[arg-type]
    dist.barrier()
    capabilities = EngineCapabilities(name="sglang", mode="adapter")
    return SglangEngine(group, None, capabilities=capabilities, vocab_size=100, context=64)


def share_of(rank: int) -> list[GenerationRequest]:
    """Rank 1's are deadly."""
    prompt = (DEADLY if rank else 5, 6)
    return [GenerationRequest(prompt_ids=prompt, sampling=SAMPLING, seed=seed) for seed in SEEDS]


def draw(folder: str, engines: int, deaths: int, ours: bool) -> list[Completion] | str:
    """This rank's completions, or the error."""
    engine = engine_on(Path(folder), engines=engines, deaths=deaths, ours=ours)
    try:
        return engine.generate(share_of(dist.get_rank()))
    except LoraError as error:
        return str(error)


@pytest.mark.parametrize("engines", [1, 2])
def test_what_one_rank_meets_is_drawn_again_and_nothing_else(tmp_path: Path, engines: int) -> None:
    first, second = run_world(draw, RANKS, str(tmp_path), engines, 1, True)
    assert [one.token_ids for one in first] == [(5, seed) for seed in SEEDS]
    assert [one.token_ids for one in second] == [(DEADLY, seed) for seed in SEEDS]
    for index in range(engines):
        assert restarts(tmp_path / f"engine{index}") == 1
        assert {rank: answers(tmp_path)[f"engine{index}-rank{rank}"] for rank in (0, 1)} == {0: 1, 1: 1}


def test_an_engine_that_dies_of_the_same_completions_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_world(draw, RANKS, str(tmp_path), 1, MOST_RESTARTS + 1, True)
    assert first == second
    assert f"failed again after {MOST_RESTARTS} restarts while it drew the same completions: log of engine0" in first
    assert "out of memory" in first and "-> correct what its log names, or ask less of it" in first
    assert restarts(tmp_path / "engine0") == MOST_RESTARTS


def test_an_engine_of_somebody_else_is_not_restarted(tmp_path: Path) -> None:
    first, second = run_world(draw, RANKS, str(tmp_path), 1, 1, False)
    assert first == second
    assert "failed while it drew completions, and this run did not start it (engine engine0: broke the conn" in first
    assert first.endswith("-> start it again and resume the run")


def refused(folder: str) -> list[str]:
    """What rank 1 cannot ask, and what the engine refuses it."""
    engine, said = engine_on(Path(folder)), []
    for seed, tokens in ((1, 200), (13, 1)):
        bad = GenerationRequest(prompt_ids=(1,) * tokens, sampling=SAMPLING, seed=seed)
        with pytest.raises(LoraError) as told:
            engine.generate([bad] if dist.get_rank() else share_of(0))
        said.append(str(told.value))
    return said


def test_a_request_that_one_rank_may_not_make_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_world(refused, RANKS, str(tmp_path))
    assert first == second
    assert "200 prompt tokens" in first[0] and "refused seed 13" in first[1]


class Encoder:
    """Cannot encode the second prompt, which is rank 1's."""

    def encode(self, example: Example) -> tuple[int, ...]:
        if example.prompt == "bad":
            raise LoraError("prompt 'bad'", reason="has no tokens", cure="give it some")
        return (1,)


def collect_a_prompt_that_fails(folder: str) -> str:
    engine = engine_on(Path(folder))
    collector = RolloutCollector(engine, None, Encoder(), seed=0)  # type: ignore[arg-type]
    examples = [Example(prompt="good", answer=""), Example(prompt="bad", answer="")]
    with pytest.raises(LoraError) as told:
        collector.collect(examples, samples=1, sampling=SAMPLING, occasion="test")
    return str(told.value)


def test_a_prompt_that_one_rank_cannot_encode_leaves_no_rank_drawing_alone(tmp_path: Path) -> None:
    assert (
        run_world(collect_a_prompt_that_fails, RANKS, str(tmp_path))
        == ["prompt 'bad': has no tokens -> give it some"] * 2
    )
    assert not answers(tmp_path)
