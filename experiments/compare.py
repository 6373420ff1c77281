"""Trains several configurations with several seeds each, and reports on them side by side.

    python -m experiments.compare --configs=FILE,FILE... [--seeds=3] [--workdir=DIR]
        [--config.GROUP.KEY=VALUE ...]

Each FILE is a configuration as in experiments.enwik8, and a row of the table; overrides apply to
all of them. A row is trained with seeds seed, seed + 1, ... into DIR/NAME_OF_FILE/seed_N (DIR is
runs/compare where absent). The same command continues where it stopped; a finished run is never
repeated. The report of experiments.report on all runs in DIR is written to DIR/report.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import enwik8
from experiments.command import first_line, run
from experiments.report import write_report
from experiments.runs import group, load
from experiments.series import train_and_report
from kuramoto_jax.config import Config, ConfigError


def parse(argv: Sequence[str]) -> tuple[dict[str, list[Config]], Path]:
    """Reads the command line into configurations by row, and the directory of all runs.

    Raises:
      ConfigError: for a fault in a flag or in a file.
    """
    own = flags.FlagValues()
    flags.DEFINE_list("configs", [], "configuration files", flag_values=own)
    flags.DEFINE_integer("seeds", 3, "runs of each configuration", 1, flag_values=own)
    flags.DEFINE_string("workdir", "runs/compare", "directory of all runs", flag_values=own)
    try:
        rest = own(["experiments.compare", *argv], known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(first_line(error)) from error
    if not own.configs:
        raise ConfigError("--configs=FILE,FILE...: is required")
    rows: dict[str, list[Config]] = {}
    for file in own.configs:
        base, _ = enwik8.parse([f"--config={file}", *rest])
        path, _, argument = file.partition(":")
        name = "_".join(filter(None, (Path(path).stem, argument)))
        if name in rows:
            raise ConfigError(f"--configs={file}: there is a row {name} already")
        rows[name] = [dataclasses.replace(base, seed=base.seed + n) for n in range(own.seeds)]
    return rows, Path(own.workdir).expanduser()


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""

    def action() -> None:
        rows, workdir = parse(argv)

        def report() -> None:
            runs, left_out = load([workdir])
            print("\n" + write_report(group(runs), left_out, workdir / "report"))
            print(f"written to {workdir / 'report'}")

        train_and_report(rows, workdir, report)

    return run(argv, lambda: str(__doc__).strip(), action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
