"""Who may write in a run directory, and what a damaged one is taken for."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kuramoto_jax.config import ConfigError
from kuramoto_jax.lock import locked
from kuramoto_jax.workdir import finished_summary, locked_workdir

ROOT = Path(__file__).resolve().parents[1]


def test_a_directory_has_one_writer(tmp_path):
    workdir = tmp_path / "a" / "run"
    with locked_workdir(workdir):
        with (
            pytest.raises(ConfigError, match=rf"^workdir={workdir}: process {os.getpid()} on "),
            locked_workdir(workdir),
        ):
            pass
        assert os.listdir(workdir) == ["lock"]  # the refused one took nothing from the first
    assert os.listdir(workdir) == []
    with locked_workdir(workdir):
        pass


def test_a_failed_run_lets_go(tmp_path):
    with pytest.raises(RuntimeError), locked_workdir(tmp_path):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_a_killed_process_lets_go(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kuramoto_jax.workdir import locked_workdir\n"
        "with locked_workdir(Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"locked\n"
        with (
            pytest.raises(ConfigError, match=f"process {holder.pid} on "),
            locked_workdir(tmp_path),
        ):
            pass
        holder.kill()
    assert holder.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["lock"]
    with locked_workdir(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_lock_moved_while_waiting_is_taken_anew(tmp_path):
    """As when a download becomes the file that was waited for."""
    path, waited = tmp_path / "part", []
    with locked(path, lambda: None) as file:
        file.write(b"content")

    def busy():
        waited.append(True)
        path.replace(tmp_path / "whole")
        holder.close()  # lets go

    holder = path.open("rb")
    fcntl.flock(holder, fcntl.LOCK_EX)
    with locked(path, busy) as file:
        assert file.read() == b""
    assert waited == [True]
    assert (tmp_path / "whole").read_bytes() == b"content"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"3", b"null", b"{}", b'{"steps": 19}']
)
def test_a_damaged_or_shorter_summary_is_none(tmp_path, content):
    assert finished_summary(tmp_path, 20) is None
    (tmp_path / "summary.json").write_bytes(content)
    assert finished_summary(tmp_path, 20) is None
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 20}))
    assert finished_summary(tmp_path, 20) == {"steps": 20}
