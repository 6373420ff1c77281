"""Trains a byte-level language model, or continues one.

    python -m experiments.enwik8 --config=FILE [--workdir=DIR] [--config.GROUP.KEY=VALUE ...]

FILE is a Python file with a function `get_config()` that returns an ml_collections ConfigDict; the
shipped ones are in experiments/configs. DIR (runs/NAME_OF_FILE where absent) receives the run; the
same command again continues it. Example:

    python -m experiments.enwik8 --config=experiments/configs/quickstart.py --workdir=runs/quick
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from kuramoto_jax.config import Config, ConfigError, options, unknown_key
from kuramoto_jax.data import DataError

CONFIGS = Path(__file__).parent / "configs"


def help_text() -> str:
    """Returns the usage and the table of configuration keys."""
    rows = [
        f"  --config.{key}={field.default!r}\n      {field.metadata['help']}"
        for key, field in options().items()
    ]
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("[a-z]*.py")))
    return "\n".join([__doc__.strip(), "", f"Shipped configurations: {shipped}", "", *rows])


def parse(argv: Sequence[str]) -> tuple[Config, Path]:
    """Reads the command line into a configuration and a run directory.

    Args:
      argv: the arguments, without the program's name.

    Raises:
      ConfigError: for any fault in the flags or in the file, in one line.
    """
    for argument in argv:
        name = argument.lstrip("-").split("=", 1)[0]
        if argument.startswith("-") and name.startswith("config.") and name[7:] not in options():
            raise ConfigError(unknown_key(name[7:]))
    values = flags.FlagValues()
    program = ["experiments.enwik8", *argv]
    config_flags.DEFINE_config_file(
        "config", help_string="configuration file", flag_values=values, sys_argv=program
    )
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    _check_config_file(argv)
    try:
        rest = values(program)[1:]
    except flags.Error as error:
        raise ConfigError(_first_line(error)) from error
    except Exception as error:
        # The config file is the user's own Python: whatever it raises is its fault to show.
        raise ConfigError(f"--config: {type(error).__name__}: {_last_line(error)}") from error
    if rest:
        raise ConfigError(f"argument {rest[0]!r}: not understood; options are --name=value")
    if not hasattr(values.config, "to_dict"):
        raise ConfigError("--config: get_config() must return an ml_collections ConfigDict")
    config = Config.from_mapping(values.config.to_dict())
    name = Path(values["config"].config_filename.split(":")[0]).stem
    return config, Path(values.workdir or Path("runs") / name)


def _check_config_file(argv: Sequence[str]) -> None:
    """Raises a ConfigError unless --config names a file."""
    value = None
    for index, argument in enumerate(argv):
        name, equals, given = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "config":
            value = given if equals else "".join(argv[index + 1 : index + 2])
    if not value:
        raise ConfigError(f"--config=FILE: is required; shipped files are in {CONFIGS}")
    path = Path(value.split(":")[0])
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "there is no such file"
        raise ConfigError(f"--config={value}: {what}; shipped files are in {CONFIGS}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else ""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 0 done or stopped, 2 bad input, 1 failed run."""
    # A console that lacks a character of a sample shows it escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if any(argument.lstrip("-") in ("help", "helpfull", "h") for argument in argv):
        print(help_text())
        return 0
    try:
        config, workdir = parse(argv)
        # Imported late: a fault in the flags is told before the libraries are loaded.
        from kuramoto_jax.train import TrainError, fit
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        fit(config, workdir, log=lambda line: print(line, flush=True))
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TrainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
