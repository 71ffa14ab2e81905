"""A new directory that appears whole or not at all, whatever kills its writer. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_plugins_sdk.errors import LoraError


@contextmanager
def staged_directory(output: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """A place to write into; when the block ends well it is made durable and becomes `output` by one rename.

    The place is `.NAME.partial` beside the output. It goes away with an error of the block; what a killed process left
    is removed by the next writer of the same output. Writers exclude each other by a lock that dies with its process.

    Args:
        output: the directory to make.
        replace: whether a directory may be there already. It is moved to `.NAME.replaced` for the rename and removed
            then; a process killed in between leaves both whole, and the next writer puts it back.

    Raises:
        LoraError: the output exists, its parent does not, another process is writing it, or the disk refuses.
    """
    output = Path(os.path.abspath(output))
    refuse_output(output, replace=replace)
    partial, replaced = output.with_name(f".{output.name}.partial"), output.with_name(f".{output.name}.replaced")
    with writable(output), exclusive(output.with_name(f".{output.name}.lock"), output):
        if replace and replaced.exists() and not os.path.lexists(output):
            replaced.rename(output)
        refuse_output(output, replace=replace)
        remove(partial)
        partial.mkdir()
        try:
            yield partial
            _sync_tree(partial)
            if replace and os.path.lexists(output):
                remove(replaced)
                output.rename(replaced)
            partial.rename(output)
        except BaseException:
            if replace and replaced.exists() and not os.path.lexists(output):
                replaced.rename(output)
            remove(partial)
            raise
        sync(output.parent)
        if replace:
            remove(replaced)


def refuse_output(output: Path, *, replace: bool = False) -> None:
    """Whether a new directory can be made there.

    Args:
        output: the directory to make.
        replace: whether a directory may be there.

    Raises:
        LoraError: something is there already, or there is no parent directory.
    """
    if os.path.lexists(output) and not (replace and output.is_dir() and not output.is_symlink()):
        raise LoraError(str(output), reason="exists already", cure="give a new directory, or remove this one first")
    if problem := directory_problem(output.parent):
        raise LoraError(
            str(output),
            reason=f"its parent {output.parent}: {problem}",
            cure="give a place in a directory that is there, or make this one first",
        )


def directory_problem(path: Path) -> str | None:
    """Why a path is no directory: nothing is there, or something else; None where it is one."""
    if os.path.isdir(path):
        return None
    return "is not a directory" if os.path.lexists(path) else "no such directory"


@contextmanager
def writable(output: Path) -> Iterator[None]:
    """Within the context an `OSError` becomes a `LoraError` that names `output`."""
    try:
        yield
    except OSError as error:
        raise LoraError(
            str(output),
            reason=f"cannot be written ({error.strerror or error})",
            cure="give a writable place with free space",
        ) from error


@contextmanager
def exclusive(path: Path, output: Path) -> Iterator[None]:
    """Hold a lock that dies with this process.

    Args:
        path: the lock file, made and removed.
        output: what it guards, for the error.

    Raises:
        LoraError: another process holds it.
        OSError: the file cannot be made.
    """
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise LoraError(
                str(output), reason="another process is writing it", cure="wait for it, or give another directory"
            ) from error
        # The holder before us may have unlinked the file that we opened: then this lock guards nothing.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory; nothing when there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for file in files:
            sync(Path(folder, file))
        sync(Path(folder))


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
