"""Finished runs, read from their directories: which can be compared, and in which groups.

A run counts if it is finished and whole. Scores of two runs can be compared if the runs had the
same data, cut in the same way, and windows of one size, which set how much context a scored byte
has. Runs that differ in their seed alone are one group.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kuramoto_jax.config import ConfigError, completed, flatten, options
from kuramoto_jax.data import ENWIK8_SPLIT
from kuramoto_jax.metrics import read_rows
from kuramoto_jax.workdir import MAY_CHANGE

# Keys that do not define what a run computes: its seed, how often it writes what, and where its
# data came from, which their hash says better.
NOT_COMPUTED = {"seed", "data.source", "data.path", "data.split", *MAY_CHANGE} - {"train.steps"}

# Quantiles of Student's t at 97.5 %, for 1 to 10 degrees of freedom.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class UnusableRunError(ValueError):
    """A run that cannot be counted; the message says why."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      directory: where it is.
      config: its configuration, one level of dotted keys.
      description: its data, in words.
      sha256: hash of its data.
      device: what it ran on.
      summary: its `summary.json`.
      curve: (bytes seen, validation bpc) of each validation.
    """

    directory: Path
    config: dict[str, Any]
    description: str
    sha256: str
    device: str
    summary: dict[str, Any]
    curve: tuple[tuple[int, float], ...]

    @property
    def split(self) -> tuple[float, ...]:
        """Train, validation and test fractions."""
        return ENWIK8_SPLIT if self.config["data.source"] == "enwik8" else self.config["data.split"]


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A run that does not count, and why."""

    directory: Path
    reason: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, in the order of their seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the first run."""
        return self.runs[0].config

    def values(self, name: str) -> list[float]:
        """Returns an entry of each run's summary."""
        return [run.summary[name] for run in self.runs]

    def curves(self) -> dict[int, list[float]]:
        """Returns validation bpc of each run at the counts of bytes where all runs have one."""
        curves = [dict(run.curve) for run in self.runs]
        common = set(curves[0]).intersection(*curves[1:])
        return {seen: [curve[seen] for curve in curves] for seen in sorted(common)}


# Statistics.


def deviation(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation, None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def interval(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % t-interval of the mean, None for a single value."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(freedom: int) -> float:
    """Returns the quantile of Student's t at 97.5 % for that many degrees of freedom."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    # Cornish and Fisher's expansion about the normal quantile, here good to four decimals.
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


# Reading.


def find(paths: Iterable[Path]) -> list[Path]:
    """Returns the run directories among and under some paths, each once, in order.

    Raises:
      ConfigError: for a path that is no directory or has no run in it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ConfigError(f"{path}: {what}; name run directories, or directories of them")
        here = []
        for folder, children, files in os.walk(path):
            if "config.json" in files:
                here.append(Path(folder))
                children.clear()  # what is inside a run is its own
            children.sort()
        if not here:
            raise ConfigError(f"{path}: there is no run in it (no config.json)")
        for directory in here:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


def read(directory: Path) -> Run:
    """Reads a finished run.

    Raises:
      UnusableRunError: if it is unfinished or damaged.
    """
    try:
        config = flatten(completed(_read_json(directory / "config.json")))
    except ConfigError as error:
        raise UnusableRunError(f"damaged: config.json: {error}") from error
    steps = config["train.steps"]
    try:
        rows = [row for row in read_rows(directory / "metrics.jsonl") if isinstance(row, dict)]
    except UnicodeDecodeError as error:
        raise UnusableRunError("damaged: metrics.jsonl is not text") from error
    done = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
    if not (directory / "summary.json").exists():
        raise UnusableRunError(f"unfinished: at step {done:,} of {steps:,} (no summary.json)")
    summary = _read_json(directory / "summary.json")
    for name in ("params", "steps", "tokens", "best_step", "val_bpc", "test_bpc", "seconds"):
        value = summary.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnusableRunError(f"damaged: summary.json has no number {name}")
        if not math.isfinite(value):
            raise UnusableRunError(f"damaged: summary.json has {name}={value}")
    if summary["steps"] < steps:
        raise UnusableRunError(f"unfinished: at step {summary['steps']:,} of {steps:,}")
    if summary["steps"] > steps:
        raise UnusableRunError(
            f"damaged: summary.json is of {summary['steps']:,} steps, config.json of {steps:,}"
        )
    environment = _read_json(directory / "environment.json")
    try:
        facts = environment["device"], environment["data"]["sha256"]
        description = environment["data"].get("description", config["data.source"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UnusableRunError("damaged: environment.json lacks its device or data") from error
    if not all(isinstance(fact, str) for fact in (*facts, description)):
        raise UnusableRunError("damaged: environment.json lacks its device or data")
    size = config["train.batch_size"] * config["data.window"]
    curve = tuple(
        (row["step"] * size, float(row["val_bpc"]))
        for row in rows
        if isinstance(row.get("step"), int) and isinstance(row.get("val_bpc"), int | float)
    )
    device, sha256 = facts
    return Run(directory, config, description, sha256, device, summary, curve)


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file of a run.

    Raises:
      UnusableRunError: if there is none.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UnusableRunError(f"damaged: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise UnusableRunError(f"damaged: {path.name} is not whole JSON") from error
    if not isinstance(content, dict):
        raise UnusableRunError(f"damaged: {path.name} is no JSON object")
    return content


# Choosing.


def computation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration that define its computation, but for the seed."""
    fields, models = options(), ("", config["model.name"])
    return {
        key: value
        for key, value in config.items()
        if key not in NOT_COMPUTED and fields[key].metadata["model"] in models
    }


def identity(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns a computation as a key of dictionaries."""
    return tuple(computation(config).items())


def load(paths: Iterable[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Reads the runs among and under some paths.

    The runs that are returned can be compared: of all finished ones the largest set with the same
    data, split and window (the first of equals). A repeated configuration and seed counts once.

    Returns:
      The runs, and those left out.

    Raises:
      ConfigError: for a path without runs, or if no run is finished.
    """
    finished: dict[tuple, Run] = {}
    left_out = []
    for directory in find(paths):
        try:
            run = read(directory)
        except UnusableRunError as error:
            left_out.append(LeftOut(directory, str(error)))
            continue
        known = (identity(run.config), run.config["seed"], run.sha256, run.split)
        first = finished.setdefault(known, run)
        if first is not run:
            scores = [f"{each.summary['val_bpc']:.4f}" for each in (run, first)]
            left_out.append(
                LeftOut(
                    directory,
                    f"repeats the configuration and seed {run.config['seed']} of "
                    f"{first.directory} (validation {scores[0]} bpc here, {scores[1]} there)",
                )
            )
    if not finished:
        first_out = left_out[0]
        others = f", and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        raise ConfigError(f"no run is finished: {first_out.directory} ({first_out.reason}){others}")
    runs = list(finished.values())
    sizes = collections.Counter(_setting(run) for run in runs)
    reference = max(sizes, key=lambda setting: sizes[setting])  # the first of equals
    for run in runs:
        differing = [
            f"{name} is {_value(here)}, not {_value(there)}"
            for name, here, there in zip(
                ("data sha256", "data.split", "data.window"), _setting(run), reference, strict=True
            )
            if here != there
        ]
        if differing:
            reason = f"not comparable: {', '.join(differing)}"
            left_out.append(LeftOut(run.directory, reason))
    return [run for run in runs if _setting(run) == reference], left_out


def _setting(run: Run) -> tuple[str, tuple[float, ...], int]:
    """Returns what two runs must share for their scores to be comparable."""
    return run.sha256, run.split, run.config["data.window"]


def group(runs: Iterable[Run]) -> list[Group]:
    """Returns the groups of comparable runs, in the order of their first runs, with labels."""
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        found.setdefault(identity(run.config), []).append(run)
    names = labels([computation(members[0].config) for members in found.values()])
    return [
        Group(label, tuple(sorted(members, key=lambda run: run.config["seed"])))
        for label, members in zip(names, found.values(), strict=True)
    ]


# Naming.


def peculiarities(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is special about each of some configurations among those of its model.

    That is every key in which they differ, except where it has the usual value: one that more of
    them have than any other. Among ablations nothing is special about the whole model.
    """
    special = []
    for own in configs:
        peers = [config for config in configs if config["model.name"] == own["model.name"]]
        special.append(
            {
                key: value
                for key, value in own.items()
                if any(peer[key] != value for peer in peers)
                and _most_common([peer[key] for peer in peers]) != (value,)
            }
        )
    return special


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a short name, its own, for each of some different configurations.

    It is the model's name and, where something is special about the configuration, what that is.
    If nothing is special about one of the model, the names of the others read as changes to it and
    have all of them; if there is no such one, a name has the fewest keys that tell.
    """
    special = peculiarities(configs)
    named = [config["model.name"] for config in configs]
    whole = {name for name, values in zip(named, special, strict=True) if not values}
    names = []
    for own, name, values in zip(configs, named, special, strict=True):
        others = [other for other in configs if other is not own and other["model.name"] == name]
        keys = values if name in whole else _telling(values, others)
        told = settings({key: values[key] for key in keys})
        names.append(f"{name} ({told})" if told else name)
    return names


def settings(values: Mapping[str, Any]) -> str:
    """Returns keys and values as a text."""
    return ", ".join(f"{key}={_value(value)}" for key, value in values.items())


def _most_common(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the one value that is there most often, as a tuple of one; none if several are."""
    counts = collections.Counter(values).most_common(2)
    tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    return () if tied else (counts[0][0],)


def _telling(special: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Collection[str]:
    """Returns the fewest keys whose values no other configuration shares; all, if they are."""
    for count in range(1, len(special)):
        for keys in itertools.combinations(special, count):
            if all(any(special[key] != other[key] for key in keys) for other in others):
                return keys
    return special


def _value(value: Any) -> str:
    """Returns a value as a label shows it; a hash is cut."""
    if isinstance(value, str):
        return f"{value[:12]}..." if len(value) == 64 else value
    return repr(value)
