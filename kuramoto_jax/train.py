"""Training: state, step, evaluation, and `fit`, where the parts meet.

A batch is a pure function of (seed, step), gathered on the device inside the compiled step, and one
compiled call runs several optimizer steps. The host dispatches a call and only then fetches the
metrics of the one before, so the device never waits for it.
"""

import contextlib
import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from kuramoto_jax import data, optim, sharding
from kuramoto_jax.baselines import LanguageModel, bigram_bpc, build
from kuramoto_jax.checkpoint import Checkpoints
from kuramoto_jax.config import Config, ConfigError
from kuramoto_jax.generate import Sampling, as_text, generate
from kuramoto_jax.loss import bits, next_byte_loss
from kuramoto_jax.metrics import (
    MetricsWriter,
    duration,
    progress_line,
    read_rows,
    write_atomically,
)
from kuramoto_jax.model import param_count
from kuramoto_jax.workdir import (
    check_workdir,
    claim_workdir,
    finished_summary,
    locked_workdir,
    stored_config,
)

# Bytes whose gradient a single CPU takes at once.
CPU_BYTES = 512


class TrainError(RuntimeError):
    """A run that cannot go on; the message is one line that says why and what to do."""


class TrainState(struct.PyTreeNode):
    """Everything a step reads and writes.

    Attributes:
      step: [] int32, optimizer steps done.
      params: the model's parameters.
      opt_state: the optimizer's state.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def init_params(model: LanguageModel, seed: int) -> Any:
    """Returns initial parameters: a pure function of the seed, whatever the devices."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return model.init(jax.random.key(seed), tokens)["params"]


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """Returns the state at step 0, laid out on the mesh."""
    model = build(config.model)
    optimizer = optim.make_optimizer(config.optim, config.train.steps)

    def init() -> TrainState:
        params = init_params(model, config.seed)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(init, out_shardings=sharding.replicated(mesh))()


def windows_at_once(config: Config, mesh: Mesh) -> int:
    """Returns how many windows of a batch the gradient is taken of at once.

    That is `train.microbatch`, or where it is 0 the whole batch; but on a single CPU device as many
    as hold `CPU_BYTES` bytes, so that what a layer leaves for the next stays in the CPU's caches.
    """
    batch_size = config.train.batch_size
    if config.train.microbatch:
        return config.train.microbatch
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return batch_size
    most = max(1, CPU_BYTES // config.data.window)
    return max(size for size in range(1, batch_size + 1) if size <= most and batch_size % size == 0)


def mean_loss_and_gradient(
    params: Any, windows: jax.Array, *, model: LanguageModel, at_once: int
) -> tuple[jax.Array, Any]:
    """Returns the mean loss of a batch in nats a byte, and its gradient.

    Args:
      params: the model's parameters.
      windows: [B, T + 1] bytes: inputs are the first T, targets the last T.
      model: the language model.
      at_once: windows whose gradient is taken at once, a divisor of B; the gradients of the parts
        are added up, which changes memory and speed and rounding, nothing else.
    """

    def total_loss(params: Any, windows: jax.Array) -> jax.Array:
        tokens = windows.astype(jnp.int32)
        logits = model.apply({"params": params}, tokens[:, :-1])
        return jnp.sum(next_byte_loss(logits, tokens[:, 1:])[0])

    def add_part(
        total: tuple[jax.Array, Any], part: jax.Array
    ) -> tuple[tuple[jax.Array, Any], None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(total_loss)(params, part)), None

    # Windows that are split over devices stay where they are: every device has some of each part.
    parts = windows.reshape(at_once, -1, windows.shape[1]).swapaxes(0, 1)
    nothing = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
    total, _ = jax.lax.scan(add_part, nothing, parts)
    count = windows.shape[0] * (windows.shape[1] - 1)
    return jax.tree.map(lambda x: x / count, total)


def train_step(
    state: TrainState,
    windows: jax.Array,
    *,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    at_once: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on one batch.

    Args:
      state: state before the step.
      windows: [B, T + 1] bytes: inputs are the first T, targets the last T.
      model: the language model.
      optimizer: from `optim.make_optimizer`.
      at_once: windows whose gradient is taken at once, a divisor of B.

    Returns:
      The state after the step, and `loss` (nats a byte) and `grad_norm`, before clipping.
    """
    loss, grads = mean_loss_and_gradient(state.params, windows, model=model, at_once=at_once)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(state.step + 1, params, opt_state), metrics


def make_train_steps(config: Config, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns a jitted `(state, corpus, count) -> (state, metrics)` that runs `count` steps.

    `count` is a traced number up to `train.log_every`, so the loop is compiled once. Each metric is
    an array of that many values, of which the first `count` are set. The state is donated.
    """
    most = min(config.train.log_every, config.train.steps)
    step_fn = functools.partial(
        train_step,
        model=build(config.model),
        optimizer=optim.make_optimizer(config.optim, config.train.steps),
        at_once=windows_at_once(config, mesh),
    )

    def train_steps(
        state: TrainState, corpus_N: jax.Array, count: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def body(index: jax.Array, carry: tuple[TrainState, dict]) -> tuple[TrainState, dict]:
            state, history = carry
            windows = data.batch_at(
                corpus_N,
                config.seed,
                state.step,
                batch_size=config.train.batch_size,
                window=config.data.window,
            )
            windows = jax.lax.with_sharding_constraint(windows, sharding.split_batch(mesh))
            state, metrics = step_fn(state, windows)
            return state, {name: history[name].at[index].set(metrics[name]) for name in history}

        empty = jnp.full((most,), jnp.nan)
        return jax.lax.fori_loop(0, count, body, (state, {"loss": empty, "grad_norm": empty}))

    whole = sharding.replicated(mesh)
    return jax.jit(
        train_steps,
        donate_argnums=0,
        in_shardings=(whole, whole, whole),
        out_shardings=(whole, whole),
    )


class Evaluator:
    """Scores whole texts, each byte once; compiled once for all of them."""

    def __init__(
        self, model: LanguageModel, *, window: int, stride: int, batch_size: int, mesh: Mesh
    ) -> None:
        """Sets the context: windows of `window` bytes, `stride` apart.

        `batch_size` windows, rounded up to a multiple of the devices, go through the model at once.
        """
        self._window, self._stride = window, stride
        self._batch_size = -(-batch_size // mesh.size) * mesh.size

        def score(params: Any, windows: jax.Array, weights: jax.Array) -> jax.Array:
            tokens = windows.astype(jnp.int32)
            logits = model.apply({"params": params}, tokens[:, :-1])
            return next_byte_loss(logits, tokens[:, 1:], weights)[0]

        whole, split = sharding.replicated(mesh), sharding.split_batch(mesh)
        self._score = jax.jit(score, in_shardings=(whole, split, split), out_shardings=split)

    def __call__(self, params: Any, text: np.ndarray) -> float:
        """Returns bits per character (bits a byte) of `text` [N] uint8 over bytes 1 .. N - 1.

        Every scored byte has at least window - stride bytes of context, but for those of the first
        window. Padding has weight 0, and the sums of windows are added in float64, so the result
        does not depend on the batch size or on the number of devices.
        """
        plan = data.evaluation_windows(text.size, self._window, self._stride)
        sums = []
        for first in range(0, len(plan), self._batch_size):
            part = plan[first : first + self._batch_size]
            index = part[:, :1] + np.arange(self._window + 1)
            target = index[:, 1:]
            weights = (target >= part[:, 1:]) & (target < text.size)
            windows = text[np.minimum(index, text.size - 1)]
            missing = self._batch_size - len(part)
            windows = np.pad(windows, ((0, missing), (0, 0)))
            weights = np.pad(weights.astype(np.float32), ((0, missing), (0, 0)))
            sums.append(self._score(params, windows, weights))
        nats = sum(float(np.sum(np.asarray(part, np.float64))) for part in sums)
        return bits(nats / (text.size - 1))


def evaluate(
    model: LanguageModel,
    params: Any,
    text: np.ndarray,
    *,
    window: int,
    stride: int | None = None,
    batch_size: int = 64,
    mesh: Mesh | None = None,
) -> float:
    """Returns the bits per character of a text; see `Evaluator`. No stride means `window`."""
    evaluator = Evaluator(
        model,
        window=window,
        stride=window if stride is None else stride,
        batch_size=batch_size,
        mesh=mesh or sharding.make_mesh(),
    )
    return evaluator(params, text)


class _StopRequest:
    """Notes SIGINT and SIGTERM while the run finishes its step; a second one acts at once."""

    def __init__(self) -> None:
        self.name = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread, where signals stay as they are
                return self
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()


def _next_stop(step: int, config: Config) -> int:
    """Returns the step at which the compiled call that starts at `step` has to end."""
    every = (config.train.log_every, config.train.eval_every, config.train.checkpoint_every)
    return min(config.train.steps, *(step - step % n + n for n in every))


class _Progress:
    """Turns the metrics of a compiled call into a row, once they are fetched."""

    def __init__(self, config: Config, writer: MetricsWriter, log: Callable[[str], None]) -> None:
        self._config, self._writer, self._log = config, writer, log
        self._schedule = optim.learning_rate(config.optim, config.train.steps)
        self._started = time.perf_counter()

    def restart_clock(self) -> None:
        """Leaves what has passed since the last row out of the throughput."""
        self._started = time.perf_counter()

    def record(self, first: int, count: int, metrics: dict[str, jax.Array]) -> None:
        """Waits for the metrics of steps first .. first + count - 1 and writes their row.

        Raises:
          TrainError: if a loss or gradient is not finite.
        """
        values = {name: np.asarray(value)[:count] for name, value in metrics.items()}
        elapsed = time.perf_counter() - self._started
        self._started = time.perf_counter()
        finite = np.isfinite(values["loss"]) & np.isfinite(values["grad_norm"])
        if not finite.all():
            bad = int(np.argmin(finite))
            raise TrainError(
                f"step {first + bad + 1}: loss {values['loss'][bad]} nats, gradient norm "
                f"{values['grad_norm'][bad]} is not finite; the run stops. Lower "
                f"optim.learning_rate (now {self._config.optim.learning_rate:g}) or optim.clip"
            )
        train = self._config.train
        loss = float(values["loss"].astype(np.float64).mean())
        rate = count * train.batch_size * self._config.data.window / elapsed
        row = {
            "step": first + count,
            "train_loss": loss,
            "train_bpc": bits(loss),
            "lr": float(self._schedule(first + count - 1)),
            "grad_norm": float(values["grad_norm"][-1]),
            "tokens_per_second": rate,
        }
        self._writer.write(row)
        left = (train.steps - row["step"]) * train.batch_size * self._config.data.window / rate
        self._log(progress_line(row, train.steps, left))


def fit(
    config: Config, workdir: str | Path, log: Callable[[str], None] = print
) -> dict[str, Any] | None:
    """Runs or continues a training run in a directory.

    The directory then holds `config.json`, `environment.json`, `metrics.jsonl`, `checkpoints/` and,
    at the end, `summary.json`. A checkpoint is written every `train.checkpoint_every` steps, at
    each validation and at the last step; the newest `train.keep` and the best by validation are
    kept. The same call on the same directory continues from the newest one, with the batches and
    results that an uninterrupted run would have had.

    Args:
      config: the run.
      workdir: its directory, made if missing.
      log: called with each line for the user.

    Returns:
      The summary, or None if SIGINT or SIGTERM asked the run to stop, with its state saved.

    Raises:
      ConfigError: if the configuration does not fit the devices or the directory.
      kuramoto_jax.data.DataError: if the data cannot be had.
      TrainError: if the loss or the gradient is not finite.
    """
    workdir = Path(workdir).expanduser().absolute()
    mesh = sharding.make_mesh()
    sharding.check_batch("train.batch_size", config.train.batch_size, mesh)
    sharding.check_batch("train.microbatch", config.train.microbatch, mesh)
    window = config.data.window
    corpus = data.load_corpus(
        config.data.source, config.data.path, config.data.split, window=window
    )
    largest = max(int(part.max()) for part in (corpus.train, corpus.validation, corpus.test))
    if largest >= config.model.symbols:
        raise ConfigError(
            f"model.symbols={config.model.symbols}: the data holds byte {largest}; "
            f"use at least {largest + 1}, or 256 for any bytes"
        )
    check_workdir(workdir, config, corpus)
    if summary := finished_summary(workdir, config.train.steps):
        log(f"{workdir} holds this run, finished at step {config.train.steps}")
        return summary
    with locked_workdir(workdir):
        return _run(config, workdir, corpus, mesh, log)


def _run(
    config: Config, workdir: Path, corpus: data.Corpus, mesh: Mesh, log: Callable[[str], None]
) -> dict[str, Any] | None:
    """Does what `fit` promises, in a directory that no other process writes in."""
    # Until the directory was locked, another process may have trained in it.
    step = check_workdir(workdir, config, corpus)
    window = config.data.window
    model = build(config.model)
    state = init_state(config, mesh)
    params = param_count(state.params)
    log(_describe(config, workdir, corpus, params, mesh))
    if step and (before := stored_config(workdir).train.steps) != config.train.steps:
        log(
            f"train.steps is {config.train.steps}, was {before}: from here on the learning rate "
            "follows the schedule of the new length"
        )
    claim_workdir(workdir, config, corpus)
    with (
        contextlib.closing(Checkpoints(workdir / "checkpoints", config.train.keep)) as checkpoints,
        MetricsWriter(workdir, step, config.train.tensorboard) as writer,
        _StopRequest() as stop,
    ):
        if step:
            state = _restore(checkpoints, step, state)
            log(f"resumed from step {step}")
        started = time.perf_counter() - _seconds_before(writer.rows)
        train_steps = make_train_steps(config, mesh)
        corpus_N = jax.device_put(corpus.train, sharding.replicated(mesh))
        evaluator = Evaluator(
            model, window=window, stride=window, batch_size=config.train.eval_batch_size, mesh=mesh
        )
        if step < config.train.steps:
            compiling = time.perf_counter()
            run_steps = train_steps.lower(state, corpus_N, np.int32(1)).compile()
            log(f"compiled in {duration(time.perf_counter() - compiling)}")

        progress = _Progress(config, writer, log)
        pending = None
        while step < config.train.steps:
            target = _next_stop(step, config)
            state, metrics = run_steps(state, corpus_N, np.int32(target - step))
            if pending:
                progress.record(*pending)
            pending, step = (step, target - step, metrics), target

            last = step == config.train.steps
            validate = last or step % config.train.eval_every == 0
            save = validate or step % config.train.checkpoint_every == 0 or bool(stop.name)
            if not save:
                continue
            progress.record(*pending)
            pending = None
            _check_finite(state.params, step)
            val_bpc = None
            if validate:
                val_bpc = evaluator(state.params, corpus.validation)
                seconds = time.perf_counter() - started
                writer.write({"step": step, "val_bpc": val_bpc, "seconds": seconds})
                log(f"step {step}: validation {val_bpc:.4f} bpc")
                if config.train.sample_length:
                    text = _sample(config, model, state.params, corpus.validation)
                    writer.write_text(step, "sample", text)
                    log("\n".join("  | " + line for line in text.split("\n")))
            checkpoints.save(
                step,
                state.params,
                {"opt_state": state.opt_state, "step": state.step},
                val_bpc,
            )
            if stop.name and not last:
                checkpoints.wait()
                log(f"{stop.name}: stopped at step {step}, saved; the same command continues")
                return None
            progress.restart_clock()

        checkpoints.wait()
        best = _best_row(writer.rows, checkpoints.steps())
        assert best is not None  # the last step is always validated
        best_params = checkpoints.restore_params(best["step"], state.params)
        test_bpc = evaluator(best_params, corpus.test)
        writer.write({"step": config.train.steps, "test_bpc": test_bpc, "best_step": best["step"]})
        summary = {
            "params": params,
            "val_bpc": best["val_bpc"],
            "test_bpc": test_bpc,
            "best_step": best["step"],
            "steps": config.train.steps,
            "tokens": config.train.steps * config.train.batch_size * window,
            "seconds": time.perf_counter() - started,
            "bigram_val_bpc": bigram_bpc(corpus.train, corpus.validation),
            "bigram_test_bpc": bigram_bpc(corpus.train, corpus.test),
        }
        write_atomically(workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
    log(
        f"finished in {duration(summary['seconds'])}: best at step {best['step']}\n"
        f"validation {summary['val_bpc']:.4f} bpc (bigram model {summary['bigram_val_bpc']:.4f})\n"
        f"test       {test_bpc:.4f} bpc (bigram model {summary['bigram_test_bpc']:.4f})"
    )
    return summary


def _describe(config: Config, workdir: Path, corpus: data.Corpus, params: int, mesh: Mesh) -> str:
    """Returns the lines that a run begins with."""
    batch_size, window = config.train.batch_size, config.data.window
    passes = config.train.steps * batch_size * window / corpus.train.size
    return (
        f"workdir {workdir}\n"
        f"devices {mesh.size} x {jax.devices()[0].device_kind} ({jax.default_backend()})\n"
        f"model   {config.model.name}, {params:,} parameters, {config.model.dtype}\n"
        f"data    {corpus.description}: {corpus.train.size:,} / {corpus.validation.size:,} / "
        f"{corpus.test.size:,} bytes to train / validate / test, sha256 {corpus.sha256[:12]}\n"
        f"batch   {batch_size} windows of {window} bytes = {batch_size * window:,} bytes a step, "
        f"{batch_size // mesh.size} windows a device; {config.train.steps:,} steps = "
        f"{passes:.2f} passes\n"
        "bpc = bits per character, one character = one byte; scored bytes have 1 to "
        f"{window} bytes of context"
    )


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    """Returns whether every number of a tree is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))


def _check_finite(params: Any, step: int) -> None:
    """Raises a TrainError if the parameters after `step` are not finite: nothing stores them."""
    if not _all_finite(params):
        raise TrainError(
            f"step {step}: the parameters after it are not finite; the run stops and keeps its "
            "earlier checkpoints. Lower optim.learning_rate"
        )


def _restore(checkpoints: Checkpoints, step: int, state: TrainState) -> TrainState:
    """Returns the state stored at `step`, laid out like `state`."""
    training = {"opt_state": state.opt_state, "step": state.step}
    params, training = checkpoints.restore(step, state.params, training)
    return TrainState(training["step"], params, training["opt_state"])


def _seconds_before(rows: list[dict[str, Any]]) -> float:
    """Returns the run time already recorded by an interrupted run."""
    return max((row["seconds"] for row in rows if "seconds" in row), default=0.0)


def _best_row(rows: list[dict[str, Any]], stored: list[int]) -> dict[str, Any] | None:
    """Returns the validation row with the lowest score among the stored steps, if there is one."""
    validated = [row for row in rows if "val_bpc" in row and row["step"] in stored]
    return min(validated, key=lambda row: row["val_bpc"], default=None)


def _sample(config: Config, model: LanguageModel, params: Any, text: np.ndarray) -> str:
    """Returns the first bytes of a text and their continuation by the model."""
    prompt = text[: min(64, config.data.window)]
    tokens = generate(
        model,
        params,
        jnp.asarray(prompt, jnp.int32)[None, :],
        jax.random.key(config.seed),
        length=config.train.sample_length,
        slots=config.data.window,
        sampling=Sampling(temperature=0.8),
    )
    return as_text(np.concatenate([prompt, np.asarray(tokens[0])]))


def load_run(workdir: str | Path) -> tuple[Config, LanguageModel, Any, int]:
    """Opens a run for inference, without its optimizer or its data.

    Args:
      workdir: directory of the run.

    Returns:
      Configuration, model, parameters and step of the best checkpoint by validation, or of the
      newest where none was validated.

    Raises:
      ConfigError: if the directory holds no run or no checkpoint.
    """
    workdir = Path(workdir).expanduser().absolute()
    config = stored_config(workdir)
    directory = workdir / "checkpoints"
    none_yet = f"workdir={workdir}: has no whole checkpoint yet"
    if not directory.is_dir():
        raise ConfigError(none_yet)
    model = build(config.model)
    shapes = jax.eval_shape(functools.partial(init_params, model, config.seed))
    placement = sharding.replicated(sharding.make_mesh())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement), shapes
    )
    with contextlib.closing(Checkpoints(directory, create=False)) as checkpoints:
        stored = checkpoints.steps()
        if not stored:
            raise ConfigError(none_yet)
        rows = read_rows(workdir / "metrics.jsonl")
        best = _best_row(rows, stored)
        step = best["step"] if best else stored[-1]
        params = checkpoints.restore_params(step, shapes)
    return config, model, params, step
