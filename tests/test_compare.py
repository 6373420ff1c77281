"""The comparison command: its rows, its seeds, and the report at its end."""

import csv
import re
from pathlib import Path

import pytest

from experiments import compare

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def other(folder):
    """A second configuration file, of the baseline."""
    text = (
        (folder / "tiny.py")
        .read_text()
        .replace("    return c", "    c.model.name = 'transformer'\n    return c")
    )
    (folder / "other.py").write_text(text)


@pytest.mark.usefixtures("other")
def test_each_file_is_a_row_with_its_seeds_and_overrides(untrained):
    flags = ["--configs=tiny.py,other.py", "--seeds=2", "--config.seed=5", "--workdir=both"]
    assert compare.main([*flags, "--config.train.steps=8"]) == 0
    assert [
        (run, config.model.name, config.seed, config.train.steps) for run, config in untrained
    ] == [
        ("both/tiny/seed_5", "kuramoto", 5, 8),
        ("both/tiny/seed_6", "kuramoto", 6, 8),
        ("both/other/seed_5", "transformer", 5, 8),
        ("both/other/seed_6", "transformer", 6, 8),
    ]
    with Path("both/report/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Made-up scores are 2 + seed.
    assert {row["model"] for row in rows} == {"kuramoto", "transformer"}
    assert [float(row["val_bpc_mean"]) for row in rows] == [7.5, 7.5]


def test_arguments_of_files_tell_rows_apart():
    tiny = Path("tiny.py").read_text()
    Path("sized.py").write_text(
        tiny.replace("get_config()", "get_config(width)").replace("width=8", "width=int(width)")
    )
    rows, workdir = compare.parse(["--configs=sized.py:8,sized.py:16", "--seeds=1"])
    assert {name: configs[0].model.width for name, configs in rows.items()} == {
        "sized_8": 8,
        "sized_16": 16,
    }
    assert workdir == Path("runs/compare")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--configs=FILE,FILE...: is required"),
        (["--configs=missing.py"], "missing.py"),
        (["--configs=tiny.py,tiny.py"], "a row tiny already"),
        (["--configs=tiny.py", "--seeds=0"], "seeds"),
        (["--configs=tiny.py", "--config.model.widht=8"], "model.widht: unknown key"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(untrained, capsys, flags, words):
    assert compare.main(flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert re.fullmatch(r"error: [^\n]*\n", error)
    assert not untrained
    assert not Path("runs").exists()
