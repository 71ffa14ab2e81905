"""Checkpoints on disk: exact, checked when read, whole or absent whatever kills or stops the writer."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_checkpoint import NAME, save, small_state, small_tensors

from lora_harness.checkpoint import CheckpointDirectory, read_checkpoint, read_state, write_checkpoint
from lora_harness.report.metrics_file import keep_rows
from lora_harness.start import owned_output
from lora_plugins_sdk.errors import LoraError

# What the interpreter reports before it touches the file system; the writer dies at the n-th of them.
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def loads(path: Path, step: int) -> bool:
    """Whether a checkpoint holds exactly what was saved at `step`."""
    found, expected = read_checkpoint(path, read_state(path)), small_tensors(step)
    pairs = [(found.adapter.tensors, expected.adapter.tensors), (found.moments, expected.moments)]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    path = save(tmp_path, 3)
    assert path == tmp_path / "checkpoints" / "step-000003" and loads(path, 3)
    state = read_state(path)
    assert state.model_copy(update={"files": {}}) == small_state(3)
    assert sorted(state.files) == [
        "adapter/adapter_config.json",
        "adapter/adapter_meta.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
    ]
    assert not any(name.startswith(".") for name in os.listdir(tmp_path / "checkpoints"))


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    """Safetensors begin with their header's length and `{`, JSON with `{`; a pickle and a zip of pickles do not."""
    path = save(tmp_path, 3)
    for file in (one for one in path.rglob("*") if one.is_file()):
        content = file.read_bytes()
        assert content[8 if file.suffix == ".safetensors" else 0 :].startswith(b"{"), file


def _kill_at(event: int) -> None:
    """This process gets SIGKILL at the `event`-th operation on files from now."""
    left = [event]

    def count(name: str, _: object) -> None:
        if name in _EVENTS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_killed_at_any_point_of_save_and_prune_the_newest_whole_checkpoint_loads(tmp_path):
    """Step 3 is there; a save of step 6 that prunes to one is killed before each of its operations in turn."""
    killed, found = 0, set()
    for event in range(200):
        output = tmp_path / str(event)
        save(output, 3)

        def work(output: Path = output, event: int = event) -> None:
            _kill_at(event)
            save(output, 6, keep=1)

        status = in_child(work)
        newest = CheckpointDirectory(output).newest()
        assert newest is not None
        step = read_state(newest).step
        assert newest.name == f"step-{step:06d}" and loads(newest, step)
        assert all(loads(CheckpointDirectory(output).place(one), one) for one in CheckpointDirectory(output).steps())
        found.add(step)
        if not os.WIFSIGNALED(status):
            assert step == 6
            break
        killed += 1
        # The next owner of the run clears what is left, and saves the same step.
        with owned_output(output, step) as removed:
            assert not removed
            if step == 3:
                save(output, 6, keep=1)
        CheckpointDirectory(output).prune(1)
        assert sorted(os.listdir(output / "checkpoints")) == ["step-000006"] and loads(
            newest.with_name("step-000006"), 6
        )
        shutil.rmtree(output)
    else:
        pytest.fail("the save never came to its end")
    assert killed >= 20 and found == {3, 6}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes; the write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 200, 40_000], ids=["config", "adapter", "optimizer"])
def test_a_disk_without_space_leaves_the_checkpoints_before(tmp_path, size):
    save(tmp_path, 3)
    with full_disk(size), pytest.raises(LoraError, match=r"cannot be written .*-> give a writable"):
        save(tmp_path, 6, size=2048)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000003"] and loads(tmp_path / "checkpoints/step-000003", 3)


def test_a_run_that_diverged_does_not_push_good_checkpoints_out(tmp_path):
    """B14: what holds NaN is not saved, also not when only a moment does."""
    good = save(tmp_path, 3)
    for moment in (True, False):
        broken = small_tensors(6)
        (broken.moments[f"exp_avg.{NAME}"] if moment else broken.adapter.tensors[NAME])[0, 0] = float("nan")
        with pytest.raises(LoraError, match=f"is not written: .*{NAME} holds NaN"):
            write_checkpoint(CheckpointDirectory(tmp_path).place(6), broken, small_state(6))
    assert CheckpointDirectory(tmp_path).newest() == good


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's rights, to whom no directory is read-only."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_directory_is_one_clear_error():
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o555)
        with nobody():
            with pytest.raises(LoraError, match=r"checkpoints: cannot be written \(Permission denied\)"):
                CheckpointDirectory(folder).prepare()
            with pytest.raises(LoraError, match=r"cannot be written \(Permission denied\)"), owned_output(folder, None):
                pass
        assert not list(folder.iterdir())
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_pruning_keeps_the_newest_and_only_after_the_new_one(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step, keep=2)
    assert CheckpointDirectory(tmp_path).steps() == [6, 9]


def test_what_is_no_whole_checkpoint_is_never_picked_up(tmp_path):
    save(tmp_path, 3)
    folder = tmp_path / "checkpoints"
    for name in (".step-000006.partial", ".step-000001.removed", "step-000009", "step-12", "notes"):
        (folder / name).mkdir()
    assert CheckpointDirectory(tmp_path).newest() == folder / "step-000003"
    with owned_output(tmp_path, 3):
        assert sorted(os.listdir(folder)) == ["notes", "step-000003", "step-000009", "step-12"]


def test_one_process_owns_a_run_and_resuming_earlier_removes_later_checkpoints(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step)
    with owned_output(tmp_path, 3) as removed:
        assert removed == [6, 9] and CheckpointDirectory(tmp_path).steps() == [3]
        with pytest.raises(LoraError, match="another process is writing it"), owned_output(tmp_path, 3):
            pass
    with owned_output(tmp_path, 3) as removed:
        assert not removed


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors: is missing"),
        (lambda path: (path / "adapter" / "extra.bin").write_text(""), "adapter/extra.bin: is no file of the"),
        (lambda path: _flip(path / "adapter" / "adapter_model.safetensors"), "adapter_model.safetensors: differs from"),
        (lambda path: os.truncate(path / "optimizer.safetensors", 99), "optimizer.safetensors: differs from"),
        (lambda path: (path / "state.json").write_text("{"), "state.json: is not JSON"),
        (lambda path: (path / "state.json").write_text('{"format": 1}'), r"is no checkpoint's state \(step: Field"),
        (lambda path: _edit(path, format=2), r"is no checkpoint's state \(format: Input should be 1"),
        (lambda path: _edit(path, step=-1), r"\(step: Input should be greater"),
        (lambda path: _edit(path, files={}), "adapter/adapter_config.json: is no file of the checkpoint"),
        (lambda path: _edit(path, surplus=1), r"\(surplus: Extra inputs"),
    ],
)
def test_damage_is_found_before_anything_is_loaded(tmp_path, damage, said):
    path = save(tmp_path, 3)
    damage(path)
    with pytest.raises(LoraError, match=said):
        read_checkpoint(path, read_state(path))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _edit(path: Path, **changes: object) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changes))


def test_rows_after_the_checkpoint_are_dropped_and_a_lack_of_rows_is_an_error(tmp_path):
    file = tmp_path / "metrics.jsonl"
    text = '{"step": 0, "kl": null, "not_finite": ["kl"]}\n{"step": 1, "kl": 0.5}\n{"step": 2, "k'
    file.write_text(text)
    for steps, said in ((3, "line 3: is not the row of step 2"), (4, "line 3: is not the row")):
        with pytest.raises(LoraError, match=said):
            keep_rows(tmp_path, steps)
    assert file.read_text() == text
    rows, dropped = keep_rows(tmp_path, 2)
    assert [row["step"] for row in rows] == [0, 1] and rows[0]["kl"] != rows[0]["kl"] and dropped == 1
    assert "not_finite" not in rows[0] and file.read_text() == text[: text.rindex("\n") + 1]
    with pytest.raises(LoraError, match="has 2 rows, the checkpoint stands for 3"):
        keep_rows(tmp_path, 3)
    assert keep_rows(tmp_path, 0) == ([], 2) and file.read_text() == ""


def test_an_adapter_of_a_checkpoint_is_a_peft_directory(tmp_path):
    from safetensors.torch import load_file

    path = save(tmp_path, 3)
    assert json.loads((path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert load_file(path / "adapter" / "adapter_model.safetensors").keys() == {NAME}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_the_moments(tmp_path):
    """The files are no format of our own: DCP's reader of safetensors takes them as they are, in whatever shards."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = save(tmp_path, 3)
    expected = small_tensors(3).moments
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
