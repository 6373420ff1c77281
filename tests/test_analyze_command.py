"""The command that analyses a finished run."""

import contextlib
import dataclasses
import io
import json
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import pytest
import tiny_run

from experiments import analyze
from kuramoto_jax import analysis
from kuramoto_jax.baselines import build
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.train import load_run

CONTENT = b"".join(b"cat %d sat on the mat. " % number for number in range(200))
WINDOW = 16
FIGURES = ("phases", "order", "coupling", "omega", "dynamics")
QUICK = {"xla_backend_optimization_level": 0}  # compile fast, run slowly
TEXT = bytes(range(8, 128, 7)) + b"$\\x$ \n\t\xff" + bytes(200)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps on a short text; to be read only."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_bytes(TEXT)
    sizes = ("model.layers=2", "model.width=8", "model.heads=2", "model.hidden=8")
    return tiny_run.train(folder, CONTENT, WINDOW, *sizes, "model.unroll=1")


def analysed(run, *flags):
    """Runs the command with few repeats and returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert analyze.main([f"--workdir={run}", "--repeats=3", *flags]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def out(run):
    """The analysis of the text of any bytes."""
    folder = run.parent / "new" / "out"
    printed = analysed(run, f"--text={run.parent / 'text'}", f"--out={folder}")
    assert printed.count("\n") == 1
    assert f"the first {WINDOW} bytes of text, cut to the run's window" in printed
    return folder


def report_in(folder):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads((folder / "analysis.json").read_text(), parse_constant=refuse)


def test_all_files_are_there_and_whole(out):
    figures = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == {"analysis.json", "analysis.md"} | figures
    for name in FIGURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert xml.etree.ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg")


def test_numbers_are_those_of_the_run_on_the_text(run, out):
    config, _, params, step = load_run(run)
    found = report_in(out)
    trace = analysis.trace(config.model, params, jnp.asarray(list(TEXT[:WINDOW]), jnp.int32))
    assert (found["step"], found["tokens"]) == (step, WINDOW)
    assert found["layers"] == analysis.layer_statistics(config.model, trace)
    assert len(found["depth"]["order"]) == 3
    assert found["dynamics"]["times"] == [0, 1, 2, 3]
    assert found["dynamics"]["tokens"] == WINDOW
    cases = [(row["layer"], row["variant"], row["mask"]) for row in found["dynamics"]["runs"]]
    assert len(set(cases)) == len(cases) == 2 * 2 * 2
    for row in found["dynamics"]["runs"]:
        assert row["order"][0] == pytest.approx(found["depth"]["order"][row["layer"]], rel=1e-5)
        assert row["clusters"][0] == found["depth"]["clusters"][row["layer"]]
        assert len(row["order"]) == len(row["clusters"]) == 4


def test_tables_have_the_numbers(out):
    lines = (out / "analysis.md").read_text().splitlines()
    for layer in report_in(out)["layers"]:
        for head in layer["heads"]:
            cells = f"| {layer['layer']} | {head['head']} | {head['tau']:.3f} | {head['order']:.3f}"
            assert sum(line.startswith(cells) for line in lines) == 1
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100


def stand_in(run, monkeypatch, **model):
    """Replaces the run's model by an untrained one of another kind."""
    config = load_run(run)[0]
    sizes = {"layers": 1, "width": 8, "heads": 2, "hidden": 8}
    config = dataclasses.replace(config, model=ModelConfig(**sizes, **model))
    init = jax.jit(build(config.model).init, compiler_options=QUICK)
    params = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    monkeypatch.setattr(analyze, "load_run", lambda workdir: (config, None, params, 7))


def test_validation_text_into_the_runs_directory_without_what_the_model_lacks(run, monkeypatch):
    monkeypatch.setattr(analysis, "DYNAMICS_TOKENS", 5)
    lacks = {"gates": False, "value_gate": False, "drift": "none"}
    stand_in(run, monkeypatch, **lacks, bound="none", feedforward="none")
    assert "validation split" in analysed(run)
    found = report_in(run / "analysis")
    cut = len(CONTENT) * 9 // 10
    assert found["text"].encode() == CONTENT[cut : cut + WINDOW]
    assert found["dynamics"]["tokens"] == 5
    assert not list((run / "analysis").glob("omega*"))
    assert found["layers"][0]["heads"][0]["value_gate"] is None
    assert " | - | - | - | - | - |\n" in (run / "analysis" / "analysis.md").read_text()


def refused(capsys, *flags):
    """Runs the command on bad input and returns its one line."""
    assert analyze.main(flags) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--workdir"),
        (["--workdir=/nowhere/at/all"], "workdir"),
        (["--workdir=RUN", "--text=RUN/nowhere"], "--text=RUN/nowhere: cannot be read (No such"),
        (["--workdir=RUN", "--text=RUN"], "--text=RUN: cannot be read (Is a directory)"),
        (["--workdir=RUN", "--text=EMPTY"], "has 0 bytes; must have at least 2"),
        (["--workdir=RUN", "--text=ONE"], "--text=ONE: has 1 bytes; must have at least 2"),
        (["--workdir=RUN", "--out=ONE"], "--out=ONE: is a file"),
        (["--workdir=RUN", "--repeats=0"], "repeats"),
        (["--workdir=RUN", "--texts=x"], "texts"),
        (["--workdir=RUN", "word"], "word"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line(run, tmp_path, capsys, flags, words):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one").write_bytes(b"a")
    places = {"RUN": run, "EMPTY": tmp_path / "empty", "ONE": tmp_path / "one"}
    for name, place in places.items():
        flags = [flag.replace(name, str(place)) for flag in flags]
        words = words.replace(name, str(place))
    assert words in refused(capsys, f"--out={tmp_path / 'out'}", *flags)
    assert not (tmp_path / "out").exists()


def test_a_transformer_is_refused(run, tmp_path, capsys, monkeypatch):
    stand_in(run, monkeypatch, name="transformer")
    error = refused(capsys, f"--workdir={run}", f"--out={tmp_path / 'out'}")
    assert "model.name='transformer'" in error
    assert not (tmp_path / "out").exists()


def test_a_byte_without_symbol_is_refused(run, tmp_path, capsys, monkeypatch):
    stand_in(run, monkeypatch, symbols=100)
    flags = [f"--text={run.parent / 'text'}", f"--out={tmp_path / 'out'}"]
    assert "byte 113" in refused(capsys, f"--workdir={run}", *flags)


def test_help_names_the_flags(capsys):
    assert analyze.main(["--help"]) == 0
    assert "--workdir" in capsys.readouterr().out
