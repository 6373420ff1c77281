"""What the commands share: how they read flags and how they end."""

import io
import os
import sys
from collections.abc import Callable, Sequence

from absl import flags

from kuramoto_jax.config import ConfigError
from kuramoto_jax.data import DataError
from kuramoto_jax.train import TrainError


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return str(error).strip().splitlines()[0]


def read_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Reads arguments into the flags that `values` defines.

    Raises:
      ConfigError: for an unknown flag, a wrong value or an argument that is no flag, in one line.
    """
    try:
        rest = values(["command", *argv])[1:]
    except (flags.Error, ValueError, TypeError) as error:
        raise ConfigError(first_line(error)) from error
    if rest:
        raise ConfigError(f"argument {rest[0]!r}: not understood; options are --name=value")


def run(argv: Sequence[str], help_text: Callable[[], str], action: Callable[[], None]) -> int:
    """Runs a command and returns its exit code.

    0 is done or stopped on request, 1 a run that failed, 2 bad input, 130 an interrupt. Every fault
    is one line on the error output.

    Args:
      argv: the arguments; one that asks for help prints it and does nothing else.
      help_text: gives the help.
      action: the command.
    """
    # A console that lacks a character of a text shows it escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if any(argument in ("-h", "--help", "--helpfull") for argument in argv):
        print(help_text())
        return 0
    try:
        action()
    except BrokenPipeError:
        # The reader has gone; what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("error: the output was closed", file=sys.stderr)
        return 1
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TrainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
