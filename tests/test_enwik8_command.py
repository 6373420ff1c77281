"""The training command: what it writes, what it refuses and how, and what kills it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import enwik8
from kuramoto_jax import train
from kuramoto_jax.config import Config, options

ROOT = Path(__file__).resolve().parents[1]
TRAINING = {"step", "train_loss", "train_bpc", "lr", "grad_norm", "tokens_per_second"}
SUMMARY = {"params", "val_bpc", "test_bpc", "best_step", "tokens", "seconds"}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam mixes a Python float with an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory: a corpus, and a configuration file that trains on it."""
    monkeypatch.chdir(tmp_path)
    # ml_collections loads every configuration file into one module, over what was there.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    content = "".join(np.random.default_rng(0).choice(list("aé\n"), 2500))
    (tmp_path / "corpus.bin").write_bytes(content.encode())
    (tmp_path / "tiny.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from kuramoto_jax.config import Config\n"
        "def get_config():\n"
        "    c = ConfigDict(Config().to_dict())\n"
        "    c.model.update(name='transformer', layers=1, width=8, heads=2, hidden=8)\n"
        "    c.data.update(source='file', path='corpus.bin', window=16, split=(0.8, 0.1, 0.1))\n"
        "    c.train.update(steps=6, batch_size=4, eval_batch_size=8, log_every=2)\n"
        "    c.train.update(eval_every=3, checkpoint_every=2, sample_length=8)\n"
        "    return c\n"
    )
    return tmp_path


@pytest.fixture
def no_training(monkeypatch):
    """Returns the list of configurations that would have been trained."""
    calls = []
    monkeypatch.setattr(enwik8, "fit", lambda config, *_, **__: calls.append(config))
    return calls


def refused(capsys, *argv, code=2):
    """Returns the one line that a refused command prints; it must leave no run behind."""
    before = sorted(Path().rglob("*"))
    assert enwik8.main(list(argv)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert "Traceback" not in err
    ours = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    assert [path for path in ours if path not in before] == []
    return err


# Whole runs.


def test_a_run_leaves_what_is_promised(folder, capsys):
    argv = ["--config=tiny.py", "--workdir=out", "--config.seed=3", "--config.train.steps=7"]
    assert enwik8.main(argv) == 0
    out, err = capsys.readouterr()
    assert "\r" not in out
    assert str(folder / "out") in out
    assert err == ""
    run = folder / "out"
    config = Config.from_mapping(json.loads((run / "config.json").read_text()))
    assert (config.seed, config.train.steps, config.model.width) == (3, 7, 8)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__
    assert str(len(jax.devices())) in environment["device"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = {"train_loss": [], "val_bpc": [], "test_bpc": []}
    for row in rows:
        (kind,) = kinds.keys() & row.keys()
        kinds[kind].append(row["step"])
        assert kind != "train_loss" or row.keys() == TRAINING
    assert kinds == {"train_loss": [2, 3, 4, 6, 7], "val_bpc": [3, 6, 7], "test_bpc": [7]}
    assert list((run / "tensorboard").glob("events.*"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["tokens"] == 7 * 4 * 16
    assert summary["best_step"] in (3, 6, 7)
    stored = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert stored == sorted({6, 7, summary["best_step"]})

    assert enwik8.main(argv) == 0
    assert "finished at step 7" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text()) == summary
    argv[2] = "--config.seed=4"
    assert "seed" in refused(capsys, *argv)


def test_failed_run_has_its_own_exit_code(folder, capsys, monkeypatch):
    def fail(*_, **__):
        raise train.TrainError("step 3: loss nan")

    monkeypatch.setattr(enwik8, "fit", fail)
    assert "step 3" in refused(capsys, "--config=tiny.py", code=1)


# Arguments that are understood.


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("--config.optim.learning_rate=1", "optim.learning_rate", 1.0),
        ("--config.optim.learning_rate=1e-3", "optim.learning_rate", 1e-3),
        ("--config.train.tensorboard=False", "train.tensorboard", False),
        ("--config.train.tensorboard=false", "train.tensorboard", False),
        ("--config.train.tensorboard=0", "train.tensorboard", False),
        ("--config.train.tensorboard=True", "train.tensorboard", True),
        ("--noconfig.train.tensorboard", "train.tensorboard", False),
        ("--config.data.split=(0.8,0.1,0.1)", "data.split", (0.8, 0.1, 0.1)),
        ("--config.data.path=a=b.txt", "data.path", "a=b.txt"),
        ("--config.model.name=transformer", "model.name", "transformer"),
        ("-config.seed=5", "seed", 5),
    ],
)
@pytest.mark.parametrize("space", [False, True])
def test_values_keep_their_type(folder, no_training, argument, key, value, space):
    argv = ["--config=tiny.py", argument]
    if space and "tensorboard" not in argument:  # absl's booleans need the equals sign
        argv = [part for word in argv for part in word.split("=", 1)]
    assert enwik8.main(argv) == 0
    group, _, name = key.rpartition(".")
    found = getattr(getattr(no_training[0], group) if group else no_training[0], name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("extra", [[], ["--config.train.steps=5", "--config.seed=2"]])
def test_config_file_may_leave_keys_out(folder, no_training, extra):
    Path("short.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(): return ConfigDict({'train': {'batch_size': 8}})\n"
    )
    assert enwik8.main(["--config=short.py", *extra]) == 0
    assert no_training[0].train.batch_size == 8
    assert no_training[0].train.steps == (5 if extra else Config().train.steps)


@pytest.mark.parametrize("order", [1, -1])
def test_flag_file(folder, no_training, order):
    lines = ["--config=tiny.py", "--config.train.steps=5"][::order]
    Path("flags.txt").write_text("\n".join(lines))
    assert enwik8.main(["--flagfile=flags.txt"]) == 0
    assert no_training[0].train.steps == 5


# Arguments that are refused.


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.model.num_layer=3", ["model.num_layer", "unknown"]),
        ("--config.model.layer=3", ["model.layer", "model.layers"]),
        ("--config.modle.width=3", ["modle.width", "model.width"]),
        ("--config.learning_rate=3", ["learning_rate", "optim.learning_rate"]),
        ("--config.train=3", ["train", "unknown"]),
        ("--config.train.steps=10.5", ["train.steps", "10.5"]),
        ("--config.train.steps=1e3", ["train.steps", "1e3"]),
        ("--config.train.steps=", ["train.steps"]),
        ("--config.train.steps=0", ["train.steps", "0"]),
        ("--config.train.steps=-1", ["train.steps", "-1"]),
        ("--config.optim.learning_rate=abc", ["optim.learning_rate", "abc"]),
        ("--config.optim.learning_rate=nan", ["optim.learning_rate", "nan"]),
        ("--config.optim.learning_rate=inf", ["optim.learning_rate", "inf"]),
        ("--config.seed=1.5", ["seed", "1.5"]),
        ("--config.seed=-1", ["seed", "-1"]),
        ("--config.seed=99999999999", ["seed", "99999999999"]),
        ("--config.train.tensorboard=maybe", ["train.tensorboard", "maybe"]),
        ("--config.train.batch_size=0", ["train.batch_size", "0"]),
        ("--config.train.batch_size=6", ["train.batch_size=6", "4 or 8"]),
        ("--config.model.heads=3", ["model.width=8", "model.heads=3", "6 or 9"]),
        ("--config.model.name=kuramotto", ["model.name", "kuramoto", "transformer"]),
        ("--config.model.dtype=fp16x", ["model.dtype", "float32", "bfloat16"]),
        ("--config.data.split=(0.8,0.1)", ["data.split"]),
        ("--config.data.split=(0.8,0.1,0.2)", ["data.split", "1"]),
        ("--config.data.split=0.8", ["data.split"]),
        ("--config.data.source=wikitext", ["data.source", "enwik8", "stdlib", "file"]),
        ("--config.data.path=", ["data.path"]),
        ("--config.data.path=missing.txt", ["data.path", "missing.txt"]),
        ("--config.data.path=empty.txt", ["data.path", "empty.txt", "empty"]),
        ("--config.data.path=short.txt", ["data.window", "short.txt", "16"]),
        ("--config.data.path=.", ["data.path", "directory"]),
        ("--config.data.window=100000", ["data.window", "100000"]),
        ("--config.model.symbols=100", ["model.symbols"]),
        ("--confg=x", ["confg", "config"]),
        ("--wrkdir=x", ["wrkdir", "workdir"]),
        ("tiny.py", ["tiny.py"]),
        ("steps=5", ["steps=5"]),
    ],
)
def test_bad_argument_is_one_line(folder, capsys, argument, words):
    Path("empty.txt").write_bytes(b"")
    Path("short.txt").write_bytes(b"0123456789abcde")
    line = refused(capsys, "--config=tiny.py", argument)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--config", "required"]),
        (["--config"], ["--config", "required"]),
        (["--config="], ["--config", "required"]),
        (["tiny.py"], ["--config", "required"]),
        (["--config=none.py"], ["none.py", "no such file"]),
        (["--config=."], ["directory"]),
        (["--config=corpus.bin"], ["--config"]),
        (["--config=without.py"], ["get_config"]),
        (["--config=syntax.py"], ["SyntaxError"]),
        (["--config=raises.py"], ["out of cheese"]),
        (["--config=silent.py"], ["ValueError"]),
        (["--config=exits.py"], ["--config"]),
        (["--config=returns.py"], ["get_config"]),
        (["--config=text.py"], ["train.steps", "'many'"]),
        (["--config=extra.py"], ["train.stepz", "train.steps"]),
        (["--config=group.py"], ["train", "group"]),
    ],
)
def test_bad_config_file_is_one_line(folder, capsys, argv, words):
    files = {
        "without": "x = 1",
        "syntax": "def get_config(:\n    pass",
        "raises": "def get_config():\n    raise RuntimeError('first\\nout of cheese')",
        "silent": "def get_config():\n    raise ValueError",
        "exits": "def get_config():\n    raise SystemExit",
        "returns": "def get_config():\n    return None",
        "text": "get_config = lambda: ConfigDict({'train': {'steps': 'many'}})",
        "extra": "get_config = lambda: ConfigDict({'train': {'stepz': 1}})",
        "group": "get_config = lambda: ConfigDict({'train': 5})",
    }
    for name, text in files.items():
        Path(f"{name}.py").write_text("from ml_collections import ConfigDict\n" + text)
    line = refused(capsys, *argv)
    for word in words:
        assert word in line


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_damaged_run_is_one_line(folder, capsys, content):
    Path("out").mkdir()
    Path("out", "config.json").write_text(content)
    assert "out" in refused(capsys, "--config=tiny.py", "--workdir=out")
    assert Path("out", "config.json").read_text() == content


@pytest.mark.parametrize("workdir", ["corpus.bin", "corpus.bin/run"])
def test_workdir_in_the_way_is_one_line(folder, capsys, workdir):
    argv = ["--config=tiny.py", f"--workdir={workdir}"]
    before = sorted(folder.rglob("*"))
    assert enwik8.main(argv) in (1, 2)
    assert re.fullmatch(r"error: [^\n]*corpus\.bin[^\n]*\n", capsys.readouterr().err)
    assert [p for p in folder.rglob("*") if p not in before and "__pycache__" not in str(p)] == []


# Help.


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--helpfull"], ["--config=x", "--help"]])
def test_help_lists_every_key(folder, capsys, argv):
    assert enwik8.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "python -m experiments.enwik8 --config=" in out
    for key, field in options().items():
        assert f"--config.{key}={field.default!r}" in out
        assert field.metadata["help"] in out


# As a process.


def start(folder, *argv, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.enwik8", *argv],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONIOENCODING": "utf-8"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_killed_process_resumes_to_the_same_end(folder):
    """Also on a console that knows ASCII alone, with a sample of other characters."""
    argv = ["--config=tiny.py", "--config.train.steps=400", "--config.train.eval_every=200"]
    argv += ["--config.train.checkpoint_every=20", "--config.train.log_every=20"]
    whole = start(folder, *argv, "--workdir=whole", PYTHONIOENCODING="ascii")
    out, err = whole.communicate(timeout=300)
    assert (whole.returncode, err) == (0, "")
    assert "\\xe9" in out

    killed = start(folder, *argv, "--workdir=parts")
    metrics, deadline = folder / "parts" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (folder / "parts" / "summary.json").exists()

    again = start(folder, *argv, "--workdir=parts")
    out, err = again.communicate(timeout=300)
    assert (again.returncode, err) == (0, "")
    assert "resumed from step" in out
    ends = []
    for run in ("whole", "parts"):
        rows = [json.loads(x) for x in (folder / run / "metrics.jsonl").read_text().splitlines()]
        ends.append(
            [{k: row[k] for k in row if k not in ("seconds", "tokens_per_second")} for row in rows]
        )
    assert ends[0] == ends[1]


def test_bad_input_of_a_process_is_one_line(folder):
    process = start(folder, "--config=tiny.py", "--config.train.stepz=3")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]*train\.steps[^\n]*\n", err)
    assert not (folder / "runs").exists()
