"""Idle ranks kept for the next case: importing torch and megatron-core costs seconds."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable

from lora_plugins_sdk.testing.processes import Launcher, RankProcess

IDLE_LIMIT = 4
_READY_SECONDS = 60.0


class RankPool:
    """The ranks of one parent process, handed out in a stable order: equal worlds get equal processes."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._launcher: Launcher | None = None
        self._idle: list[RankProcess] = []

    def acquire(self, count: int) -> list[RankProcess]:
        """`count` ranks that wait for a case.

        Raises:
            RuntimeError: no rank can be started; the message has the output of the process that failed.
        """
        with self._lock:
            if self._launcher is not None and not self._launcher.alive:
                self._end()
            launcher = self._launcher = self._launcher or Launcher()
            ranks, self._idle = self._idle[:count], self._idle[count:]
            try:
                used = [rank.is_ready(_READY_SECONDS) for rank in ranks]
                for rank in [rank for rank, ready in zip(ranks, used, strict=True) if not ready]:
                    ranks.remove(rank)
                    rank.kill()
                fresh = [RankProcess(launcher) for _ in range(count - len(ranks))]
                ranks += fresh
                for rank in fresh:
                    if not rank.is_ready(_READY_SECONDS):
                        raise RuntimeError(f"a test rank could not start:\n{rank.read_output()}")
            except BaseException:
                for rank in ranks:
                    rank.kill()
                self._end()
                raise
            for rank in ranks:
                rank.read_output()  # of no case
            return ranks

    def release(self, ranks: Iterable[RankProcess]) -> None:
        """Take back ranks that were told to leave their world; those above :data:`IDLE_LIMIT` are ended."""
        with self._lock:
            self._idle = [*ranks, *self._idle]
            kept, ended = self._idle[:IDLE_LIMIT], self._idle[IDLE_LIMIT:]
            self._idle = kept
            for rank in ended:
                rank.kill()

    def close(self) -> None:
        """End every idle rank and the launcher."""
        with self._lock:
            if os.getpid() == self.owner:  # a fork of the parent shares the handles but owns no rank
                self._end()

    def _end(self) -> None:
        for rank in self._idle:
            rank.kill()
        self._idle = []
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None


_pool: RankPool | None = None


def rank_pool() -> RankPool:
    """This process' pool."""
    global _pool
    if _pool is None or _pool.owner != os.getpid():
        _pool = RankPool()
    return _pool


@atexit.register
def close_pool() -> None:
    """End all idle ranks now; the next :func:`run_world` starts new ones. Called at exit."""
    if _pool is not None:
        _pool.close()
