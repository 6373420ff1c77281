"""Reports on hand-made run directories, whose statistics are known."""

import csv
import json
import math
import re
import shutil
import statistics

import numpy as np
import pytest
import scipy.stats

from experiments import plots, report, runs
from kuramoto_jax.config import Config, flatten

PNG = b"\x89PNG\r\n\x1a\n"
FILES = {"report.md", "results.csv", "runs.csv"} | {
    f"{name}.{kind}" for name in report.PLOTS for kind in ("png", "svg")
}


@pytest.fixture
def drawn():
    """Has the plots of a report written, which takes the most time by far."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures are made in every test, but not written in those that do not ask for it."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "save", lambda figure, path: None)


def make_run(
    directory, val=2.0, *, test=None, seed=0, sha="a" * 64, params=1000, seconds=60.0, **changes
):
    """Writes the directory of a finished run; `model__width=64` changes a key."""
    values = {"data.source": "file", "data.path": "text", "data.window": 16, "train.steps": 10}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    config = Config().to_dict() | {"seed": seed}
    for key, value in values.items():
        part, name = key.split(".")
        config[part][name] = value
    if config["data"]["source"] != "file":
        config["data"]["path"] = ""
    steps, tokens = config["train"]["steps"], config["data"]["window"] * 16
    summary = {"params": params, "val_bpc": val, "test_bpc": val - 0.1 if test is None else test}
    summary |= {"best_step": steps, "steps": steps, "tokens": steps * tokens, "seconds": seconds}
    environment = {"device": "1 x tpu", "data": {"description": "a text", "sha256": sha}}
    rows = [{"step": steps // 2, "val_bpc": val + 1}, {"step": steps, "val_bpc": val}]
    directory.mkdir(parents=True)
    for name, content in (("config", config), ("summary", summary), ("environment", environment)):
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reported(folder, capsys, *argv):
    """Runs the command on a folder; returns its output, and the lines of the two CSV files."""
    out = folder / "out"
    assert report.main([*(argv or [str(folder / "runs")]), f"--out={out}"]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    texts = [(out / f"{name}.csv").read_text() for name in ("results", "runs")]
    return printed, *(list(csv.DictReader(text.splitlines())) for text in texts)


def markdown(text):
    """Returns the first Markdown table of a text as dictionaries."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    count = next((i for i, line in enumerate(text.splitlines()[2:]) if not line.startswith("|")), 0)
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2 : 2 + count]]


# Numbers.


def test_statistics_are_those_of_the_seeds(tmp_path, capsys):
    for seed, (val, test) in enumerate([(2.0, 1.5), (2.5, 1.5), (2.1, 1.8)]):
        make_run(tmp_path / "runs" / f"k{seed}", val, test=test, seed=seed, seconds=30.0 * seed)
    make_run(tmp_path / "runs" / "t", 3.25, model__name="transformer", params=2000)
    printed, results, lines = reported(tmp_path, capsys)
    kuramoto, transformer = results
    assert (kuramoto["model"], transformer["model"]) == ("kuramoto", "transformer")
    assert kuramoto["seeds"] == "3"
    assert float(kuramoto["val_bpc_mean"]) == pytest.approx(2.2)
    assert float(kuramoto["val_bpc_sd"]) == pytest.approx(math.sqrt(0.07))
    assert float(kuramoto["val_bpc_median"]) == 2.1
    assert float(kuramoto["test_bpc_mean"]) == pytest.approx(1.6)
    assert float(kuramoto["test_bpc_sd"]) == pytest.approx(math.sqrt(0.03))
    assert float(kuramoto["seconds_mean"]) == 30.0
    assert (kuramoto["parameters"], kuramoto["tokens"]) == ("1000", "2560")
    assert (transformer["val_bpc_mean"], transformer["val_bpc_sd"]) == ("3.25", "")
    assert [line["val_bpc"] for line in lines] == ["2.0", "2.5", "2.1", "3.25"]

    row, single = markdown(printed)
    assert (row["validation bpc"], row["median"]) == ("2.2000 ± 0.2646", "2.1000")
    assert (row["test bpc"], row["tokens"], row["time a run"]) == (
        "1.6000 ± 0.1732",
        "2,560",
        "30s",
    )
    assert (row["hardware"], row["parameters"], row["seeds"]) == ("1 x tpu", "1,000", "3")
    assert (single["validation bpc"], single["seeds"]) == ("3.2500", "1")


def test_csv_and_markdown_hold_the_same_numbers(tmp_path, capsys):
    scores = np.random.default_rng(0).uniform(1, 3, 6)
    for seed, score in enumerate(scores):
        make_run(
            tmp_path / "runs" / f"{seed}", score, seed=seed % 3, model__heads=2 + seed // 3 * 2
        )
    printed, results, _ = reported(tmp_path, capsys)
    text = (tmp_path / "out" / "report.md").read_text()
    tables = markdown(printed), markdown(text[text.index("|") :])
    assert tables[0] == tables[1]
    for row, line in zip(tables[0], results, strict=True):
        mean, sd, median = (float(line[f"val_bpc_{name}"]) for name in ("mean", "sd", "median"))
        assert row["validation bpc"] == f"{mean:.4f} ± {sd:.4f}"
        assert row["median"] == f"{median:.4f}"
        assert row["model"] == line["model"]
        assert int(row["parameters"].replace(",", "")) == int(line["parameters"])
    assert float(results[0]["val_bpc_mean"]) == pytest.approx(statistics.fmean(scores[:3]))


@pytest.mark.parametrize("count", [2, 3, 5, 11, 12, 20, 100])
def test_interval_is_the_t_interval(count):
    values = np.random.default_rng(count).normal(size=count)
    exact = scipy.stats.t.interval(0.95, count - 1, values.mean(), scipy.stats.sem(values))
    assert runs.interval(list(values)) == pytest.approx((exact[1] - exact[0]) / 2, rel=1e-4)
    assert runs.interval([1.0]) is None


# Groups and their names.


def test_runs_of_one_computation_are_one_row(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", seed=3, train__eval_every=7, train__tensorboard=False)
    make_run(tmp_path / "runs" / "b", seed=4, data__path="elsewhere/text", train__keep=1)
    printed, results, _ = reported(tmp_path, capsys)
    assert [line["seeds"] for line in results] == ["2"]
    assert "Left out" not in printed


def test_other_steps_are_another_row(tmp_path, capsys):
    for steps in (10, 20):
        make_run(tmp_path / "runs" / f"{steps}", train__steps=steps)
    _, results, _ = reported(tmp_path, capsys)
    assert [(line["model"], line["tokens"]) for line in results] == [
        ("kuramoto (train.steps=10)", "2560"),
        ("kuramoto (train.steps=20)", "5120"),
    ]


def named(*changes):
    """The labels of configurations that differ from one another in these keys."""
    base = runs.computation(flatten(Config().to_dict()))
    return runs.labels([base | {k.replace("__", "."): v for k, v in c.items()} for c in changes])


def test_label_is_the_model_where_that_is_enough():
    assert named({}, {"model__name": "transformer", "model__layers": 9}) == [
        "kuramoto",
        "transformer",
    ]


def test_two_of_a_model_are_told_apart_by_their_values():
    assert named({}, {"model__heads": 1}, {"model__name": "transformer"}) == [
        "kuramoto (model.heads=4)",
        "kuramoto (model.heads=1)",
        "transformer",
    ]


def test_among_ablations_the_whole_model_has_the_bare_name():
    changes = (
        {"model__heads": 1},
        {},
        {"model__bound": "coordinate"},
        {"model__tied_readout": False},
    )
    assert named(*changes) == [
        "kuramoto (model.heads=1)",
        "kuramoto",
        "kuramoto (model.bound=coordinate)",
        "kuramoto (model.tied_readout=False)",
    ]


def test_label_has_the_fewest_keys():
    wide = {"model__layers": 6, "model__width": 256, "model__hidden": 576}
    assert named({}, wide) == ["kuramoto (model.layers=4)", "kuramoto (model.layers=6)"]
    grid = [{"model__layers": a, "model__heads": b} for a in (1, 2) for b in (1, 2)]
    assert named(*grid)[3] == "kuramoto (model.layers=2, model.heads=2)"


def test_label_beside_a_bare_name_hides_no_change():
    both = {"model__heads": 1, "model__bound": "coordinate"}
    assert named({}, both, {"model__heads": 2}, {"optim__clip": 2.0})[:2] == [
        "kuramoto",
        "kuramoto (model.heads=1, model.bound=coordinate)",
    ]


def test_labels_differ_whatever_the_keys():
    generator = np.random.default_rng(0)
    for _ in range(50):
        keys = ("model.layers", "model.heads", "optim.clip", "train.steps")
        picks = {tuple(generator.integers(1, 4, len(keys)).tolist()) for _ in range(8)}
        configs = [{"model.name": "kuramoto"} | dict(zip(keys, p, strict=True)) for p in picks]
        assert len(set(runs.labels(configs))) == len(configs)


# The paper's figures.


@pytest.mark.parametrize(
    ("params", "changes", "expected"),
    [
        (1_019_153, {}, "1.637 ± 0.010"),
        (1_100_000, {}, "1.637 ± 0.010"),
        (1_100_001, {}, ""),
        (899_999, {}, ""),
        (213_639, {}, ""),
        (5_088_561, {}, "mean 1.468, median 1.448 (5 seeds)"),
        (1_022_336, {"model__name": "transformer"}, "1.616 ± 0.004"),
        (5_070_080, {"model__name": "transformer"}, "mean 1.456, median 1.452 (5 seeds)"),
        (1_019_153, {"data__source": "file"}, ""),
        (1_019_153, {"model__gates": False}, ""),
        (1_019_153, {"model__feedforward": "none"}, ""),
    ],
)
def test_papers_figure_is_for_its_model_size_and_data(tmp_path, capsys, params, changes, expected):
    changes = {"data__source": "enwik8"} | changes
    make_run(tmp_path / "runs" / "a", params=params, **changes)
    _, results, _ = reported(tmp_path, capsys)
    assert [line["paper_val_bpc"] for line in results] == [expected]


# Runs that do not count.


def break_config(run):
    (run / "config.json").write_text('{"seed": 0, "model"')


def break_key(run):
    rewrite(run / "config.json", modle={})


def break_summary(run):
    (run / "summary.json").write_text("")


def lose_score(run):
    rewrite(run / "summary.json", val_bpc=None)


def diverge(run):
    rewrite(run / "summary.json", test_bpc=math.nan)


def lose_environment(run):
    (run / "environment.json").unlink()


def lose_hash(run):
    rewrite(run / "environment.json", data={})


def break_metrics(run):
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")


def stop_early(run):
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text('{"step": 4, "train_loss": 1.0}\n{"step": 5, "tr')


def never_begin(run):
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").unlink()


def want_more_steps(run):
    rewrite(run / "summary.json", steps=9)


def have_more_steps(run):
    rewrite(run / "summary.json", steps=11)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_config, "damaged: config.json"),
        (break_key, "damaged: config.json: modle: unknown key"),
        (break_summary, "damaged: summary.json"),
        (lose_score, "damaged: summary.json has no number val_bpc"),
        (diverge, "damaged: summary.json has test_bpc=nan"),
        (lose_environment, "damaged: environment.json: No such file"),
        (lose_hash, "damaged: environment.json lacks"),
        (break_metrics, "damaged: metrics.jsonl"),
        (stop_early, "unfinished: at step 4 of 10 (no summary.json)"),
        (never_begin, "unfinished: at step 0 of 10 (no summary.json)"),
        (want_more_steps, "unfinished: at step 9 of 10"),
        (have_more_steps, "damaged: summary.json is of 11 steps, config.json of 10"),
    ],
)
def test_unfinished_or_damaged_run_is_named_and_left_out(tmp_path, capsys, damage, words):
    make_run(tmp_path / "runs" / "good", 2.0)
    bad = make_run(tmp_path / "runs" / "bad", 9.0, seed=1)
    damage(bad)
    printed, results, lines = reported(tmp_path, capsys)
    assert [(line["seeds"], line["val_bpc_mean"]) for line in results] == [("1", "2.0")]
    assert f"- `{bad}`: {words}" in printed
    assert f"- `{bad}`: {words}" in (tmp_path / "out" / "report.md").read_text()
    (line,) = (line for line in lines if line["left_out"])
    assert line["run"] == str(bad)
    assert line["left_out"].startswith(words)
    assert line["val_bpc"] == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sha": "b" * 64}, "data sha256 is bbbbbbbbbbbb..., not aaaaaaaaaaaa..."),
        ({"data__split": (0.8, 0.1, 0.1)}, "data.split is (0.8, 0.1, 0.1), not (0.9, 0.05, 0.05)"),
        ({"data__window": 32}, "data.window is 32, not 16"),
    ],
)
def test_run_that_cannot_be_compared_is_named_and_left_out(tmp_path, capsys, changes, words):
    odd = make_run(tmp_path / "runs" / "a", 9.0, **changes)
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"b{seed}", 2.0, seed=seed)
    printed, results, _ = reported(tmp_path, capsys)
    assert [(line["seeds"], line["val_bpc_mean"]) for line in results] == [("2", "2.0")]
    assert f"- `{odd}`: not comparable: {words}\n" in printed


def test_of_equal_sets_the_first_given_is_the_reference(tmp_path, capsys):
    first = make_run(tmp_path / "z", 2.0)
    second = make_run(tmp_path / "a", 3.0, sha="b" * 64)
    for order in ((first, second), (second, first)):
        printed, results, _ = reported(tmp_path, capsys, *map(str, order))
        assert results[0]["val_bpc_mean"] == ("2.0" if order[0] is first else "3.0")
        assert f"- `{order[1]}`: not comparable" in printed


def test_split_of_enwik8_is_its_own_whatever_the_key(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", data__source="enwik8", data__split=(0.5, 0.25, 0.25))
    make_run(tmp_path / "runs" / "b", seed=1, data__split=(0.9, 0.05, 0.05))
    _, results, _ = reported(tmp_path, capsys)
    assert [line["seeds"] for line in results] == ["2"]


def test_repeated_seed_counts_once(tmp_path, capsys):
    first = make_run(tmp_path / "runs" / "a", 2.0)
    second = make_run(tmp_path / "runs" / "b", 2.25)
    printed, results, _ = reported(tmp_path, capsys)
    assert [(line["seeds"], line["val_bpc_mean"]) for line in results] == [("1", "2.0")]
    assert f"- `{second}`: repeats the configuration and seed 0 of {first} " in printed
    assert "2.2500 bpc here, 2.0000 there" in printed


def test_finished_repeat_of_an_unfinished_run_counts(tmp_path, capsys):
    stop_early(make_run(tmp_path / "runs" / "a", 2.0))
    make_run(tmp_path / "runs" / "b", 2.25)
    _, results, _ = reported(tmp_path, capsys)
    assert [(line["seeds"], line["val_bpc_mean"]) for line in results] == [("1", "2.25")]


def test_directory_given_twice_is_one_run(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "runs" / "deep" / "a")
    make_run(tmp_path / "runs" / "deep" / "a" / "checkpoints" / "inner", seed=1)
    monkeypatch.chdir(tmp_path)
    argv = ("runs", "runs/deep/a", str(tmp_path / "runs" / "deep" / ".." / "deep"))
    printed, results, _ = reported(tmp_path, capsys, *argv)
    assert [line["seeds"] for line in results] == ["1"]
    assert "Left out" not in printed


# Files.


def test_report_is_the_same_every_time(tmp_path, capsys, drawn):
    for seed in range(3):
        make_run(tmp_path / "runs" / f"k{seed}", 2.0 + seed / 10, seed=seed)
        make_run(tmp_path / "runs" / f"h{seed}", 2.2 + seed / 30, seed=seed, model__heads=1)
    make_run(tmp_path / "runs" / "t", model__name="transformer", params=1_000_000)
    stop_early(make_run(tmp_path / "runs" / "u", seed=9))
    contents = []
    for _ in range(2):
        reported(tmp_path, capsys)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
        shutil.rmtree(tmp_path / "out")
    assert contents[0].keys() == FILES
    assert contents[0] == contents[1]
    for name, content in contents[0].items():
        if name.endswith(".png"):
            assert content.startswith(PNG)
        if name.endswith(".svg"):
            assert b"<svg" in content
            assert b"dc:date" not in content
            assert (
                f"![{report.PLOTS[name[:-4]]}]({name[:-4]}.png)".encode()
                in contents[0]["report.md"]
            )


def test_report_replaces_one_that_is_there(tmp_path, capsys, drawn):
    make_run(tmp_path / "runs" / "a", 2.0)
    reported(tmp_path, capsys)
    make_run(tmp_path / "runs" / "b", 3.0, seed=1)
    _, results, _ = reported(tmp_path, capsys)
    assert [line["val_bpc_mean"] for line in results] == ["2.5"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


def test_run_without_validations_still_counts(tmp_path, capsys):
    (make_run(tmp_path / "runs" / "a") / "metrics.jsonl").unlink()
    _, results, _ = reported(tmp_path, capsys)
    assert [line["val_bpc_mean"] for line in results] == ["2.0"]


def test_curve_is_over_the_steps_that_all_seeds_have(tmp_path):
    a, b = (make_run(tmp_path / name, val, seed=val) for name, val in (("a", 2), ("b", 4)))
    for run, steps in ((a, {4: 8.0, 5: 3.0, 10: 2.0}), (b, {2: 9.0, 5: 6.0, 10: 4.0})):
        rows = [{"step": step, "val_bpc": val} for step, val in steps.items()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = runs.group([runs.read(a), runs.read(b)])
    assert group.curves() == {5 * 256: [3.0, 6.0], 10 * 256: [2.0, 4.0]}
    (axes,) = plots.learning_curves([group]).axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1280, 4.5], [2560, 3.0]])


def test_labels_beside_a_plot_do_not_overlap():
    generator = np.random.default_rng(0)
    for count in range(1, 12):
        wanted = np.sort(generator.uniform(0, 1, count))
        heights = generator.uniform(0.03, 0.08, count)
        placed = plots._apart(wanted.tolist(), heights.tolist())
        assert np.all(np.diff(placed) >= (heights[1:] + heights[:-1]) / 2 - 1e-9)
        assert placed[0] >= -1e-9
        assert placed[-1] <= 1 + 1e-9
    assert plots._apart([0.2, 0.5, 0.5, 0.9], [0.1] * 4) == pytest.approx([0.2, 0.45, 0.55, 0.9])


# Refusals.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["RUN"]),
        (["runs"], ["--out"]),
        (["runs", "--out="], ["--out"]),
        (["--out=out"], ["RUN"]),
        (["missing", "--out=out"], ["missing", "does not exist"]),
        (["runs", "missing", "--out=out"], ["missing", "does not exist"]),
        (["text", "--out=out"], ["text", "file"]),
        (["empty", "--out=out"], ["empty", "config.json"]),
        (["runs", "--out=text"], ["text", "file"]),
        (["runs", "--out=runs/a"], ["runs/a", "run"]),
        (["runs", "--oot=out"], ["oot"]),
        (["unfinished", "--out=out"], ["no run is finished", "step 4 of 10", "1 more"]),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")
    for name in ("a", "b"):
        stop_early(make_run(tmp_path / "unfinished" / name))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert report.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err
    assert sorted(tmp_path.rglob("*")) == before


def test_help_says_what_the_command_takes(capsys):
    assert report.main(["--help"]) == 0
    assert "--out=DIR" in capsys.readouterr().out
