"""Trains a Kuramoto model whole and with each part changed, and reports what each part is worth.

    python -m experiments.ablations --config=FILE [--seeds=3] [--only=ROW,ROW] [--workdir=DIR]
        [--list] [--config.GROUP.KEY=VALUE ...]

FILE is the whole model's configuration, as in experiments.enwik8. Each row of the table changes it
in one way and is trained with seeds seed, seed + 1, ... into DIR/ROW/seed_N (DIR is
runs/ablations_NAME_OF_FILE where absent). The same command continues where it stopped; a finished
run is never repeated. The report on all runs in DIR is written to DIR/report: that of
experiments.report, and the difference of each row to the row `full`, paired by seed. --list shows
the rows and trains nothing.
"""

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import enwik8, plots
from experiments.command import first_line, run
from experiments.report import csv_text, spread, table, write_report
from experiments.runs import Group, deviation, group, identity, load, settings
from experiments.series import train_and_report
from kuramoto_jax.config import Config, ConfigError, flatten, options
from kuramoto_jax.metrics import write_atomically

BASE = "full"


def rows_of(base: Config) -> dict[str, dict[str, Any]]:
    """Returns the rows of the table, in order: their names and what they change."""
    bounds = options()["model.bound"].metadata["choices"]
    inputs = options()["model.gate_inputs"].metadata["choices"]
    other_inputs = [kind for kind in inputs if kind != base.model.gate_inputs]
    other_bounds = [kind for kind in bounds if kind not in ("none", base.model.bound)]
    return {
        BASE: {},
        "no_gates": {"model.gates": False},
        **{f"{kind}_gates": {"model.gate_inputs": kind} for kind in other_inputs},
        "no_gate_normalization": {"model.gate_normalization": False},
        "no_value_gate": {"model.value_gate": False},
        "no_drift": {"model.drift": "none"},
        "fixed_rates": {"model.drift": "fixed"},
        "no_bound": {"model.bound": "none"},
        **{f"{kind}_bound": {"model.bound": kind} for kind in other_bounds},
        "lifted_feedforward": {"model.feedforward": "lift"},
        "no_feedforward": {"model.feedforward": "none"},
        "untied_readout": {"model.tied_readout": False},
        "one_head": {"model.heads": 1},
        "value_projection": {"model.value_projection": True},
        "normalization": {"model.normalization": True},
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Attributes:
      base: the whole model's configuration.
      configs: what to train, by row, in the order of the seeds; nothing if the rows are only to be
        shown.
      workdir: directory of all runs.
    """

    base: Config
    configs: dict[str, list[Config]]
    workdir: Path


def parse(argv: Sequence[str]) -> Plan:
    """Reads the command line; every configuration is checked before anything runs.

    Raises:
      ConfigError: for a fault in a flag, in the file, or in the configuration of a row.
    """
    own = flags.FlagValues()
    flags.DEFINE_integer("seeds", 3, "runs of each row", 1, flag_values=own)
    flags.DEFINE_list("only", [], "rows to train; all where absent", flag_values=own)
    flags.DEFINE_string("workdir", None, "directory of all runs", flag_values=own)
    flags.DEFINE_bool("list", False, "show the rows, train nothing", flag_values=own)
    try:
        rest = own(["experiments.ablations", *argv], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(first_line(error)) from error
    base, default = enwik8.parse(rest)
    if base.model.name != "kuramoto":
        raise ConfigError(f"model.name={base.model.name!r}: ablations are of model 'kuramoto'")
    rows = rows_of(base)
    for name in own.only:
        if name not in rows:
            raise ConfigError(f"--only={name}: there is no such row; rows are {', '.join(rows)}")
    configs = {
        name: [variant(base, name, rows[name], base.seed + n) for n in range(own.seeds)]
        for name in rows
        if (name in own.only or not own.only) and not own.list
    }
    workdir = default.with_name(f"ablations_{default.name}")
    return Plan(base, configs, Path(own.workdir).expanduser() if own.workdir else workdir)


def variant(base: Config, name: str, changes: Mapping[str, Any], seed: int) -> Config:
    """Returns a row's configuration.

    Raises:
      ConfigError: if it is that of the base, or cannot be run.
    """
    values = base.to_dict() | {"seed": seed}
    for key, value in changes.items():
        part, field = key.split(".")
        if values[part][field] == value:
            raise ConfigError(
                f"row {name}: {key}={value} is what the configuration has already; "
                "choose the other rows with --only"
            )
        values[part] = values[part] | {field: value}
    try:
        return Config.from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"row {name}: {error}") from error


# The table.


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      name: its name.
      changes: what it changes.
      group: its runs.
      differences: validation bpc minus that of the row `full`, of each seed that both have.
    """

    name: str
    changes: Mapping[str, Any]
    group: Group
    differences: tuple[float, ...]


def paired(group: Group, base: Group) -> tuple[float, ...]:
    """Returns validation bpc minus that of the base, of each seed that both have."""
    scores, base_scores = (
        {run.config["seed"]: run.summary["val_bpc"] for run in each.runs} for each in (group, base)
    )
    return tuple(scores[seed] - base_scores[seed] for seed in scores if seed in base_scores)


def ablation_table(rows: Sequence[Row]) -> str:
    """Returns the table in Markdown."""
    header = ("row", "changes", "parameters", "seeds", "validation bpc", "difference to full")
    return table(
        header,
        [
            (
                row.name,
                settings(row.changes),
                f"{row.group.values('params')[0]:,}",
                len(row.group.runs),
                spread(row.group.values("val_bpc")),
                difference(row),
            )
            for row in rows
        ],
    )


def difference(row: Row) -> str:
    """Returns the difference as the table shows it, and of how many seeds if not of all."""
    if not row.differences:
        return ""
    count, text = len(row.differences), spread(row.differences, "+")
    return text if count == len(row.group.runs) else f"{text} ({count} seeds)"


def ablation_csv(rows: Sequence[Row]) -> str:
    """Returns the table as CSV, in full precision."""
    lines = []
    for row in rows:
        scores, differences = row.group.values("val_bpc"), row.differences
        lines.append(
            {
                "row": row.name,
                "changes": settings(row.changes),
                "parameters": row.group.values("params")[0],
                "seeds": len(scores),
                "val_bpc_mean": statistics.fmean(scores),
                "val_bpc_sd": deviation(scores),
                "difference_mean": statistics.fmean(differences) if differences else None,
                "difference_sd": deviation(differences),
                "difference_seeds": len(differences),
            }
        )
    return csv_text(lines)


def results(base: Config, groups: Sequence[Group]) -> list[Row]:
    """Returns the rows of the table that have runs, in order."""
    values = flatten(base.to_dict())
    found = {identity(each.config): each for each in groups}
    whole = found.get(identity(values))
    rows = []
    for name, changes in rows_of(base).items():
        member = found.pop(identity(values | changes), None)
        if member:
            differences = paired(member, whole) if whole and changes else ()
            rows.append(Row(name, changes, dataclasses.replace(member, label=name), differences))
    return rows


def report(plan: Plan) -> None:
    """Writes the report on all runs in the directory and prints the table.

    Raises:
      ConfigError: if no run is finished.
    """
    runs, left_out = load([plan.workdir])
    groups = group(runs)
    rows = results(plan.base, groups)
    known = [row.group for row in rows]
    others = [each for each in groups if all(each.runs is not row.runs for row in known)]
    out = plan.workdir / "report"
    out.mkdir(exist_ok=True)
    text = ablation_table(rows)
    if all(row.changes for row in rows):
        text += f"\nThere is no run of row {BASE} to take differences to.\n"
    section = f"## Ablations\n\n{text}\nDifferences are those of runs with the same seed.\n"
    bars = [plots.Difference(row.name, row.differences) for row in rows if row.differences]
    if bars:
        plots.save(plots.ablations(bars, BASE), out / "ablations")
        section += f"\n![Validation against {BASE}](ablations.png)\n"
    write_atomically(out / "ablations.csv", ablation_csv(rows))
    write_report([*known, *others], left_out, out, section)
    print(f"\n{text}")
    for each in left_out:
        print(f"left out: {each.directory}: {each.reason}")
    print(f"written to {out}")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""

    def action() -> None:
        plan = parse(argv)
        if not plan.configs:
            rows = rows_of(plan.base).items()
            print(table(("row", "changes"), [(name, settings(row)) for name, row in rows]), end="")
            return
        train_and_report(plan.configs, plan.workdir, lambda: report(plan))

    return run(argv, lambda: str(__doc__).strip(), action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
