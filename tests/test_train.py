"""The training loop: steps, batches, evaluation, and a run directory that survives what it meets.

The loop knows a model through `build` alone. Where the loop and not the network is under test, a
small stand-in takes the model's place.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import shutil
import signal
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kuramoto_jax import data, optim, sharding, train
from kuramoto_jax.baselines import build
from kuramoto_jax.checkpoint import Checkpoints
from kuramoto_jax.config import Config, ConfigError, ModelConfig

MODELS = ("kuramoto", "transformer")
WINDOW = 16


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam mixes a Python float with an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def corpus_path(tmp_path_factory):
    """4000 bytes of few symbols, byte 0 among them."""
    symbols = np.array([0, 1, 65, 255], np.uint8)
    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    path.write_bytes(np.random.default_rng(0).choice(symbols, 4000, p=[0.4, 0.3, 0.2, 0.1]))
    return path


class StandIn(nn.Module):
    """Logits from the current byte and the mean over the bytes so far."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 8, embedding_init=nn.initializers.normal(1.0))(tokens)
        count = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)[None, :, None]
        x = x + jnp.cumsum(x, axis=1) / count
        return nn.Dense(256, use_bias=False)(x)


def stand_in_logits(params, context):
    """The stand-in's logits after a context, in float64 NumPy."""
    table = np.asarray(params["Embed_0"]["embedding"], np.float64)[context]
    return (table[-1] + table.mean(0)) @ np.asarray(params["Dense_0"]["kernel"], np.float64)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(train, "build", StandIn)


@pytest.fixture(scope="module")
def whole_run(corpus_path, tmp_path_factory):
    """An uninterrupted run of the stand-in with the default configuration; to be read only."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(train, "build", StandIn)
        train.fit(make_config(corpus_path), workdir, log=quiet)
    return workdir


@pytest.fixture
def finished(whole_run, tmp_path):
    """A copy of that run, to be changed."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def quiet(line):
    pass


def make_config(path, name="transformer", *, learning_rate=1e-2, window=WINDOW, seed=0, **options):
    defaults = {
        "steps": 20,
        "batch_size": 4,
        "eval_batch_size": 8,
        "log_every": 4,
        "eval_every": 10,
        "checkpoint_every": 13,
        "keep": 9,
        "sample_length": 0,
        "tensorboard": False,
    }
    return Config.from_mapping(
        {
            "seed": seed,
            "model": {"name": name, "layers": 1, "width": 8, "heads": 2, "hidden": 16},
            "data": {
                "source": "file",
                "path": str(path),
                "window": window,
                "split": (0.8, 0.1, 0.1),
            },
            "optim": {"learning_rate": learning_rate},
            "train": defaults | options,
        }
    )


def first_devices(count):
    return Mesh(np.asarray(jax.devices()[:count]), ("data",))


def assert_same(a, b):
    """The same tree structure, types and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def timeless(row):
    return {k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")}


def stored_steps(workdir):
    checkpoints = Checkpoints(workdir / "checkpoints", 100)
    steps = checkpoints.steps()
    checkpoints.close()
    return steps


def stored_state(workdir, config, step):
    checkpoints = Checkpoints(workdir / "checkpoints", 100)
    state = train.init_state(config, sharding.make_mesh())
    state = train._restore(checkpoints, step, state)
    checkpoints.close()
    return state


def assert_same_run(a, b, config):
    """Two directories hold one run: state, scores and rows, each row once."""
    assert stored_steps(a) == stored_steps(b)
    for step in stored_steps(a):
        assert_same(stored_state(a, config, step), stored_state(b, config, step))
    assert [timeless(row) for row in rows_of(a)] == [timeless(row) for row in rows_of(b)]
    a, b = (json.loads((x / "summary.json").read_text()) for x in (a, b))
    assert timeless(a) == timeless(b)


def on_line(prefix, action):
    """A log callback that acts once, at the first line that starts with `prefix`."""
    lines = []

    def log(line):
        seen = any(past.startswith(prefix) for past in lines)
        lines.append(line)
        if line.startswith(prefix) and not seen:
            action()

    log.lines = lines
    return log


class Crash(Exception):
    pass


def crash():
    raise Crash


def snapshot(folder):
    """Every path below a folder with its content."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


# One step.


def test_step_counts_and_lowers_the_loss(corpus_path):
    config = make_config(corpus_path, steps=60)
    model, mesh = build(config.model), first_devices(1)
    optimizer = optim.make_optimizer(config.optim, config.train.steps)
    step = jax.jit(functools.partial(train.train_step, model=model, optimizer=optimizer, at_once=2))
    state = train.init_state(config, mesh)
    assert state.step.dtype == jnp.int32
    windows = jnp.asarray(np.resize(np.arange(65, 75, dtype=np.uint8), (4, WINDOW + 1)))
    logits = model.apply({"params": state.params}, windows[:, :-1].astype(jnp.int32))
    logits = np.asarray(logits, np.float64).reshape(-1, 256)
    chosen = logits[np.arange(len(logits)), np.asarray(windows[:, 1:]).ravel()]
    by_hand = np.mean(np.log(np.exp(logits).sum(1)) - chosen)
    losses = []
    for count in range(30):
        assert int(state.step) == count
        state, metrics = step(state, windows)
        losses.append(float(metrics["loss"]))
        assert float(metrics["grad_norm"]) > 0
    assert losses[0] == pytest.approx(by_hand, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_gradient_norm_is_told_before_clipping(corpus_path):
    config = make_config(corpus_path)
    norms = []
    for clip in (0.0, 1e-3):
        optimizer = optim.make_optimizer(dataclasses.replace(config.optim, clip=clip), 20)
        step = functools.partial(
            train.train_step, model=StandIn(config.model), optimizer=optimizer, at_once=2
        )
        params = StandIn(config.model).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
        state = train.TrainState(jnp.zeros((), jnp.int32), params["params"], None)
        state = state.replace(opt_state=optimizer.init(state.params))
        _, metrics = jax.jit(step)(state, jnp.zeros((2, 5), jnp.uint8))
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == norms[1] > 1e-3


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_gradient_of_parts_is_that_of_the_batch(corpus_path, at_once):
    model = StandIn(make_config(corpus_path).model)
    windows = jax.random.randint(jax.random.key(1), (6, 9), 0, 256).astype(jnp.uint8)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]

    @functools.partial(jax.jit, static_argnames="at_once")
    def gradient(at_once):
        return train.mean_loss_and_gradient(params, windows, model=model, at_once=at_once)

    jax.tree.map(
        lambda part, whole: np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-7),
        gradient(at_once),
        gradient(6),
    )


@pytest.mark.parametrize(
    ("batch_size", "window", "microbatch", "devices", "expected"),
    [
        (32, 128, 0, 1, 4),
        (30, 128, 0, 1, 3),
        (6, 4096, 0, 1, 1),
        (2, 64, 0, 1, 2),
        (32, 128, 0, 4, 32),
        (32, 128, 16, 4, 16),
        (32, 128, 16, 1, 16),
    ],
)
def test_windows_at_once(corpus_path, batch_size, window, microbatch, devices, expected):
    config = make_config(corpus_path, batch_size=batch_size, microbatch=microbatch, window=window)
    assert train.windows_at_once(config, first_devices(devices)) == expected


# Batches, seeds, devices.


@pytest.mark.parametrize("devices", [1, 4])
def test_step_n_reads_batch_n(corpus_path, monkeypatch, stand_in, devices):
    def checksum(windows):
        weights = np.arange(1, windows.size + 1).reshape(windows.shape)
        return (windows.astype(jnp.int32) * weights).sum() % 1_000_003

    def step_fn(state, windows, **_):
        metrics = {"loss": checksum(windows).astype(jnp.float32), "grad_norm": jnp.float32(0)}
        return state.replace(step=state.step + 1), metrics

    monkeypatch.setattr(train, "train_step", step_fn)
    config, mesh = make_config(corpus_path, seed=7), first_devices(devices)
    corpus_N = data.read_file(corpus_path)[:3200]
    state, seen = train.init_state(config, mesh), []
    run_steps = train.make_train_steps(config, mesh)
    for count in (3, 1, 4, 2):
        state, metrics = run_steps(state, corpus_N, np.int32(count))
        loss = np.asarray(metrics["loss"])
        assert np.isnan(loss[count:]).all()
        seen += loss[:count].tolist()
    batches = [
        data.batch_at(jnp.asarray(corpus_N), 7, step, batch_size=4, window=WINDOW)
        for step in range(10)
    ]
    assert seen == [float(checksum(batch)) for batch in batches]
    assert len(set(seen)) == 10


@pytest.mark.parametrize(
    ("name", "counts", "microbatch"),
    [("stand-in", (1, 2, 4), 0), ("stand-in", (1, 4), 4), ("kuramoto", (1, 4), 0)],
)
def test_devices_change_nothing(corpus_path, monkeypatch, name, counts, microbatch):
    if name == "stand-in":
        monkeypatch.setattr(train, "build", StandIn)
    config = make_config(corpus_path, "kuramoto", batch_size=8, microbatch=microbatch)
    corpus_N = data.read_file(corpus_path)[:3200]
    results = []
    for devices in counts:
        mesh = first_devices(devices)
        state = train.init_state(config, mesh)
        first = jax.tree.map(np.asarray, state.params)
        _, metrics = train.make_train_steps(config, mesh)(state, corpus_N, np.int32(4))
        results.append((first, np.asarray(metrics["loss"])))
    assert np.isfinite(results[0][1]).all()
    for first, losses in results[1:]:
        assert_same(first, results[0][0])
        np.testing.assert_allclose(losses, results[0][1], atol=1e-5, rtol=0)


def test_seed_sets_the_initial_parameters(corpus_path, stand_in):
    def params(seed):
        return train.init_state(make_config(corpus_path, seed=seed), first_devices(1)).params

    assert_same(params(3), params(3))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params(3), params(4))
    assert all(jax.tree.leaves(changed))


# Evaluation.


def bits_by_hand(params, text, window, stride):
    """Each byte but the first alone, with the context that windows `stride` apart give it."""
    nats = 0.0
    for target in range(1, len(text)):
        start = stride * max(0, -(-(target - window) // stride))
        logits = stand_in_logits(params, text[start:target])
        nats += np.log(np.exp(logits).sum()) - logits[text[target]]
    return nats / math.log(2) / (len(text) - 1)


@pytest.fixture(scope="module")
def stand_in_params():
    model = StandIn(ModelConfig())
    return model.init(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]


def evaluator(stride, batch_size, mesh=None, model=None):
    return train.Evaluator(
        model or StandIn(ModelConfig()),
        window=WINDOW,
        stride=stride,
        batch_size=batch_size,
        mesh=mesh or first_devices(1),
    )


def text_of(length):
    """Bytes whose rarest symbol is the last: padding with it would show."""
    text = np.random.default_rng(length).choice(np.array([0, 0, 0, 7, 200], np.uint8), length)
    text[-1] = 255
    return text


@pytest.mark.parametrize("stride", [WINDOW, 8, 5, 1])
def test_evaluation_is_a_plain_sum_over_bytes(stand_in_params, stride):
    scores = evaluator(stride, 8)
    for length in (2, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 1, 100, 641):
        text = text_of(length)
        by_hand = bits_by_hand(stand_in_params, text, WINDOW, stride)
        assert scores(stand_in_params, text) == pytest.approx(by_hand, abs=1e-5), length


@pytest.mark.parametrize("stride", [WINDOW, 5])
def test_evaluation_does_not_depend_on_batch_or_devices(stand_in_params, stride):
    text = text_of(1003)
    by_hand = bits_by_hand(stand_in_params, text, WINDOW, stride)
    for batch_size in (1, 3, 8, 64):
        for devices in (1, 2, 4):
            score = evaluator(stride, batch_size, first_devices(devices))
            assert score(stand_in_params, text) == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize("windows", [1, 2, 50])
def test_equal_logits_give_eight_bits(windows):
    class Uniform(nn.Module):
        def __call__(self, tokens):
            return jnp.zeros((*tokens.shape, 256))

    score = evaluator(WINDOW, 4, model=Uniform())
    assert score({}, text_of(windows * WINDOW + 1)) == pytest.approx(8.0, abs=1e-5)


def test_evaluate_scores_windows_end_to_end_by_default(stand_in_params):
    text, model = text_of(100), StandIn(ModelConfig())
    for stride in (None, 4):
        score = train.evaluate(model, stand_in_params, text, window=WINDOW, stride=stride)
        by_hand = bits_by_hand(stand_in_params, text, WINDOW, stride or WINDOW)
        assert score == pytest.approx(by_hand, abs=1e-5)
    with pytest.raises(ValueError, match="stride 0"):
        train.evaluate(model, stand_in_params, text, window=WINDOW, stride=0)


# Whole runs.


def stop(number):
    return functools.partial(os.kill, os.getpid(), number)


@pytest.mark.parametrize("name", MODELS)
def test_both_models_resume_bit_for_bit(corpus_path, tmp_path, name):
    config = make_config(corpus_path, name)
    train.fit(config, tmp_path / "whole", log=quiet)
    log = on_line("step 13/20", stop(signal.SIGTERM))
    assert train.fit(config, tmp_path / "parts", log=log) is None
    train.fit(config, tmp_path / "parts", log=log)
    assert "resumed from step 13" in log.lines
    assert_same_run(tmp_path / "whole", tmp_path / "parts", config)
    losses = [row["train_loss"] for row in rows_of(tmp_path / "whole") if "train_loss" in row]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 10), (signal.SIGTERM, 13)]
)
def test_signal_stops_with_the_state_saved(
    corpus_path, tmp_path, stand_in, whole_run, number, step
):
    config, workdir = make_config(corpus_path), tmp_path / "parts"
    before = signal.getsignal(number)
    log = on_line(f"step {step:2d}/20", stop(number))
    assert train.fit(config, workdir, log=log) is None
    assert signal.getsignal(number) is before
    assert number.name in log.lines[-1]
    assert not (workdir / "summary.json").exists()
    last = stored_steps(workdir)[-1]
    assert step <= last <= step + config.train.log_every
    assert f"step {last}" in log.lines[-1]
    again = train.fit(config, workdir, log=log)
    assert f"resumed from step {last}" in log.lines
    assert timeless(again) == timeless(json.loads((whole_run / "summary.json").read_text()))
    assert_same(stored_state(whole_run, config, 20), stored_state(workdir, config, 20))
    assert [timeless(r) for r in rows_of(workdir)] == [timeless(r) for r in rows_of(whole_run)]


@pytest.mark.parametrize("prefix", ["step 12/20", "step 16/20", "step 20: val", "step 20/20"])
def test_crash_loses_nothing(corpus_path, tmp_path, stand_in, whole_run, prefix):
    config = make_config(corpus_path)
    with pytest.raises(Crash):
        train.fit(config, tmp_path / "parts", log=on_line(prefix, crash))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a line cut off
    train.fit(config, tmp_path / "parts", log=quiet)
    assert_same_run(whole_run, tmp_path / "parts", config)


def test_crash_before_the_summary_writes_no_row_twice(corpus_path, stand_in, whole_run, finished):
    (finished / "summary.json").unlink()
    train.fit(make_config(corpus_path), finished, log=quiet)
    assert_same_run(whole_run, finished, make_config(corpus_path))


def test_signals_are_left_alone_outside_the_main_thread(corpus_path, tmp_path, stand_in):
    config, found = make_config(corpus_path, steps=4), []
    before = signal.getsignal(signal.SIGTERM)

    def run():
        with jax.numpy_dtype_promotion("standard"):
            found.append(train.fit(config, tmp_path / "run", log=quiet))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0]["steps"] == 4
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_checkpoint_holds_the_state_of_its_step(corpus_path, tmp_path, stand_in):
    config = make_config(corpus_path, steps=6, checkpoint_every=1, eval_every=2)
    train.fit(config, tmp_path / "run", log=quiet)
    mesh, corpus_N = sharding.make_mesh(), data.read_file(corpus_path)[:3200]
    run_steps = train.make_train_steps(config, mesh)
    state = train.init_state(config, mesh)
    assert stored_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        state, _ = run_steps(state, corpus_N, np.int32(1))
        assert_same(stored_state(tmp_path / "run", config, step), state)


@pytest.mark.parametrize(("steps", "every"), [(7, 5), (3, 100), (10, 5)])
def test_last_step_is_always_stored(corpus_path, tmp_path, stand_in, steps, every):
    config = make_config(
        corpus_path, steps=steps, checkpoint_every=every, eval_every=100, log_every=100
    )
    train.fit(config, tmp_path / "run", log=quiet)
    due = sorted({*range(every, steps, every), steps})
    assert stored_steps(tmp_path / "run") == due
    assert all(name.isdigit() for name in os.listdir(tmp_path / "run" / "checkpoints"))


def test_rows_hold_what_they_say(corpus_path, stand_in, whole_run):
    config, rows = make_config(corpus_path), rows_of(whole_run)
    summary = json.loads((whole_run / "summary.json").read_text())
    training = [row for row in rows if "train_loss" in row]
    assert [row["step"] for row in training] == [4, 8, 10, 12, 13, 16, 20]
    schedule = optim.learning_rate(config.optim, 20)
    for row in training:
        assert row["train_bpc"] == pytest.approx(row["train_loss"] / math.log(2), rel=1e-12)
        assert row["lr"] == pytest.approx(float(schedule(row["step"] - 1)))
    validated = {row["step"]: row["val_bpc"] for row in rows if "val_bpc" in row}
    assert list(validated) == [10, 20]
    state = stored_state(whole_run, config, 20)
    corpus = data.read_file(corpus_path)
    by_hand = bits_by_hand(state.params, corpus[3200:3600], WINDOW, WINDOW)
    assert validated[20] == pytest.approx(by_hand, abs=1e-5)
    assert summary["val_bpc"] == min(validated.values())
    best = stored_state(whole_run, config, summary["best_step"])
    by_hand = bits_by_hand(best.params, corpus[3600:], WINDOW, WINDOW)
    assert summary["test_bpc"] == pytest.approx(by_hand, abs=1e-5)
    assert summary["tokens"] == 20 * 4 * WINDOW
    assert summary["params"] == 2 * 256 * 8


def test_loss_of_a_row_is_the_mean_over_its_steps(corpus_path, tmp_path, stand_in):
    losses = {}
    for every in (1, 5):
        config = make_config(
            corpus_path, steps=10, log_every=every, eval_every=10, checkpoint_every=10
        )
        train.fit(config, tmp_path / str(every), log=quiet)
        rows = rows_of(tmp_path / str(every))
        losses[every] = [row["train_loss"] for row in rows if "train_loss" in row]
    assert len(losses[1]) == 10
    np.testing.assert_allclose(np.reshape(losses[1], (2, 5)).mean(1), losses[5], rtol=1e-6)


def test_each_program_is_compiled_once(corpus_path, tmp_path, stand_in, caplog):
    """Over three validations, six saves and calls of several lengths."""
    config = make_config(corpus_path, steps=31, log_every=7, checkpoint_every=6)

    def compiled():
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if message.startswith("Compiling")]

    marks = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        log = on_line("step 10: validation", lambda: marks.append(len(compiled())))
        train.fit(config, tmp_path / "run", log=log)
    for name in ("init", "train_steps", "score"):
        assert sum(f"jit({name})" in message for message in compiled()) == 1
    assert compiled()[marks[0] :] == []


# What stops a run.


def poisoned(step, where):
    """`train_step` with a NaN in what step `step` (from 1) reports or leaves behind."""
    whole = train.train_step

    def step_fn(state, windows, **parts):
        new, metrics = whole(state, windows, **parts)
        nan = jnp.where(new.step >= step, jnp.nan, 0.0)
        if where == "params":
            return new.replace(params=jax.tree.map(lambda x: x + nan, new.params)), metrics
        return new, metrics | {where: metrics[where] + nan}

    return step_fn


@pytest.mark.parametrize("where", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [1, 6, 20])
def test_nan_stops_the_run(corpus_path, tmp_path, stand_in, monkeypatch, where, step):
    monkeypatch.setattr(train, "train_step", poisoned(step, where))
    config = make_config(corpus_path, checkpoint_every=5)
    with pytest.raises(train.TrainError) as caught:
        train.fit(config, tmp_path / "run", log=quiet)
    message = str(caught.value)
    assert message.startswith(f"step {step}: ")
    assert "optim.learning_rate" in message
    assert "\n" not in message
    assert stored_steps(tmp_path / "run") == list(range(5, step, 5))
    assert all(row["step"] < step for row in rows_of(tmp_path / "run"))
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("step", [5, 10, 20])
def test_parameters_that_are_not_finite_are_never_stored(
    corpus_path, tmp_path, stand_in, monkeypatch, step
):
    """The loss of a step is that of the parameters before it: the last one proves nothing."""
    monkeypatch.setattr(train, "train_step", poisoned(step, "params"))
    config = make_config(corpus_path, checkpoint_every=5)
    with pytest.raises(train.TrainError, match="step"):
        train.fit(config, tmp_path / "run", log=quiet)
    for stored in stored_steps(tmp_path / "run"):
        state = stored_state(tmp_path / "run", config, stored)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)), stored
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "run" / "summary.json").exists()


# Run directories.


def test_finished_run_is_not_run_again(corpus_path, stand_in, finished, monkeypatch):
    summary, before = json.loads((finished / "summary.json").read_text()), snapshot(finished)
    monkeypatch.setattr(train, "make_train_steps", None)
    monkeypatch.setattr(train, "Evaluator", None)
    assert train.fit(make_config(corpus_path), finished, log=quiet) == summary
    assert snapshot(finished) == before


def test_second_process_in_a_directory_is_refused(corpus_path, stand_in, whole_run, tmp_path):
    config, refusals = make_config(corpus_path), []

    def second():
        with pytest.raises(ConfigError, match=r"^workdir=[^\n]+ trains in it[^\n]+$") as refusal:
            train.fit(config, tmp_path / "run", log=quiet)
        refusals.append(refusal)

    train.fit(config, tmp_path / "run", log=on_line("step  8/20", second))
    assert len(refusals) == 1
    assert_same_run(whole_run, tmp_path / "run", config)
    assert not (tmp_path / "run" / "lock").exists()


def test_damaged_summary_is_made_again(corpus_path, stand_in, whole_run, finished):
    (finished / "summary.json").write_text('{"steps": 2')
    train.fit(make_config(corpus_path), finished, log=quiet)
    assert_same_run(whole_run, finished, make_config(corpus_path))


def test_more_steps_continue_a_finished_run(corpus_path, stand_in, finished):
    lines = []
    before = [timeless(row) for row in rows_of(finished) if "test_bpc" not in row]
    longer = make_config(corpus_path, steps=30)
    summary = train.fit(longer, finished, log=lines.append)
    assert any("train.steps is 30, was 20" in line and "schedule" in line for line in lines)
    assert "resumed from step 20" in lines
    assert summary["steps"] == 30
    rows = [row for row in rows_of(finished) if "test_bpc" not in row]
    assert [timeless(row) for row in rows[: len(before)]] == before
    schedule = optim.learning_rate(longer.optim, 30)
    new = [row for row in rows[len(before) :] if "lr" in row]
    assert [row["step"] for row in new] == [24, 26, 28, 30]
    for row in new:
        assert row["lr"] == pytest.approx(float(schedule(row["step"] - 1)))
    assert json.loads((finished / "config.json").read_text())["train"]["steps"] == 30


def script_scores(monkeypatch, scores):
    """Evaluations give these scores, one after another."""
    values = iter(scores)
    monkeypatch.setattr(train.Evaluator, "__call__", lambda self, params, text: next(values))


def test_best_checkpoint_is_tested_and_loaded(corpus_path, tmp_path, stand_in, monkeypatch):
    script_scores(monkeypatch, [5.0, 3.0, 4.0, 6.0, 3.5])
    config = make_config(corpus_path, eval_every=5, checkpoint_every=5, keep=1)
    summary = train.fit(config, tmp_path / "run", log=quiet)
    assert summary["best_step"] == 10
    assert summary["val_bpc"] == 3.0
    assert summary["test_bpc"] == 3.5
    assert stored_steps(tmp_path / "run") == [10, 20]
    best = stored_state(tmp_path / "run", config, 10)
    monkeypatch.setattr(optim, "make_optimizer", None)
    loaded, model, params, step = train.load_run(tmp_path / "run")
    assert loaded == config
    assert model == StandIn(config.model)
    assert step == 10
    assert_same(params, best.params)


def test_best_before_an_interruption_is_not_forgotten(corpus_path, tmp_path, stand_in, monkeypatch):
    script_scores(monkeypatch, [3.0, 5.0, 4.0, 6.0, 3.5])
    config = make_config(corpus_path, eval_every=5, checkpoint_every=5, keep=1)
    log = on_line("step 10/20", stop(signal.SIGTERM))
    assert train.fit(config, tmp_path / "run", log=log) is None
    summary = train.fit(config, tmp_path / "run", log=quiet)
    assert (summary["best_step"], summary["val_bpc"]) == (5, 3.0)
    assert stored_steps(tmp_path / "run") == [5, 20]


def test_loading_a_run_leaves_a_save_in_progress_alone(stand_in, finished):
    part = finished / "checkpoints" / "26.orbax-checkpoint-tmp"
    part.mkdir()
    (part / "array").write_bytes(b"x")
    train.load_run(finished)
    assert (part / "array").exists()


@pytest.mark.parametrize("kind", ["no checkpoint", "empty", "missing", "too deep"])
def test_loading_needs_a_run_with_a_checkpoint(stand_in, finished, tmp_path, kind):
    workdir = tmp_path / kind
    if kind == "too deep":
        workdir = finished / "checkpoints"
    elif kind != "missing":
        workdir.mkdir()
    if kind == "no checkpoint":
        shutil.copy(finished / "config.json", workdir)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=f"^workdir={workdir}: [^\n]+$"):
        train.load_run(workdir)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"name": "kuramoto"}, "model.name"),
        ({"window": 8}, "data.window"),
        ({"learning_rate": 0.5}, "optim.learning_rate"),
        ({"batch_size": 8}, "train.batch_size"),
        ({"steps": 10}, "train.steps"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_run_is_refused(corpus_path, stand_in, finished, change, key, complete):
    if not complete:
        (finished / "summary.json").unlink()
    before = snapshot(finished)
    with pytest.raises(ConfigError, match=f"^[^\n]*{key}[^\n]*$"):
        train.fit(make_config(corpus_path, **change), finished, log=quiet)
    assert snapshot(finished) == before


def test_other_data_is_refused(corpus_path, stand_in, tmp_path):
    path = Path(shutil.copy(corpus_path, tmp_path / "data.bin"))
    config = make_config(path, steps=4)
    train.fit(config, tmp_path / "run", log=quiet)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"^workdir=[^\n]*data[^\n]*$"):
        train.fit(config, tmp_path / "run", log=quiet)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_is_no_run_is_refused(corpus_path, tmp_path, stand_in, kind):
    workdir = tmp_path / "mine"
    if kind == "directory":
        workdir.mkdir()
    (workdir / "thesis.tex" if kind == "directory" else workdir).write_text("x")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=f"^workdir={workdir}: [^\n]+$"):
        train.fit(make_config(corpus_path), workdir, log=quiet)
    assert snapshot(tmp_path) == before


def test_what_does_not_define_a_run_may_change(corpus_path, tmp_path, stand_in, whole_run):
    config, workdir = make_config(corpus_path), tmp_path / "parts"
    assert train.fit(config, workdir, log=on_line("step 10/20", stop(signal.SIGTERM))) is None
    other = make_config(corpus_path, eval_batch_size=3, log_every=3, checkpoint_every=7, keep=5)
    train.fit(other, workdir, log=quiet)
    assert_same(stored_state(whole_run, config, 20), stored_state(workdir, other, 20))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"train": {}}'])
def test_damaged_config_is_told(corpus_path, tmp_path, stand_in, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(content)
    for call in (functools.partial(train.fit, make_config(corpus_path)), train.load_run):
        with pytest.raises(ConfigError, match=r"^workdir=[^\n]+$"):
            call(workdir=tmp_path / "run")
