"""The figures of an analysis: phases, order, couplings, rates, and attention-only dynamics."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, PathPatch
from matplotlib.path import Path

from experiments.plots import COLOURS, SETTINGS
from kuramoto_jax.analysis import CLUSTER_ANGLE, Trace

PIECE = 32  # tokens of a coupling graph
SHOWN = 0.03  # smallest weight drawn
GREY = "#777777"


def symbol(byte: int) -> str:
    """Returns a byte as a label: itself, a mark for a space or a line's end, or its hex value."""
    marks = {ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"}
    return marks.get(byte) or (chr(byte) if 33 <= byte <= 126 else f"{byte:02x}")


def evenly(count: int, most: int) -> list[int]:
    """Returns at most `most` of 0 .. count - 1, evenly spaced, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def phases(trace: Trace, text_T: np.ndarray) -> Figure:
    """Draws phasors on unit circles: a column for each depth, a row for each coordinate.

    The coordinates are the first, middle and last of head 0; the tokens are the last of different
    symbols.
    """
    theta_NTD = np.asarray(trace.depth_NTD)
    depths, width = evenly(len(theta_NTD), 6), theta_NTD.shape[2] // trace.tau_LH.shape[1]
    colours = COLOURS[:6]  # without black, which is the mean's
    last = {int(byte): t for t, byte in enumerate(text_T)}
    tokens = sorted(last.values())[-len(colours) :]
    rows = evenly(width, 3)
    figure, axes = _grid(len(rows), len(depths), 1.6 * len(depths) + 3.0, 1.8 * len(rows) + 0.6)
    for row, coordinate in enumerate(rows):
        for column, depth in enumerate(depths):
            panel = axes[row, column]
            theta_T = theta_NTD[depth, :, coordinate]
            _circle(panel, theta_T, tokens)
            order = abs(np.mean(np.exp(1j * theta_T)))
            panel.text(0, -1.2, f"R = {order:.2f}", ha="center", va="top", fontsize=8)
            if row == 0:
                panel.set_title(f"after layer {depth - 1}" if depth else "embedded", fontsize=9)
        rate = ""
        if trace.omega_LHK is not None:
            rate = f"\nω = {trace.omega_LHK[0, 0, coordinate]:.2g} rad/token\nin layer 0"
        axes[row, 0].text(-1.3, 0, f"coordinate {coordinate}{rate}", ha="right", va="center")
    handles = [
        Line2D([], [], color=colour, marker="o", label=f"{symbol(text_T[t])}  at {t}")
        for t, colour in zip(tokens, colours, strict=False)
    ]
    handles.append(Line2D([], [], color=GREY, marker=".", linestyle="", label="other tokens"))
    handles.append(
        Line2D([], [], color="black", linewidth=3, label=f"mean of all {len(text_T)},\nlength R")
    )
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle("Phases of some tokens through depth, head 0", x=0.01, ha="left")
    return figure


def _circle(axes: Axes, theta_T: np.ndarray, tokens: Sequence[int]) -> None:
    """Draws the phasors of some tokens, all others as dots, and the mean phasor of all."""
    axes.add_patch(Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.8))
    axes.plot(np.cos(theta_T), np.sin(theta_T), ".", color=GREY, markersize=3, alpha=0.4)
    for token, colour in zip(tokens, COLOURS, strict=False):
        x, y = float(np.cos(theta_T[token])), float(np.sin(theta_T[token]))
        axes.plot([0, x], [0, y], color=colour, linewidth=1.2)
        axes.plot(x, y, "o", color=colour, markersize=5)
    mean = complex(np.mean(np.exp(1j * theta_T)))
    axes.plot([0, mean.real], [0, mean.imag], color="black", linewidth=3, solid_capstyle="round")
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.set_axis_off()


def order(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the order parameter of what heads attend to, and the coherence of their step."""
    heads = len(layers[0]["heads"])
    figure, (panels,) = _grid(1, 2, 2.8 + max(6.8, 0.26 * len(layers) * heads), 3.6)
    colours = _head_colours(heads)
    for head, colour in enumerate(colours):
        for row in layers:
            values, x = row["heads"][head], row["layer"] + 0.7 * ((head + 0.5) / heads - 0.5)
            panels[0].plot(x, values["order"], "o", color=colour)
            panels[0].plot(x, values["order_uniform"], "_", color=colour, markersize=9)
            before, alone, after = (values[f"coherence_{w}"] for w in ("before", "alone", "after"))
            panels[1].plot([x] * 3, [before, alone, after], color=colour, linewidth=1)
            panels[1].plot(x, before, "o", color=colour, markerfacecolor="white")
            panels[1].plot(x, alone, "x", color=colour)
            panels[1].plot(x, after, "^", color=colour)
    for panel in panels:
        panel.set_xticks([row["layer"] for row in layers])
        panel.set_xlabel("layer")
        panel.grid(axis="y", alpha=0.25, linewidth=0.6)
    panels[0].set_ylim(0, 1.02)
    panels[0].set_title("How far the attended tokens agree", loc="left")
    panels[0].set_ylabel("|G|, mean over tokens and coordinates")
    panels[1].set_title("Coherence at fixed weights A", loc="left")
    panels[1].set_ylabel(r"$\Sigma_u A_{tu}\cos(\theta_u - \theta_t)$, mean over the same")
    handles = [_key(colour, "o", f"head {head}") for head, colour in enumerate(colours)]
    handles += [_key(GREY, "_", "left: equal weights"), _key(GREY, "o", "right: before the step")]
    handles[-1].set_markerfacecolor("white")
    handles += [_key(GREY, "x", "each token moved alone"), _key(GREY, "^", "all tokens moved")]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    return figure


def _key(colour: Any, marker: str, label: str) -> Line2D:
    """Returns a legend's entry for a marker."""
    return Line2D([], [], color=colour, marker=marker, linestyle="", label=label)


def _head_colours(heads: int) -> Sequence[Any]:
    """Returns a colour for each head that the colour-blind can tell from the others."""
    if heads <= len(COLOURS):
        return COLOURS[:heads]
    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, heads)))


def coupling(layers: Sequence[Mapping[str, Any]], trace: Trace, text_T: np.ndarray) -> Figure:
    """Draws coupling matrices as graphs on the first tokens: arcs as wide as their weight.

    For up to four layers, the head of least relative entropy. Causal attention sees nothing but
    what is drawn, as the piece starts where the text does.
    """
    weights_LHTU = np.asarray(trace.weights_LHTU)
    piece = min(PIECE, len(text_T))
    chosen = evenly(len(layers), 4)
    figure, axes = _grid(len(chosen), 1, 9.0, 1.9 * len(chosen) + 0.5)
    for panel, index in zip(axes[:, 0], chosen, strict=True):
        row = min(layers[index]["heads"], key=lambda head: head["entropy_relative"])
        weights_TU = weights_LHTU[index, row["head"], :piece, :piece]
        for t in range(piece):
            for u in range(t):
                if weights_TU[t, u] >= SHOWN:
                    _arc(panel, u, t, weights_TU[t, u])
        panel.scatter(
            range(piece),
            np.zeros(piece),
            s=4 + 60 * np.diag(weights_TU),
            color="#D55E00",
            zorder=3,
            clip_on=False,
        )
        panel.set_xticks(range(piece), [symbol(byte) for byte in text_T[:piece]], fontsize=10)
        panel.set(xlim=(-0.7, piece - 0.3), ylim=(0, None), yticks=[])
        panel.tick_params(axis="x", length=0, pad=7)
        panel.spines[["left", "bottom"]].set_visible(False)
        panel.set_title(
            f"layer {index}, head {row['head']}: entropy {row['entropy_relative']:.2f} of "
            f"log(t + 1), mean distance {row['distance']:.1f} tokens",
            fontsize=9,
            loc="left",
        )
    handles = [
        Line2D([], [], color="#0072B2", alpha=0.7, linewidth=_width(a), label=f"A = {a}")
        for a in (0.1, 0.5, 1.0)
    ]
    handles.append(_key("#D55E00", "o", "area: weight on itself"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        "Which earlier tokens each token couples to, in the sharpest head", x=0.01, ha="left"
    )
    return figure


def _width(weight: float) -> float:
    return 5.0 * weight


def _arc(axes: Axes, start: int, end: int, weight: float) -> None:
    """Draws an arc between two tokens, as high as they are apart up to a limit."""
    middle, height = (start + end) / 2, (end - start) ** 0.6
    path = Path(
        [(start, 0), (start, height), (middle, height), (end, height), (end, 0)],
        [Path.MOVETO, Path.CURVE3, Path.CURVE3, Path.CURVE3, Path.CURVE3],
    )
    axes.add_patch(
        PathPatch(path, fill=False, edgecolor="#0072B2", alpha=0.7, linewidth=_width(weight))
    )
    axes.update_datalim([(start, 0), (end, height)])
    axes.autoscale_view(scalex=False)


def omega(omega_LHK: np.ndarray, rope_K: np.ndarray) -> Figure:
    """Draws the sizes of learned drift rates beside RoPE's, in the order of coordinates."""
    layers, heads, width = omega_LHK.shape
    colours = _head_colours(heads)
    chosen = evenly(layers, 4)
    figure, axes = _grid(1, len(chosen), 2.4 * len(chosen) + 1.6, 3.2, sharey=True)
    for panel, index in zip(axes[0], chosen, strict=True):
        for rate_K, colour in zip(omega_LHK[index], colours, strict=True):
            for mask_K, face in ((rate_K > 0, colour), (rate_K < 0, "white")):
                panel.plot(
                    np.flatnonzero(mask_K),
                    np.abs(rate_K[mask_K]),
                    "o",
                    color=colour,
                    markerfacecolor=face,
                    markersize=4,
                )
        panel.plot(range(width), rope_K, "--", color="black", linewidth=1)
        panel.set_yscale("log")
        panel.set_title(f"layer {index}")
        panel.set_xlabel("coordinate of a head")
        panel.grid(alpha=0.25, linewidth=0.6)
    axes[0, 0].set_ylabel("|ω|, radians a token")
    handles = [_key(colour, "o", f"head {head}") for head, colour in enumerate(colours)]
    handles.append(_key(GREY, "o", "ω < 0"))
    handles[-1].set_markerfacecolor("white")
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="RoPE"))
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle("Drift rates beside RoPE's", x=0.01, ha="left")
    return figure


def dynamics(tokens: int, times: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws order and clusters of some tokens against repeats of one layer's attention."""
    masks = list(dict.fromkeys(run["mask"] for run in runs))
    layers = max(run["layer"] for run in runs) + 1
    chosen = evenly(layers, 6)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, len(chosen)))
    figure, axes = _grid(2, len(masks), 8.6, 5.4, sharex=True, sharey="row")
    for run in runs:
        if run["layer"] not in chosen:
            continue
        column = masks.index(run["mask"])
        look = {
            "color": colours[chosen.index(run["layer"])],
            "linestyle": "-" if run["variant"] == "trained" else "--",
            "linewidth": 1.4,
        }
        axes[0, column].plot(times, run["order"], **look)
        axes[1, column].plot(times, np.mean(run["clusters"], axis=1), **look)
    for column, mask in enumerate(masks):
        axes[0, column].set_title(f"{mask} attention", loc="left")
        axes[1, column].set_xlabel("repeats of the layer's attention")
        axes[0, column].set(ylim=(0, 1.02))
        axes[1, column].set_yscale("log")
        axes[1, column].set_xscale("symlog", linthresh=1)
        axes[1, column].set_xlim(0, times[-1])
        axes[1, column].xaxis.set_major_formatter("{x:g}")
        axes[1, column].yaxis.set_major_formatter("{x:g}")
        for panel in axes[:, column]:
            panel.grid(alpha=0.25, linewidth=0.6)
    axes[0, 0].set_ylabel("order parameter |⟨exp iθ⟩|,\nmean over coordinates")
    axes[1, 0].set_ylabel(f"clusters of tokens (closer than\n{CLUSTER_ANGLE} rad), mean over heads")
    handles = [
        Line2D([], [], color=colour, label=f"layer {index}")
        for index, colour in zip(chosen, colours, strict=True)
    ]
    handles.append(Line2D([], [], color="black", label="as trained"))
    handles.append(Line2D([], [], color="black", linestyle="--", label="bare coupling"))
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle(
        f"One layer's attention repeated on {tokens} tokens, without feed-forward",
        x=0.01,
        ha="left",
    )
    return figure


def _grid(
    rows: int, columns: int, width: float, height: float, **arguments: Any
) -> tuple[Figure, np.ndarray]:
    """Returns a new figure of that size in inches, and its axes [rows, columns]."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **arguments)
