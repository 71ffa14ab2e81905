"""The shell around the project: finding a Python, and a CI script that cannot pass by running nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def script(path: Path, body: str) -> Path:
    """An executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def find_python(wanted: str, bin_dir: Path, pyenv_root: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/find-python with only `bin_dir` and the system's own tools on PATH."""
    environ = {"PATH": f"{bin_dir}:/usr/bin:/bin", "PYENV_ROOT": str(pyenv_root), "HOME": str(pyenv_root)}
    return subprocess.run(
        [ROOT / "scripts" / "find-python", wanted], capture_output=True, text=True, env=environ, timeout=60
    )


def base_python() -> str:
    """This interpreter outside of its virtual environment."""
    return str(Path(sys.base_prefix) / "bin" / f"python{VERSION}")


def test_a_python_on_path_is_found(tmp_path: Path) -> None:
    script(tmp_path / "bin" / f"python{VERSION}", f'exec {base_python()} "$@"')
    result = find_python(VERSION, tmp_path / "bin", tmp_path / "none")
    assert result.returncode == 0
    code = "import sys; print(sys.version_info[:2])"
    found = subprocess.run([result.stdout.strip(), "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(sys.version_info[:2])


def test_a_shim_that_does_not_work_is_passed_over_for_pyenv_s_own_version(tmp_path: Path) -> None:
    """pyenv puts a `python3.N` on PATH for every version it has, which fails unless that version is switched on."""
    script(tmp_path / "bin" / f"python{VERSION}", "echo 'pyenv: command not found' >&2; exit 127")
    script(tmp_path / "bin" / "python3", "exit 127")
    script(tmp_path / "bin" / "python", "exit 127")
    script(tmp_path / "root" / "versions" / f"{VERSION}.4" / "bin" / "python", f'exec {base_python()} "$@"')
    result = find_python(VERSION, tmp_path / "bin", tmp_path / "root")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()


def test_another_version_does_not_do(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "python3.99", f'exec {base_python()} "$@"')
    result = find_python("3.99", tmp_path / "bin", tmp_path / "none")
    assert (result.returncode, result.stdout) == (1, "")


SGLANG_TESTED = "echo '== sglang==0.5.23 tested'"


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (f"echo '======= 3 passed in 1.20s ======='; {SGLANG_TESTED}", True),
        (f"echo '======= 3 passed, 1 skipped in 1.20s ======='; {SGLANG_TESTED}", True),
        (f"echo nothing was tested; {SGLANG_TESTED}", False),
        ("echo '======= no tests ran in 0.01s ======='; exit 5", False),
        (f"echo '======= no tests ran in 0.01s ======='; {SGLANG_TESTED}", False),
        ("echo '======= 1 failed, 3 passed in 1.20s ======='; exit 1", False),
        ("echo '======= 3 passed in 1.20s ======='; echo '== sglang==0.5.23'", False),
    ],
)
def test_ci_passes_only_when_tests_ran_and_passed(tmp_path: Path, make: str, passes: bool) -> None:
    script(tmp_path / "make", f'[ "$*" = test ] || exit 9\n{make}')
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", ROOT / ".ci" / "run"], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=60
    )
    assert (result.returncode == 0) == passes, result.stdout + result.stderr
    if passes:
        assert result.stdout.rstrip().splitlines()[-1].startswith("======= 3 passed")
