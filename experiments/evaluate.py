"""Scores the model of a run on a whole split.

    python -m experiments.evaluate --workdir=DIR [--split=test] [--stride=N]

Every byte of the split but its first is scored once, by the best checkpoint by validation. Windows
are N bytes apart (the run's window where absent, as in training), so that every scored byte but
those of the first window has at least window - N bytes of context: a smaller N takes longer and
scores a little better.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments.command import read_flags, run
from kuramoto_jax.config import ConfigError
from kuramoto_jax.data import load_corpus
from kuramoto_jax.train import evaluate, load_run
from kuramoto_jax.workdir import check_same_data

SPLITS = ("train", "validation", "test")


def define_flags() -> flags.FlagValues:
    """Returns the flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_enum("split", "test", SPLITS, "what to score", flag_values=values)
    flags.DEFINE_integer("stride", None, "bytes between windows", 1, flag_values=values)
    return values


def write_score(argv: Sequence[str]) -> None:
    """Reads the flags and prints the score.

    Raises:
      ConfigError: for a flag out of range, a directory without a run, or data that has changed.
      kuramoto_jax.data.DataError: if the run's data cannot be had.
    """
    values = define_flags()
    read_flags(values, argv)
    if not values.workdir:
        raise ConfigError("--workdir=DIR: is required")
    config, model, params, step = load_run(values.workdir)
    window = config.data.window
    stride = window if values.stride is None else values.stride
    if stride > window:
        raise ConfigError(f"--stride={stride}: must be at most the run's window of {window} bytes")
    corpus = load_corpus(config.data.source, config.data.path, config.data.split, window=window)
    check_same_data(Path(values.workdir).expanduser(), corpus)
    text = getattr(corpus, values.split)
    bpc = evaluate(
        model,
        params,
        text,
        window=window,
        stride=stride,
        batch_size=config.train.eval_batch_size,
    )
    print(
        f"{values.split} {bpc:.4f} bpc over {text.size - 1:,} bytes, checkpoint of step {step}; "
        f"window {window}, stride {stride}: at least {window - stride} bytes of context"
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""
    return run(argv, lambda: str(__doc__).strip(), lambda: write_score(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
