"""Writes text with the model of a run, byte by byte as it is drawn.

    python -m experiments.sample --workdir=DIR [--prompt=TEXT] [--length=N] [--temperature=X]
        [--top_p=X] [--top_k=N] [--min_p=X] [--seed=N] [--samples=N] [--window=N] [--json | --raw]

The prompt is the flag's text or, without the flag, what comes on standard input; an empty one
becomes a newline. Any bytes will do. The best checkpoint by validation is used. In each layer a
byte attends to the last N bytes, those of the run's window where N is not given; texts may be of
any length. Several samples are drawn at once: the first is shown as it is drawn, the others after
it.
"""

import base64
import codecs
import json
import sys
from collections.abc import Iterable, Sequence
from os import fsencode

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.command import read_flags, run
from kuramoto_jax.config import ConfigError
from kuramoto_jax.generate import Sampling, as_text, printable, stream
from kuramoto_jax.train import load_run


def define_flags() -> flags.FlagValues:
    """Returns the flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_string("prompt", None, "text to continue; default: stdin", flag_values=values)
    flags.DEFINE_integer("length", 500, "bytes to draw", 1, flag_values=values)
    flags.DEFINE_float("temperature", 1.0, "0: the most likely byte", flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "likeliest bytes of this total; 1: all", flag_values=values)
    flags.DEFINE_integer("top_k", 0, "this many likeliest bytes; 0: all", flag_values=values)
    flags.DEFINE_float("min_p", 0.0, "bytes this times the likeliest; 0: all", flag_values=values)
    flags.DEFINE_integer("seed", 0, "seed of the draws", 0, flag_values=values)
    flags.DEFINE_integer("samples", 1, "texts to write", 1, flag_values=values)
    flags.DEFINE_integer(
        "window", None, "bytes a layer attends to; default: the run's", 1, flag_values=values
    )
    flags.DEFINE_bool("json", False, "one JSON object a text, a line each", flag_values=values)
    flags.DEFINE_bool("raw", False, "the drawn bytes and nothing else", flag_values=values)
    return values


def help_text() -> str:
    """Returns the usage and the flags."""
    values = define_flags()
    rows = [f"  --{name}={values[name].default!r}: {values[name].help}" for name in values]
    return "\n".join([__doc__.strip(), "", *rows])


def write_samples(argv: Sequence[str]) -> None:
    """Reads the flags and writes the texts to standard output.

    Raises:
      ConfigError: for a flag out of range or a directory without a run.
    """
    values = define_flags()
    read_flags(values, argv)
    if not values.workdir:
        raise ConfigError("--workdir=DIR: is required")
    if values.json and values.raw:
        raise ConfigError("--raw: cannot be joined with --json")
    if values.raw and values.samples > 1:
        raise ConfigError(f"--samples={values.samples}: --raw writes one text; leave it out")
    try:
        sampling = Sampling(values.temperature, values.top_k, values.top_p, values.min_p)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    config, model, params, _ = load_run(values.workdir)
    given = sys.stdin.buffer.read() if values.prompt is None else fsencode(values.prompt)
    prompt = np.frombuffer(given or b"\n", np.uint8)
    if prompt.max() >= config.model.symbols:
        raise ConfigError(f"--prompt: byte {prompt.max()} is none of the model's symbols")

    pieces = stream(
        model,
        params,
        jnp.tile(jnp.asarray(prompt, jnp.int32), (values.samples, 1)),
        jax.random.key(values.seed),
        length=values.length,
        slots=values.window or config.data.window,
        sampling=sampling,
    )
    if values.raw:
        for piece in pieces:
            sys.stdout.buffer.write(piece.tobytes())
            sys.stdout.buffer.flush()
    elif values.json:
        for text in np.concatenate(list(pieces), axis=1):
            row = {
                "prompt": as_text(prompt),
                "text": as_text(text),
                "base64": base64.b64encode(text.tobytes()).decode(),
            }
            print(json.dumps(row))
    else:
        show(prompt, pieces, values.samples)


def show(prompt: np.ndarray, pieces: Iterable[np.ndarray], samples: int) -> None:
    """Prints a prompt and its continuations, the first of them as it is drawn.

    Args:
      prompt: [T] bytes.
      pieces: the continuations, [samples, n] bytes at a time.
      samples: how many there are; each of several gets a heading.
    """
    headings = [f"--- sample {number + 1}\n" if samples > 1 else "" for number in range(samples)]
    # Characters of several bytes may be cut between pieces.
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    print(headings[0] + printable(decoder.decode(prompt.tobytes())), end="", flush=True)
    drawn = []
    for piece in pieces:
        print(printable(decoder.decode(piece[0].tobytes())), end="", flush=True)
        drawn.append(piece)
    print(printable(decoder.decode(b"", final=True)))
    for heading, text in zip(headings[1:], np.concatenate(drawn, axis=1)[1:], strict=True):
        print(heading + as_text(np.concatenate([prompt, text])))


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""
    return run(argv, help_text, lambda: write_samples(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
