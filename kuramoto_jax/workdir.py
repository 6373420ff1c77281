"""A run directory: what it holds besides checkpoints and metrics, and who may write in it.

`config.json` is the configuration as it was run and `environment.json` where it was run, with the
hash of its data. A run is continued only with the same of both; the keys of `MAY_CHANGE` are free.
While a process trains in a directory, no other one can.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from kuramoto_jax import data
from kuramoto_jax.checkpoint import Checkpoints
from kuramoto_jax.config import Config, ConfigError, flatten
from kuramoto_jax.lock import locked
from kuramoto_jax.metrics import write_atomically

# Keys that a run may change when it is continued; every other one defines what is computed.
MAY_CHANGE = (
    "train.steps",
    "train.eval_batch_size",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep",
    "train.sample_length",
    "train.tensorboard",
)

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

_LOCK = "lock"


@contextlib.contextmanager
def locked_workdir(workdir: Path) -> Iterator[None]:
    """Makes a run directory if it is missing and keeps other processes from training in it.

    The lock is a file that is removed at the end. One that a killed process left holds nothing.

    Raises:
      ConfigError: if another process trains in the directory.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / _LOCK

    def refuse() -> None:
        with contextlib.suppress(OSError):
            holder = path.read_text(errors="replace").strip()
        raise ConfigError(
            f"workdir={workdir}: {holder or 'another process'} trains in it; wait for its end, or "
            "choose another --workdir"
        )

    with locked(path, refuse) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def differing_keys(stored: Config, config: Config) -> list[str]:
    """Returns a note for each key with another value that a continued run must not change."""
    old, new = flatten(stored.to_dict()), flatten(config.to_dict())
    return [
        f"{key}: {old[key]!r} in the directory, {new[key]!r} asked for"
        for key in old
        if old[key] != new[key] and key not in MAY_CHANGE
    ]


def stored_config(workdir: Path) -> Config:
    """Reads the `config.json` of a run.

    Raises:
      ConfigError: if it is not there, not JSON or not a configuration.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ConfigError(f"workdir={workdir}: holds no run (no config.json)")
    try:
        return Config.from_mapping(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"workdir={workdir}: its config.json is damaged ({error})") from error


def check_same_data(workdir: Path, corpus: data.Corpus) -> None:
    """Checks that a run in a directory began on these bytes, as its `environment.json` tells.

    Raises:
      ConfigError: if it began on others, or the file cannot be read.
    """
    path = workdir / "environment.json"
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text())["data"]
        digest, description = str(stored["sha256"]), stored["description"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"workdir={workdir}: its environment.json is damaged ({type(error).__name__}: {error})"
        ) from error
    if digest != corpus.sha256:
        raise ConfigError(
            f"workdir={workdir}: the data has changed since the run began ({description}, sha256 "
            f"{digest[:12]}..., now {corpus.sha256[:12]}...); choose another --workdir"
        )


def check_workdir(workdir: Path, config: Config, corpus: data.Corpus) -> int:
    """Checks that a directory is new or holds this run; writes nothing.

    Returns:
      The newest stored step, 0 where there is none.

    Raises:
      ConfigError: if the directory holds another run, or something else.
    """
    step = newest_step(workdir)
    if (workdir / "config.json").exists():
        stored = stored_config(workdir)
        differing = differing_keys(stored, config)
        if differing:
            raise ConfigError(
                f"workdir={workdir}: holds a run of another configuration "
                f"({'; '.join(differing)}); choose another --workdir or the stored values"
            )
        check_same_data(workdir, corpus)
        if step > config.train.steps:
            raise ConfigError(
                f"train.steps={config.train.steps}: the run in {workdir} is at step {step} already"
            )
    elif workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"workdir={workdir}: is a file; choose a directory")
    elif workdir.is_dir() and any(
        path.suffix != ".part" and path.name != _LOCK for path in workdir.iterdir()
    ):
        raise ConfigError(
            f"workdir={workdir}: is not empty and holds no run (no config.json); "
            "choose an empty or a new directory"
        )
    return step


def finished_summary(workdir: Path, steps: int) -> dict[str, Any] | None:
    """Returns the `summary.json` of a run that has done `steps` steps.

    None where there is none, where it is of fewer steps, or where it is damaged: the run then goes
    on and writes it anew.
    """
    try:
        summary = json.loads((workdir / "summary.json").read_text())
        return summary if summary["steps"] == steps else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def claim_workdir(workdir: Path, config: Config, corpus: data.Corpus) -> None:
    """Writes `config.json` and `environment.json`; a summary of before is no longer true."""
    devices = jax.devices()
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "data": {"description": corpus.description, "sha256": corpus.sha256},
    }
    write_atomically(workdir / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
    write_atomically(workdir / "environment.json", json.dumps(environment, indent=2) + "\n")
    (workdir / "summary.json").unlink(missing_ok=True)


def newest_step(workdir: Path) -> int:
    """Returns the newest stored step of a run, 0 where there is none; changes nothing."""
    directory = workdir / "checkpoints"
    if not directory.is_dir():
        return 0
    with contextlib.closing(Checkpoints(directory, create=False)) as checkpoints:
        return max(checkpoints.steps(), default=0)
