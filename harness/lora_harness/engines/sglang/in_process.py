"""One SGLang engine inside this process, which then needs SGLang's own versions of torch and transformers.

SGLang changes transformers when it is imported (rotary embeddings come out wrong): a process that imports this module
must not run a transformers model afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from lora_harness.engines.sglang import wire
from lora_harness.engines.sglang.client import SglangCompletion, SglangRequest
from lora_harness.engines.sglang.log_tail import LogTail
from lora_harness.engines.sglang.overdue import TooLong, abort_overdue
from lora_plugins_sdk.errors import LoraError

T = TypeVar("T")
_HEALTH_SECONDS = 10.0
_POLL_SECONDS = 0.5
# SGLang allows one engine in a process.
_child_died = threading.Event()


def _note_death(*_: Any) -> None:
    """Signal handler in place of SGLang's, which kills this process. By name, because SGLang pickles it."""
    _child_died.set()


class InProcessClient:
    """A `SglangClient` on `sglang.Engine`. SGLang's scheduler runs as a child process all the same.

    Build it in the main thread, and one at a time in a process: SGLang installs signal handlers.

    Args:
        arguments: SGLang's arguments, by the names of `Engine`.
        log: file that receives what SGLang's processes print.
        timeout: most seconds that one call may take; a generation that takes longer is aborted.

    Raises:
        LoraError: SGLang cannot be imported here, or the engine does not start.
    """

    name = "sglang (in process)"

    def __init__(self, arguments: Mapping[str, Any], *, log: Path, timeout: float = 600.0) -> None:
        self._timeout = timeout
        self._log = LogTail(log)
        self._closed = False
        engine_class, self._io = _import_sglang()
        began = time.monotonic()
        handler = {"custom_sigquit_handler": _note_death}
        _child_died.clear()
        before = signal.getsignal(signal.SIGQUIT)
        try:
            with _output_into(log):
                self._engine = engine_class(**{"log_level": "info", **arguments, **handler})
        except (Exception, SystemExit) as error:
            signal.signal(signal.SIGQUIT, before)
            raise LoraError(
                f"SGLang in this process ({log})",
                reason=f"did not start ({type(error).__name__}: {error}); the end of its log:\n{self._log.tail()}",
                cure="correct what the log names",
            ) from error
        self._before = before
        self.start_seconds = time.monotonic() - began
        self._manager: Any = self._engine.tokenizer_manager
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        # Calls come from several threads; the loop runs in one of its own.
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[SglangRequest]) -> list[SglangCompletion]:
        """See `SglangClient.generate`."""
        if not requests:
            return []
        asked = self._io.GenerateReqInput(**wire.generate_fields(requests))
        try:
            answers = self._run(self._first(self._manager.generate_request(asked, None)), "generate")
        except TooLong:
            raise abort_overdue(self, requests, self._timeout) from None
        return [wire.read_completion(self.name, one, answer) for one, answer in zip(requests, answers, strict=True)]

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], checksums: Mapping[str, str]
    ) -> None:
        """See `SglangClient.load_adapter`."""
        asked = self._io.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=dict(config),
            serialized_named_tensors=self._for_every_rank(
                {key: wire.portable(tensor) for key, tensor in tensors.items()}
            ),
            expected_checksums=dict(checksums),
        )
        self._lora(self._manager.load_lora_adapter_from_tensors(asked, None), f"load {name}")

    def load_adapter_directory(self, name: str, directory: Path) -> None:
        """See `SglangClient.load_adapter_directory`."""
        asked = self._io.LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(directory))
        self._lora(self._manager.load_lora_adapter(asked, None), f"load {name}")

    def unload_adapter(self, name: str) -> None:
        """See `SglangClient.unload_adapter`."""
        asked = self._io.UnloadLoRAAdapterReqInput(lora_name=name)
        self._lora(self._manager.unload_lora_adapter(asked, None), f"unload {name}")

    def loaded_adapters(self) -> frozenset[str]:
        """See `SglangClient.loaded_adapters`."""
        return frozenset(self._manager.lora_registry.get_all_adapters())

    def begin_weight_update(self) -> None:
        """See `SglangClient.begin_weight_update`. Requests that run are held back and go on afterwards."""
        self._run(self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="retract")), "pause")
        try:
            self._weights(
                self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput(), None), "begin_weight_update"
            )
        except LoraError:
            self._continue()
            raise

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """See `SglangClient.update_weights`."""
        asked = self._io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._for_every_rank(
                [(key, wire.portable(tensor)) for key, tensor in tensors.items()]
            ),
            flush_cache=False,
        )
        self._weights(self._manager.update_weights_from_tensor(asked, None), "update_weights_from_tensor")

    def end_weight_update(self, version: str) -> None:
        """See `SglangClient.end_weight_update`."""
        io = self._io
        self._weights(self._manager.end_weight_update(io.EndWeightUpdateReqInput(), None), "end_weight_update")
        flushed = self._run(self._manager.flush_cache(), "flush_cache")
        if not flushed.success:
            raise self._refused("flush_cache", flushed.message)
        stamp = io.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._run(self._manager.update_weight_version(stamp), "update_weight_version")
        self._continue()

    def weight_checksums(self) -> Mapping[str, str]:
        """See `SglangClient.weight_checksums`."""
        asked = self._io.CheckWeightsReqInput(action="checksum")
        success, message, ranks, _ = self._run(self._manager.check_weights(asked, None), "check_weights")
        if not success:
            raise self._refused("check_weights", message)
        return wire.weight_checksums(ranks)

    def abort(self, rid: str | None = None) -> None:
        """See `SglangClient.abort`."""

        async def ask() -> None:
            self._manager.abort_request(rid=rid or "", abort_all=rid is None)

        self._run(ask(), "abort")

    def healthy(self) -> bool:
        """See `SglangClient.healthy`."""
        if self._closed or _child_died.is_set():
            return False
        rid = f"health-{time.monotonic_ns()}"
        asked = self._io.GenerateReqInput(
            rid=rid, input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0}
        )
        try:
            self._run(self._first(self._manager.generate_request(asked, None)), "health", timeout=_HEALTH_SECONDS)
        except LoraError:
            return False
        return True

    def death(self) -> LoraError | None:
        """See `SglangClient.death`."""
        return self._dead("its work") if _child_died.is_set() else None

    def close(self) -> None:
        """See `SglangClient.close`."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._engine.shutdown()
        signal.signal(signal.SIGQUIT, self._before)

    @staticmethod
    async def _first(answers: Any) -> Any:
        return await anext(answers)

    def _for_every_rank(self, tensors: Any) -> list[bytes]:
        payload = wire.pack_tensors(tensors)
        return [payload] * int(self._engine.server_args.tp_size)

    def _continue(self) -> None:
        self._run(self._manager.continue_generation(self._io.ContinueGenerationReqInput()), "continue")

    def _lora(self, asked: Coroutine[Any, Any, Any], what: str) -> None:
        answer = self._run(asked, what)
        if not answer.success:
            raise self._refused(what, answer.error_message)

    def _weights(self, asked: Coroutine[Any, Any, tuple[bool, str]], what: str) -> None:
        success, message = self._run(asked, what)
        if not success:
            raise self._refused(what, message)

    def _run(self, asked: Coroutine[Any, Any, T], what: str, *, timeout: float | None = None) -> T:
        """Run on the engine's loop and wait; notices when the engine dies, which leaves its calls without an answer."""
        running = asyncio.run_coroutine_threadsafe(asked, self._loop)
        deadline = time.monotonic() + (timeout or self._timeout)
        while True:
            try:
                return running.result(_POLL_SECONDS)
            except FutureTimeout:
                if _child_died.is_set():
                    running.cancel()
                    raise self._dead(what) from None
                if time.monotonic() > deadline:
                    running.cancel()
                    raise TooLong(self.name, what, timeout or self._timeout) from None
            except (ValueError, RuntimeError) as error:
                raise self._refused(what, str(error)) from error

    def _dead(self, what: str) -> LoraError:
        return LoraError(
            f"SGLang in this process ({self._log.path})",
            reason=f"lost one of its processes during {what}; the end of its log:\n{self._log.tail()}",
            cure="correct what the log names; it holds the whole story",
        )

    def _refused(self, what: str, words: str) -> LoraError:
        return LoraError(f"engine {self.name}", reason=f"refused {what}: {words}", cure="correct what its words name")


def _import_sglang() -> tuple[Any, Any]:
    try:
        from sglang.srt.entrypoints.engine import Engine  # pyright: ignore[reportMissingImports]
        from sglang.srt.managers import io_struct  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise LoraError(
            "rollout.sglang.in_process",
            reason=f"this interpreter ({sys.executable}) cannot import SGLang ({error})",
            cure="remove it and set rollout.sglang.python to an interpreter that has SGLang",
        ) from error
    return Engine, io_struct


@contextlib.contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """Send standard output and error of this process, and of the children that it starts meanwhile, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, one in zip((1, 2), kept, strict=True):
            os.dup2(one, number)
            os.close(one)


def start_in_process(
    arguments: Mapping[str, Any], *, log: Path, timeout: float, say: Callable[[str], None]
) -> InProcessClient:
    """An engine in this process, once it serves."""
    say(f"starting SGLang in this process; log: {log}")
    client = InProcessClient(arguments, log=log, timeout=timeout)
    say(f"SGLang serves after {client.start_seconds:.0f} s")
    return client
