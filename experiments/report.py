"""Tables and plots from finished runs.

    python -m experiments.report RUN... --out=DIR

RUN is a run directory, or a directory with run directories under it. Runs that differ in their seed
alone are one row: mean, sample standard deviation and median over seeds. Runs that are unfinished,
damaged, repeated or not comparable with the others (other data, another split, another window) are
named and left out. DIR receives report.md, results.csv (one line a row), runs.csv (one line a run),
and plots as PNG and SVG.
"""

import collections
import csv
import io
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import plots
from experiments.command import first_line, run
from experiments.runs import (
    Group,
    LeftOut,
    computation,
    deviation,
    group,
    load,
    peculiarities,
    settings,
)
from kuramoto_jax.config import ConfigError
from kuramoto_jax.metrics import duration, write_atomically

# Validation bpc that the paper reports on enwik8, by model and approximate parameters.
PAPER = {
    ("kuramoto", 1e6): "1.637 ± 0.010",
    ("transformer", 1e6): "1.616 ± 0.004",
    ("kuramoto", 5e6): "mean 1.468, median 1.448 (5 seeds)",
    ("transformer", 5e6): "mean 1.456, median 1.452 (5 seeds)",
}
# Values that take a part of the paper's model away, or add one: its figures are not for these.
NOT_THE_PAPERS = {
    "model.gates": (False,),
    "model.gate_normalization": (False,),
    "model.value_gate": (False,),
    "model.value_projection": (True,),
    "model.normalization": (True,),
    "model.drift": ("fixed", "none"),
    "model.bound": ("none",),
    "model.feedforward": ("none",),
}
PLOTS = {
    "learning_curves": "Validation against bytes seen",
    "scores": "Validation of each model",
    "parameters": "Validation against parameters",
}


def paper_figure(group: Group) -> str:
    """Returns the paper's figure for a group's model, size and data; "" where it has none."""
    config = group.config
    if any(each.config["data.source"] != "enwik8" for each in group.runs):
        return ""
    if any(config[key] in values for key, values in NOT_THE_PAPERS.items()):
        return ""
    for (model, size), figure in PAPER.items():
        if model == config["model.name"] and abs(group.values("params")[0] - size) <= 0.1 * size:
            return figure
    return ""


# Tables.


def spread(values: Sequence[float], sign: str = "") -> str:
    """Returns the mean and, of several values, the sample standard deviation."""
    mean, sd = f"{statistics.fmean(values):{sign}.4f}", deviation(values)
    return mean if sd is None else f"{mean} ± {sd:.4f}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table, its columns padded to be read as it is."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "".join(f"| {line} |\n" for line in lines)


def results_table(groups: Sequence[Group]) -> str:
    """Returns the table of groups."""
    header = (
        "model",
        "parameters",
        "seeds",
        "validation bpc",
        "median",
        "test bpc",
        "tokens",
        "time a run",
        "hardware",
        "paper, validation bpc",
    )
    rows = [
        (
            each.label,
            f"{each.values('params')[0]:,}",
            len(each.runs),
            spread(each.values("val_bpc")),
            f"{statistics.median(each.values('val_bpc')):.4f}",
            spread(each.values("test_bpc")),
            f"{each.values('tokens')[0]:,}",
            duration(statistics.fmean(each.values("seconds"))),
            hardware(each),
            paper_figure(each),
        )
        for each in groups
    ]
    return table(header, rows)


def hardware(group: Group) -> str:
    """Returns the devices of a group's runs, each once."""
    return ", ".join(dict.fromkeys(each.device for each in group.runs))


def results_csv(groups: Sequence[Group]) -> str:
    """Returns one line a group, in full precision."""
    rows = []
    for each in groups:
        validation, test = each.values("val_bpc"), each.values("test_bpc")
        rows.append(
            {
                "model": each.label,
                "parameters": each.values("params")[0],
                "seeds": len(each.runs),
                "val_bpc_mean": statistics.fmean(validation),
                "val_bpc_sd": deviation(validation),
                "val_bpc_median": statistics.median(validation),
                "test_bpc_mean": statistics.fmean(test),
                "test_bpc_sd": deviation(test),
                "tokens": each.values("tokens")[0],
                "seconds_mean": statistics.fmean(each.values("seconds")),
                "hardware": hardware(each),
                "paper_val_bpc": paper_figure(each),
            }
        )
    return csv_text(rows)


def runs_csv(groups: Sequence[Group], left_out: Sequence[LeftOut]) -> str:
    """Returns one line a run; a run that is left out has the reason and no numbers."""
    rows: list[dict[str, Any]] = [
        {
            "run": each.directory,
            "model": member.label,
            "seed": each.config["seed"],
            "parameters": each.summary["params"],
            "val_bpc": each.summary["val_bpc"],
            "test_bpc": each.summary["test_bpc"],
            "best_step": each.summary["best_step"],
            "tokens": each.summary["tokens"],
            "seconds": each.summary["seconds"],
            "hardware": each.device,
            "data_sha256": each.sha256,
            "left_out": "",
        }
        for member in groups
        for each in member.runs
    ]
    rows += [{"run": each.directory, "left_out": each.reason} for each in left_out]
    return csv_text(rows)


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows as CSV with the columns of the first; what a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# The report.


def write_report(
    groups: Sequence[Group], left_out: Sequence[LeftOut], out: Path, section: str = ""
) -> str:
    """Writes the report of some groups into a directory.

    Args:
      groups: of comparable runs.
      left_out: runs that do not count.
      out: the directory, made if missing.
      section: further Markdown, put after the table.

    Returns:
      What the user is to read at once: the table and the runs left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = results_table(groups)
    omitted = "".join(f"- `{each.directory}`: {each.reason}\n" for each in left_out)
    first = groups[0].runs[0]
    split = " / ".join(f"{part:g}" for part in first.split)
    count = sum(len(each.runs) for each in groups)
    parts = [
        "# Report\n",
        f"Runs: {count}, of {len(groups)} configurations. Data: {first.description}, sha256 "
        f"{first.sha256[:12]}..., split {split} into train / validation / test, scored in windows "
        f"of {first.config['data.window']} bytes.\n\n"
        "bpc is bits per character, one character = one byte, of the best checkpoint by "
        "validation. Mean ± sample standard deviation over seeds; one seed has no deviation. "
        "Tokens are the bytes a run saw in training, repeats included.\n",
        results,
        section,
        _configurations(groups),
        *(f"![{text}]({name}.png)\n" for name, text in PLOTS.items()),
        f"## Left out\n\n{omitted}" if omitted else "",
    ]
    figures = (plots.learning_curves(groups), plots.scores(groups), plots.parameters(groups))
    for name, figure in zip(PLOTS, figures, strict=True):
        plots.save(figure, out / name)
    write_atomically(out / "results.csv", results_csv(groups))
    write_atomically(out / "runs.csv", runs_csv(groups, left_out))
    write_atomically(out / "report.md", "\n".join(part for part in parts if part))
    return results + (f"\nLeft out:\n{omitted}" if omitted else "")


def _configurations(groups: Sequence[Group]) -> str:
    """Returns what is special about each configuration, where a model has several."""
    special = peculiarities([computation(each.config) for each in groups])
    differing: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for each, values in zip(groups, special, strict=True):
        differing[each.config["model.name"]].update(dict.fromkeys(values))
    text = ""
    for each, values in zip(groups, special, strict=True):
        keys = values or differing[each.config["model.name"]]
        if keys:
            told = settings({key: each.config[key] for key in keys})
            text += f"- {each.label}: {told}{'' if values else ' (as most others have it)'}\n"
    return f"## Where configurations of a model differ\n\n{text}" if text else ""


# The command.


def parse(argv: Sequence[str]) -> tuple[list[Path], Path]:
    """Reads the command line into the paths to report on and the directory of the report.

    Raises:
      ConfigError: for an unknown flag, or if either is missing or cannot be.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # the flag may follow the paths
    flags.DEFINE_string("out", None, "directory of the report", flag_values=values)
    try:
        paths = values(["experiments.report", *argv])[1:]
    except flags.Error as error:
        raise ConfigError(first_line(error)) from error
    if not paths:
        raise ConfigError("RUN...: name at least one run directory, or a directory of them")
    if not values.out:
        raise ConfigError("--out=DIR: is required")
    out = Path(values.out).expanduser()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out}: is a file; choose a directory")
    if (out / "config.json").exists():
        raise ConfigError(f"--out={out}: is a run; choose another directory")
    return [Path(path) for path in paths], out


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""

    def action() -> None:
        paths, out = parse(argv)
        runs, left_out = load(paths)
        print(write_report(group(runs), left_out, out))
        print(f"written to {out}")

    return run(argv, lambda: str(__doc__).strip(), action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
