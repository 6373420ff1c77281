"""Trains a byte-level language model, or continues one.

    python -m experiments.enwik8 --config=FILE [--workdir=DIR] [--config.GROUP.KEY=VALUE ...]

FILE is a Python file with a function `get_config()` that returns an ml_collections ConfigDict; the
shipped ones are in experiments/configs. DIR (runs/NAME_OF_FILE where absent) receives the run; the
same command again continues it. Example:

    python -m experiments.enwik8 --config=experiments/configs/quickstart.py --workdir=runs/quick
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments.command import first_line, read_flags, run
from kuramoto_jax.config import Config, ConfigError, completed, options, unknown_key
from kuramoto_jax.train import fit

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

    Keys that the configuration file leaves out have their defaults and can be overridden too.

    Args:
      argv: the arguments, without the program's name.

    Raises:
      ConfigError: for any fault in the flags or in the file, in one line.
    """
    try:
        argv = flags.FlagValues().read_flags_from_files(list(argv), force_gnu=True)
    except flags.Error as error:
        raise ConfigError(first_line(error)) from error
    for argument in argv:
        name = argument.lstrip("-").split("=", 1)[0]
        if argument.startswith("-") and name.startswith("config.") and name[7:] not in options():
            raise ConfigError(unknown_key(name[7:]))
    own = flags.FlagValues()
    flags.DEFINE_string("config", None, "configuration file", flag_values=own)
    try:
        overrides = own(["experiments.enwik8", *argv], known_only=True)
    except flags.Error as error:
        raise ConfigError(f"--config=FILE: is required ({first_line(error)})") from error
    file = _existing(own.config)
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    config_flags.DEFINE_config_dict(
        "config", ConfigDict(_load(file)), flag_values=values, sys_argv=overrides
    )
    read_flags(values, overrides[1:])
    config = Config.from_mapping(values.config)
    return config, Path(values.workdir or Path("runs") / Path(file.split(":")[0]).stem)


def _existing(file: str | None) -> str:
    """Returns the value of --config if it names a file.

    Raises:
      ConfigError: if it does not.
    """
    if not file:
        raise ConfigError(f"--config=FILE: is required; shipped files are in {CONFIGS}")
    path = Path(file.split(":")[0])
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "there is no such file"
        raise ConfigError(f"--config={file}: {what}; shipped files are in {CONFIGS}")
    return file


def _load(file: str) -> dict[str, Any]:
    """Runs a configuration file and returns what it sets, with the defaults of all other keys.

    Raises:
      ConfigError: whatever the file raises, in one line.
    """
    values = flags.FlagValues()
    program = ["experiments.enwik8", f"--config={file}"]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=program)
    try:
        values(program)
        # A file that cannot be read is told of lazily: touching the value raises.
        config = values.config
        is_mapping = isinstance(config, Mapping | ConfigDict)
    except (Exception, SystemExit) as error:
        # The file is the user's own Python: whatever it raises is its fault to show.
        raise ConfigError(f"--config={file}: {_last_line(error)}") from error
    if not is_mapping:
        raise ConfigError(f"--config={file}: get_config() must return an ml_collections ConfigDict")
    return completed(config)


def _last_line(error: BaseException) -> str:
    """Returns the end of a message, with the kind of error, as a traceback's last line has it."""
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    last = lines[-1].strip() if lines else ""
    return last if kind in last or isinstance(error, flags.Error) else f"{kind}: {last}"


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""

    def action() -> None:
        config, workdir = parse(argv)
        fit(config, workdir, log=lambda line: print(line, flush=True))

    return run(argv, help_text, action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
