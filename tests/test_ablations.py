"""The ablation command: its rows, its runs and their resumption, its table."""

import csv
import math
import os
import re
import signal
from pathlib import Path

import pytest

from experiments import ablations, plots, runs, series
from kuramoto_jax.config import Config, ConfigError, flatten
from kuramoto_jax.train import TrainError

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made, but their files left empty: drawing takes the most time by far."""

    def save(figure, path):
        path.with_name(f"{path.name}.png").touch()

    monkeypatch.setattr(plots, "save", save)


def done(capsys, *argv):
    """Runs the command on the tiny configuration; returns what it prints."""
    assert ablations.main(["--config=tiny.py", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


# Rows.


@pytest.mark.parametrize(("bound", "other"), [("norm", "coordinate"), ("coordinate", "norm")])
def test_each_row_is_a_configuration_that_differs_in_what_it_says(bound, other):
    base = Config.from_mapping({"model": {"bound": bound}})
    rows = ablations.rows_of(base)
    assert list(rows) == [
        "full",
        "no_gates",
        "token_gates",
        "no_gate_normalization",
        "no_value_gate",
        "no_drift",
        "fixed_rates",
        "no_bound",
        f"{other}_bound",
        "lifted_feedforward",
        "no_feedforward",
        "untied_readout",
        "one_head",
        "value_projection",
        "normalization",
    ]
    for name, changes in rows.items():
        config = ablations.variant(base, name, changes, seed=7)
        assert flatten(config.to_dict()) == flatten(base.to_dict()) | {"seed": 7} | changes


def test_list_shows_rows_and_trains_nothing(folder, capsys, untrained):
    before = sorted(folder.iterdir())
    out = done(capsys, "--list", "--config.model.heads=1")
    for name in ablations.rows_of(Config()):
        assert f"| {name} " in out
    assert untrained == []
    assert [p for p in folder.iterdir() if p not in before and p.name != "__pycache__"] == []


# What is run.


def test_each_row_and_seed_is_a_run(folder, capsys, untrained):
    out = done(capsys, "--only=no_gates,full", "--seeds=2", "--config.seed=5")
    root = Path("runs", "ablations_tiny")
    assert [name for name, _ in untrained] == [
        str(root / row / f"seed_{seed}") for row in ("full", "no_gates") for seed in (5, 6)
    ]
    assert [(config.seed, config.model.gates) for _, config in untrained] == [
        (5, True),
        (6, True),
        (5, False),
        (6, False),
    ]
    assert "row 2 of 2: no_gates, seed 6" in out
    files = {path.name for path in (root / "report").iterdir()}
    assert files >= {"report.md", "ablations.csv", "ablations.png", "ablations.svg", "scores.png"}
    assert not any(name.endswith(".part") for name in files)


def test_all_rows_with_three_seeds_by_default(untrained, monkeypatch):
    monkeypatch.setattr(ablations, "report", lambda plan: None)
    assert ablations.main(["--config=tiny.py", "--workdir=out"]) == 0
    rows = ablations.rows_of(Config())
    assert [name for name, _ in untrained] == [
        str(Path("out", row, f"seed_{seed}")) for row in rows for seed in range(3)
    ]


# The table.


def test_differences_are_paired_by_seed(capsys, untrained, undrawn):
    """The seeds' own spread, a whole bit, cancels: what is left is that of the differences."""
    done(capsys, "--only=full,no_gates", "--seeds=3", "--workdir=out")
    full, row = read_csv(Path("out", "report", "ablations.csv"))
    assert (full["row"], full["difference_mean"], full["difference_sd"]) == ("full", "", "")
    assert (row["row"], row["changes"]) == ("no_gates", "model.gates=False")
    assert float(row["val_bpc_mean"]) == pytest.approx(3.0 + 0.25 * 1.25)
    assert float(row["val_bpc_sd"]) == pytest.approx(1.0 + 0.25 / 4)
    assert float(row["difference_mean"]) == pytest.approx(0.25 * 1.25)
    assert float(row["difference_sd"]) == pytest.approx(0.25 / 4)


def test_only_seeds_that_both_have_are_paired(capsys, untrained, undrawn):
    done(capsys, "--only=full", "--seeds=2", "--workdir=out")
    out = done(capsys, "--only=no_gates", "--seeds=3", "--workdir=out")
    assert [config.seed for _, config in untrained] == [0, 1, 0, 1, 2]
    _, row = read_csv(Path("out", "report", "ablations.csv"))
    assert (row["seeds"], row["difference_seeds"]) == ("3", "2")
    assert float(row["difference_mean"]) == pytest.approx(0.25 * 1.125)
    assert "+0.2812 ± 0.0442 (2 seeds)" in out


def test_table_is_in_the_order_of_rows_and_has_the_numbers_of_the_csv(capsys, untrained, undrawn):
    done(capsys, "--only=no_value_gate", "--seeds=2", "--workdir=out")
    out = done(capsys, "--only=no_gates,full", "--seeds=2", "--workdir=out")
    lines = read_csv(Path("out", "report", "ablations.csv"))
    assert [line["row"] for line in lines] == ["full", "no_gates", "no_value_gate"]
    text = Path("out", "report", "report.md").read_text()
    for line in lines[1:]:
        mean, sd = (float(line[f"difference_{name}"]) for name in ("mean", "sd"))
        shown = f"| {mean:+.4f} ± {sd:.4f} "
        assert shown in out
        assert shown in text
    assert [line["model"] for line in read_csv(Path("out", "report", "results.csv"))] == [
        line["row"] for line in lines
    ]


def test_without_the_whole_model_there_is_no_difference(capsys, untrained, undrawn):
    out = done(capsys, "--only=no_gates", "--seeds=2", "--workdir=out")
    (row,) = read_csv(Path("out", "report", "ablations.csv"))
    assert row["difference_mean"] == ""
    assert "no run of row full" in out
    assert not Path("out", "report", "ablations.png").exists()
    assert Path("out", "report", "scores.png").exists()


def test_runs_of_another_base_are_no_row(capsys, untrained, undrawn):
    done(capsys, "--only=full", "--seeds=1", "--workdir=out")
    done(capsys, "--only=no_gates", "--seeds=1", "--workdir=out", "--config.optim.clip=2")
    (row,) = read_csv(Path("out", "report", "ablations.csv"))
    assert (row["row"], row["difference_mean"]) == ("no_gates", "")
    assert len(read_csv(Path("out", "report", "results.csv"))) == 2


# Stops and failures.


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_a_stop_says_how_many_runs_are_done(capsys, untrained, monkeypatch, number):
    """Between trainings too, where the signal is not the training's to handle."""
    whole = series.fit

    def fit(config, workdir, log):
        if len(untrained) == 3:
            return os.kill(os.getpid(), number) if number else None
        return whole(config, workdir, log)

    monkeypatch.setattr(series, "fit", fit)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out = done(capsys, "--only=full,no_gates", "--seeds=2", "--workdir=out")
    after = signal.signal(signal.SIGTERM, before)
    assert out.endswith("stopped: 3 of 4 runs are done; the same command continues\n")
    assert not Path("out", "report").exists()
    assert after == signal.SIG_IGN


def test_a_failed_run_does_not_keep_the_others_from_theirs(capsys, untrained, undrawn, monkeypatch):
    whole = series.fit

    def fit(config, workdir, log):
        if workdir == Path("out", "full", "seed_1"):
            raise TrainError("step 3: loss nan")
        return whole(config, workdir, log)

    monkeypatch.setattr(series, "fit", fit)
    argv = ["--config=tiny.py", "--only=full,no_gates", "--seeds=2", "--workdir=out"]
    assert ablations.main(argv) == 1
    assert len(untrained) == 3
    err = capsys.readouterr().err
    assert err == "error: 1 of 4 runs failed: out/full/seed_1: step 3: loss nan\n"
    rows = read_csv(Path("out", "report", "ablations.csv"))
    assert [(row["row"], row["seeds"], row["difference_seeds"]) for row in rows] == [
        ("full", "1", "0"),
        ("no_gates", "2", "1"),
    ]


def test_stopped_training_is_resumed_and_finished_training_is_not_repeated(
    capsys, undrawn, monkeypatch
):
    """Real runs: a signal within the second of four, the rest, and the same command once more."""
    argv = ("--only=full,no_feedforward", "--seeds=2", "--workdir=out")
    say = series._say

    def interrupt(line):
        say(line)
        if line.startswith("compiled") and Path("out", "full", "seed_0", "summary.json").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(series, "_say", interrupt)
        out = done(capsys, *argv)
    assert out.endswith("stopped: 1 of 4 runs are done; the same command continues\n")
    assert not Path("out", "no_feedforward").exists()

    out = done(capsys, *argv)
    assert "resumed from step 2" in out
    names = [f"{row}/seed_{seed}" for row in ("full", "no_feedforward") for seed in (0, 1)]
    found = [runs.read(Path("out", name)) for name in names]
    scores = [run.summary["val_bpc"] for run in found]
    assert len(set(scores)) == 4
    lines = read_csv(Path("out", "report", "ablations.csv"))
    expected = (scores[2] - scores[0] + scores[3] - scores[1]) / 2
    assert float(lines[1]["difference_mean"]) == pytest.approx(expected)
    assert math.isfinite(expected)
    assert int(lines[0]["parameters"]) > int(lines[1]["parameters"])

    files = [p for p in Path("out").rglob("*") if p.is_file() and "report" not in p.parts]
    times = {path: path.stat().st_mtime_ns for path in files}
    table = out[out.index("| row") :]
    out = done(capsys, *argv)
    assert out.count("holds this run, finished at step 4") == 4
    assert out[out.index("| row") :] == table
    assert times == {path: path.stat().st_mtime_ns for path in files}


# Refusals.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--config"]),
        (["--config=none.py"], ["none.py"]),
        (["--config=tiny.py", "--only=full,no_gate"], ["no_gate", "no_gates", "normalization"]),
        (["--config=tiny.py", "--seeds=0"], ["seeds"]),
        (["--config=tiny.py", "--seeds=x"], ["seeds"]),
        (["--config=tiny.py", "--sedes=2"], ["sedes"]),
        (["--config=tiny.py", "word"], ["word"]),
        (["--config=tiny.py", "--config.model.width=7"], ["model.width"]),
        (["--config=tiny.py", "--config.model.name=transformer"], ["model.name", "kuramoto"]),
        (["--config=tiny.py", "--config.model.heads=1"], ["row one_head", "model.heads=1"]),
        (["--config=tiny.py", "--config.model.gates=False"], ["row no_gates"]),
        (["--config=tiny.py", "--config.seed=2147483646"], ["row full", "seed=2147483648"]),
    ],
)
def test_bad_arguments_are_one_line_before_any_run(folder, capsys, untrained, argv, words):
    before = sorted(folder.iterdir())
    assert ablations.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err
    assert untrained == []
    assert [p for p in folder.iterdir() if p not in before and p.name != "__pycache__"] == []


def test_row_that_cannot_be_run_is_named():
    base = Config.from_mapping({"model": {"gates": False}})
    with pytest.raises(ConfigError, match=r"row no_gate_normalization: model\.gate_normalization"):
        ablations.variant(base, "no_gate_normalization", {"model.gate_normalization": False}, 0)


def test_help_says_what_the_command_takes(capsys):
    assert ablations.main(["--help"]) == 0
    assert "--only=ROW" in capsys.readouterr().out
