"""Idle ranks kept for the next case: importing torch and megatron-core costs seconds, a case often less than one."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable

from lora_plugins_sdk.testing.messages import Ready
from lora_plugins_sdk.testing.processes import Launcher, RankProcess

IDLE_LIMIT = 4
_READY_SECONDS = 60.0


class RankPool:
    """The ranks of one parent process. Ranks are handed out in a stable order, so equal worlds get the same processes."""

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
            self._launcher = self._launcher or Launcher()
            used, self._idle = self._idle[:count], self._idle[count:]
            ranks = used + [RankProcess(self._launcher) for _ in range(count - len(used))]
            for index, rank in enumerate(ranks):
                if index < len(used) and not _is_ready(rank):  # the last case left it in a bad state
                    rank.kill()
                    ranks[index] = rank = RankProcess(self._launcher)
                    used = used[:index]
                if index >= len(used) and not _is_ready(rank):
                    output = rank.read_output()
                    for one in ranks:
                        one.kill()
                    raise RuntimeError(f"a test rank could not start:\n{output}")
                rank.read_output()  # belongs to no case
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
        if os.getpid() != self.owner:  # a fork of the parent shares the handles but owns no rank
            return
        with self._lock:
            for rank in self._idle:
                rank.kill()
            self._idle = []
            if self._launcher is not None:
                self._launcher.close()
                self._launcher = None


def _is_ready(rank: RankProcess) -> bool:
    try:
        return rank.connection.poll(_READY_SECONDS) and isinstance(rank.connection.recv(), Ready)
    except (EOFError, OSError):
        return False


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
