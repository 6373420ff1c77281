"""The figures of a report. Equal runs give equal files, byte for byte."""

import dataclasses
import itertools
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments.runs import Group, interval

# Okabe and Ito's colours, which the colour-blind can tell apart; then the next style of line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")
LOOKS = tuple((colour, style) for style, colour in itertools.product(STYLES, COLOURS))
WIDTH, LINE = 6.4, 0.21  # inches: of the axes, and of a line of text
SETTINGS: Any = {
    "svg.hashsalt": "kuramoto_jax",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A row of an ablation: its bpc minus that of the whole model, of each seed both have."""

    label: str
    values: tuple[float, ...]


@matplotlib.rc_context(SETTINGS)
def save(figure: Figure, path: Path) -> None:
    """Writes PATH.png and PATH.svg, each whole or not at all."""
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        part, whole = (path.with_name(f"{path.name}.{kind}{end}") for end in (".part", ""))
        figure.savefig(part, format=kind, dpi=150, bbox_inches="tight", metadata=metadata)
        part.replace(whole)


@matplotlib.rc_context(SETTINGS)
def learning_curves(groups: Sequence[Group]) -> Figure:
    """Draws validation bpc against bytes seen: the mean over seeds in a band of all seeds."""
    names = [_wrapped(group.label) for group in groups]
    figure, axes = _axes(max(3.6, 1.2 * LINE * sum(map(_lines, names))))
    ends = []
    for place, group in enumerate(groups):
        colour, style = LOOKS[place % len(LOOKS)]
        curves = group.curves()
        if not curves:
            continue
        seen, means = list(curves), [statistics.fmean(values) for values in curves.values()]
        low, high = ([pick(values) for values in curves.values()] for pick in (min, max))
        axes.plot(seen, means, style, color=colour, marker=".", markersize=4, linewidth=1.4)
        if len(group.runs) > 1:
            axes.fill_between(seen, low, high, color=colour, alpha=0.2, linewidth=0)
        ends.append((seen[-1], means[-1], names[place], colour))
    several = any(len(group.runs) > 1 for group in groups)
    title = "Validation while training"
    axes.set_title(title + ("\nmean over seeds, band from the lowest to the highest" * several))
    axes.set_xlabel("bytes seen in training")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylabel("validation, bits per character")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)
    _label_beside(figure, axes, ends)
    return figure


@matplotlib.rc_context(SETTINGS)
def scores(groups: Sequence[Group]) -> Figure:
    """Draws the validation bpc of each group: mean, interval, and single seeds."""
    rows = [(group.label, group.values("val_bpc")) for group in groups]
    figure, axes = _rows(rows, bars=False)
    axes.set_title(f"Validation of the best checkpoint\n{_legend(rows)}")
    axes.set_xlabel("validation, bits per character (lower is better; the axis starts above 0)")
    return figure


@matplotlib.rc_context(SETTINGS)
def parameters(groups: Sequence[Group]) -> Figure:
    """Draws validation bpc against parameters, with the interval of the mean."""
    names = [_wrapped(group.label) for group in groups]
    figure, axes = _axes(max(3.6, LINE * sum(map(_lines, names))))
    # The legend is in the order of the points, from the top.
    order = sorted(enumerate(groups), key=lambda pair: -statistics.fmean(pair[1].values("val_bpc")))
    for place, group in order:
        size, values = group.values("params")[0], group.values("val_bpc")
        mean, half = statistics.fmean(values), interval(values)
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.plot([size], [mean], marker, color=colour, label=names[place])
        axes.errorbar(size, mean, yerr=half, fmt="none", color=colour, capsize=3)
    several = any(len(group.runs) > 1 for group in groups)
    title = "Validation of the best checkpoint by size"
    axes.set_title(title + ("\nmean over seeds with its 95 % t-interval" * several))
    axes.set_xlabel("parameters")
    sizes = [group.values("params")[0] for group in groups]
    if max(sizes) > 3 * min(sizes):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylabel("validation, bits per character")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.1, y=0.1)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


@matplotlib.rc_context(SETTINGS)
def ablations(rows: Sequence[Difference], base: str) -> Figure:
    """Draws what each row adds to the bpc of the whole model, paired by seed."""
    pairs = [(row.label, row.values) for row in rows]
    figure, axes = _rows(pairs, bars=True)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_title(f"Validation against {base}, paired by seed\n{_legend(pairs)}")
    axes.set_xlabel(f"validation minus that of {base}, bits per character (right: worse)")
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    """Returns a new figure and its axes, of that height in inches."""
    figure = Figure(figsize=(WIDTH, height + 1.0))
    return figure, figure.add_subplot()


def _rows(rows: Sequence[tuple[str, Sequence[float]]], bars: bool) -> tuple[Figure, Axes]:
    """Draws rows of values from the top: mean as bar or dot, interval, and single values."""
    names = [_wrapped(label) for label, _ in rows]
    figure, axes = _axes(LINE * sum(_lines(name) + 0.6 for name in names))
    for place, (_, values) in enumerate(rows):
        mean = statistics.fmean(values)
        if bars:
            axes.barh(place, mean, height=0.62, color="#56B4E9")
        if len(values) > 1:
            below = [place + 0.22] * len(values)
            axes.plot(values, below, "o", markersize=3.5, color="#555555", markerfacecolor="white")
        axes.errorbar(
            mean,
            place,
            xerr=interval(values),
            fmt="none" if bars and len(values) > 1 else "o",
            color="#0072B2",
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _wrapped(label: str) -> str:
    """Returns a label in lines that leave room for the plot."""
    return textwrap.fill(label, 46, break_long_words=False, subsequent_indent="  ")


def _lines(label: str) -> int:
    """Returns the lines of a label."""
    return label.count("\n") + 1


def _legend(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Returns what marks the rows of values."""
    if all(len(values) < 2 for _, values in rows):
        return "one seed each: no interval"
    single = any(len(values) < 2 for _, values in rows)
    words = "mean with its 95 % t-interval; rings below are single seeds"
    return words + "; a row without interval has one seed" * single


def _label_beside(
    figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]]
) -> None:
    """Writes labels right of the axes, each tied to its point: (x, y, label, colour)."""
    if not ends:
        return
    ends = sorted(ends, key=lambda end: end[1])
    axes.set_ylim(axes.get_ylim())  # held still, as the places of labels are fractions of it
    low, high = axes.get_ylim()
    height = figure.get_figheight() * axes.get_position().height
    places = _apart(
        [(y - low) / (high - low) for _, y, *_ in ends],
        [(0.15 * _lines(label) + 0.04) / height for *_, label, _ in ends],
    )
    for (x, y, label, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            label,
            (x, y),
            (1.07, place),
            textcoords="axes fraction",
            va="center",
            color=colour,
            arrowprops={"arrowstyle": "-", "linestyle": ":", "linewidth": 0.8, "color": colour}
            | {"shrinkA": 1, "shrinkB": 4, "relpos": (0.0, 0.5)},
            annotation_clip=False,
        )


def _apart(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Returns centres for labels of some heights that do not overlap, near some rising places.

    Less the heights below, this is the nearest rising sequence, found by pooling neighbours that
    fall. All centres are from 0 to 1 where there is room.
    """
    steps = [(one + two) / 2 for one, two in itertools.pairwise(heights)]
    below = [0.0, *itertools.accumulate(steps)]
    pools: list[list[float]] = []
    for place, offset in zip(places, below, strict=True):
        pools.append([place - offset])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    levels = [statistics.fmean(pool) for pool in pools for _ in pool]
    most = max(0.0, 1.0 - below[-1])
    return [
        min(max(level, 0.0), most) + offset for level, offset in zip(levels, below, strict=True)
    ]
