"""Shows what the layers of a trained Kuramoto model do with a text, as coupled oscillators.

    python -m experiments.analyze --workdir=DIR [--text=FILE] [--out=DIR] [--repeats=N]

The first window of the file is analysed, or that of the run's validation split, with the best
checkpoint by validation. The directory (analysis/ in the run's where absent) then holds
analysis.json with all numbers, analysis.md with tables, and as PNG and SVG the figures

    phases     a few tokens on the unit circle, through depth
    order      how far the attended tokens agree, by layer and head; coherence around a step
    coupling   the coupling matrices as graphs on the first tokens
    omega      the drift rates beside RoPE's, where the model has any
    dynamics   order and clusters when one layer's attention alone is repeated N times, as trained
               and bare (no gates, drift and bound), with causal and full attention, on at most
               the first 128 tokens
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import plots_analysis
from experiments.command import read_flags, run
from experiments.plots import save
from kuramoto_jax import analysis
from kuramoto_jax.config import Config, ConfigError
from kuramoto_jax.data import load_corpus
from kuramoto_jax.generate import as_text
from kuramoto_jax.metrics import write_atomically
from kuramoto_jax.modules import position_rates
from kuramoto_jax.train import load_run
from kuramoto_jax.workdir import check_same_data

GLOSSARY = """\
|G| is the order parameter of the tokens that a token attends to, beside its value under equal
weights. Coherence is sum_u A_tu cos(theta_u - theta_t): before the attention step, with each token
moved alone, and with all moved, under the same weights A; the slope is its first-order change,
positive where tokens move up the gradient. Entropy is in nats, and relative to log(t + 1); distance
in tokens. A gate's participation is the part of the coordinates that share in it. Saturation is an
update's root mean square in units of the learned radii. All are means over tokens and coordinates.
Tokens are in one cluster of a head if chains of tokens within {angle} rad connect them.
"""


def define_flags() -> flags.FlagValues:
    """Returns the flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of the run", flag_values=values)
    flags.DEFINE_string("text", None, "file to analyse", flag_values=values)
    flags.DEFINE_string("out", None, "directory to write to", flag_values=values)
    flags.DEFINE_integer("repeats", 100, "steps of attention alone", 1, flag_values=values)
    return values


def read_text(path: str, window: int) -> tuple[np.ndarray, str]:
    """Returns the first window of a file as uint8 [T], and in words what it is.

    Raises:
      ConfigError: if it cannot be read or has fewer than two bytes.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(window + 1)
    except OSError as error:
        raise ConfigError(
            f"--text={path}: cannot be read ({error.strerror}); must be a file"
        ) from error
    if len(content) < 2:
        raise ConfigError(f"--text={path}: has {len(content)} bytes; must have at least 2")
    text_T = np.frombuffer(content[:window], np.uint8)
    words = f"{text_T.size} bytes of {Path(path).name}"
    if len(content) > window:
        words = f"the first {words}, cut to the run's window"
    return text_T, words


def validation_text(config: Config, workdir: str) -> tuple[np.ndarray, str]:
    """Returns the first window of a run's validation split as uint8 [T], and in words what it is.

    Raises:
      ConfigError: if the data has changed since the run.
      kuramoto_jax.data.DataError: if it cannot be had.
    """
    window = config.data.window
    corpus = load_corpus(config.data.source, config.data.path, config.data.split, window=window)
    check_same_data(Path(workdir).expanduser(), corpus)
    text_T = corpus.validation[:window]
    return text_T, f"the first {text_T.size} bytes of the validation split"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table; numbers have three decimals, None is a dash."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}"
        return "-" if value is None else str(value)

    lines = [header, ["---"] * len(header), *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(report: Mapping[str, Any]) -> str:
    """Returns a report as Markdown tables."""
    heads, updates, dynamics = [], [], []
    for row in report["layers"]:
        for head in row["heads"]:
            gates = [(head[gate] or {}).get("participation") for gate in ("gate_q", "gate_k")]
            value = head["value_gate"] or {}
            values = [value.get(key) for key in ("part_synchronising", "part_repelling", "mean")]
            keys = ["tau", "order", "order_uniform"]
            keys += [f"coherence_{key}" for key in ("before", "slope", "alone", "after")]
            keys += ["entropy", "entropy_relative", "distance"]
            numbers = [head[key] for key in keys]
            heads.append([row["layer"], head["head"], *numbers, *gates, *values])
        sizes = []
        for part in ("attention_update", "feedforward_update"):
            sizes += [(row[part] or {}).get(key) for key in ("rms", "radius", "saturation")]
        updates.append([row["layer"], *sizes])
    for item in report["dynamics"]["runs"]:
        clusters = [float(np.mean(item["clusters"][when])) for when in (0, -1)]
        ends = [item["order"][0], item["order"][-1], *clusters]
        dynamics.append([item["layer"], item["variant"], item["mask"], *ends])
    depth = [
        [name, order, *clusters]
        for name, order, clusters in zip(
            ["embedded", *(f"after layer {row['layer']}" for row in report["layers"])],
            report["depth"]["order"],
            report["depth"]["clusters"],
            strict=True,
        )
    ]
    head_header = ["layer", "head", "tau", "order G", "equal weights", "coherence before", "slope"]
    head_header += ["moved alone", "all moved", "entropy", "relative", "distance"]
    head_header += ["participation q", "k", "v > 0", "v < 0", "mean v"]
    sizes_header = ["attention rms (rad)", "radius (rad)", "saturation"]
    sizes_header += ["feed-forward rms (rad)", "radius (rad)", "saturation"]
    cluster_header = [f"clusters, head {n}" for n in range(len(report["depth"]["clusters"][0]))]
    dynamics_header = ["layer", "variant", "attention", "order at first", "at last"]
    dynamics_header += ["clusters at first", "at last"]
    parts = [
        f"# Analysis of step {report['step']}\n",
        f"Text: {report['source']}.\n",
        GLOSSARY.format(angle=analysis.CLUSTER_ANGLE),
        "## Heads\n",
        table(head_header, heads),
        "## Updates\n",
        table(["layer", *sizes_header], updates),
        "## Synchrony of all tokens through depth\n",
        table(["depth", "order", *cluster_header], depth),
        f"## One layer's attention repeated {report['dynamics']['times'][-1]} times, on the first "
        f"{report['dynamics']['tokens']} tokens\n",
        table(dynamics_header, dynamics),
    ]
    return "\n".join(parts)


def write_analysis(argv: Sequence[str]) -> None:
    """Reads the flags, analyses, and writes the files; nothing is written before all is computed.

    Raises:
      ConfigError: for a flag out of range, a directory without a Kuramoto run, or a text that
        cannot be analysed.
      kuramoto_jax.data.DataError: if there is no --text and the run's data cannot be had.
    """
    values = define_flags()
    read_flags(values, argv)
    if not values.workdir:
        raise ConfigError("--workdir=DIR: is required")
    out = Path(values.out or Path(values.workdir) / "analysis").expanduser()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out={out}: is a file; must be a directory or not exist")
    config, _, params, step = load_run(values.workdir)
    model = config.model
    if values.text is None:
        text_T, source = validation_text(config, values.workdir)
    else:
        text_T, source = read_text(values.text, config.data.window)
    if text_T.max() >= model.symbols:
        raise ConfigError(f"--text: byte {text_T.max()} is none of the model's symbols")

    trace = analysis.trace(model, params, jnp.asarray(text_T, jnp.int32))
    rope_K = position_rates(model, model.head_width)
    report = {
        "step": step,
        "source": source,
        "text": as_text(text_T),
        "tokens": text_T.size,
        "layers": analysis.layer_statistics(model, trace),
        "depth": analysis.state_statistics(trace.depth_NTD, model.heads),
        "dynamics": analysis.dynamics_statistics(model, params, trace, values.repeats),
        "rope_rates": rope_K.tolist(),
    }
    figures = {
        "phases": plots_analysis.phases(trace, text_T),
        "order": plots_analysis.order(report["layers"]),
        "coupling": plots_analysis.coupling(report["layers"], trace, text_T),
        "dynamics": plots_analysis.dynamics(**report["dynamics"]),
    }
    if trace.omega_LHK is not None:
        figures["omega"] = plots_analysis.omega(np.asarray(trace.omega_LHK), rope_K)

    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "analysis.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(out / "analysis.md", markdown(report))
    for name, figure in figures.items():
        save(figure, out / name)
    print(f"analysed {source} with the checkpoint of step {step}; written to {out}")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code (see `experiments.command.run`)."""
    return run(argv, lambda: str(__doc__).strip(), lambda: write_analysis(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
