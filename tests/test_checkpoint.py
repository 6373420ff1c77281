"""Saving and restoring: what comes back is what went in, and the right steps are kept."""

import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kuramoto_jax import sharding
from kuramoto_jax.checkpoint import Checkpoints


class Pair(NamedTuple):
    count: jax.Array
    moments: dict


@pytest.fixture
def state():
    """Params and training state in the types and containers that optax and Flax use."""
    key = jax.random.key(0)
    params = {
        "layer": {"kernel": jax.random.normal(key, (3, 4)), "bias": jnp.zeros(4, jnp.bfloat16)},
        "scale": jnp.float32(2.5),
    }
    params = jax.device_put(params, sharding.replicated(sharding.make_mesh()))
    optimizer = optax.chain(
        optax.identity(),
        optax.scale_by_adam(),
        optax.partition({"a": optax.scale(0.1)}, jax.tree.map(lambda _: "a", params)),
        optax.scale_by_learning_rate(lambda step: 0.1),
    )
    training = {
        "opt_state": optimizer.init(params),
        "pair": Pair(jnp.int32(2**24 + 1), {"m": (jnp.ones((2, 1)), jnp.arange(3))}),
        "step": jnp.int32(2**31 - 1),
    }
    training = jax.device_put(training, sharding.replicated(sharding.make_mesh()))
    return params, training


def assert_same(a, b):
    """The same containers, types, placement and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def save_all(directory, keep, scores):
    """Saves steps 1, 2, ... with these validation scores; the parameter is the step."""
    checkpoints = Checkpoints(directory, keep)
    for step, score in enumerate(scores, 1):
        checkpoints.save(step, {"x": jnp.float32(step)}, {"step": jnp.int32(step)}, score)
    return checkpoints


def test_what_comes_back_is_what_went_in(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "a", 1)
    assert checkpoints.steps() == []
    checkpoints.save(7, *state, 2.5)
    checkpoints.close()
    reopened = Checkpoints(tmp_path / "a", 1)
    assert reopened.steps() == [7]
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), state)
    params, training = reopened.restore(7, *zeros)
    assert_same((params, training), state)
    reopened.close()


def test_shapes_alone_are_enough_to_restore(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, *state, None)
    checkpoints.wait()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    assert_same(checkpoints.restore(1, *shapes), state)
    assert_same(checkpoints.restore_params(1, shapes[0]), state[0])
    checkpoints.close()


def test_state_is_taken_when_save_is_called(tmp_path):
    checkpoints = Checkpoints(tmp_path, 9)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    whole = sharding.replicated(sharding.make_mesh())
    x = jax.device_put(jnp.zeros(50_000), whole)
    for step in range(1, 5):
        x = add(x)
        checkpoints.save(step, {"x": x}, {"step": jnp.int32(step)}, None)
    checkpoints.wait()
    for step in checkpoints.steps():
        restored = checkpoints.restore_params(step, {"x": x})
        assert (np.asarray(restored["x"]) == step).all()
    assert checkpoints.steps() == [1, 2, 3, 4]
    checkpoints.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_restored_state_lies_on_the_present_devices(tmp_path, state, devices):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, *state, None)
    checkpoints.wait()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    moved = jax.device_put(state, sharding.replicated(mesh))
    assert_same(checkpoints.restore(1, *moved), moved)
    checkpoints.close()


@pytest.mark.parametrize(
    ("keep", "scores", "kept"),
    [
        (1, [None, None, None], [3]),
        (2, [None, None, None], [2, 3]),
        (2, [1.0, 2.0, 3.0, 4.0], [1, 3, 4]),
        (1, [3.0, 1.0, 2.0, 4.0], [2, 4]),
        (1, [4.0, 3.0, 2.0, 1.0], [4]),
        (2, [2.0, None, 3.0, None, None], [1, 4, 5]),
        (9, [2.0, None, 3.0], [1, 2, 3]),
    ],
)
def test_newest_and_best_are_kept(tmp_path, keep, scores, kept):
    checkpoints = save_all(tmp_path, keep, scores)
    checkpoints.close()
    reopened = Checkpoints(tmp_path, keep)
    assert reopened.steps() == kept
    assert sorted(int(name) for name in os.listdir(tmp_path)) == kept
    reopened.close()


def test_best_outlives_reopening(tmp_path):
    save_all(tmp_path, 1, [3.0, 1.0, 2.0]).close()
    reopened = Checkpoints(tmp_path, 1)
    for step, score in ((4, 5.0), (5, None), (6, 1.5)):
        reopened.save(step, {"x": jnp.float32(step)}, {"step": jnp.int32(step)}, score)
    reopened.wait()
    assert reopened.steps() == [2, 6]
    assert float(reopened.restore_params(2, {"x": jnp.float32(0)})["x"]) == 2.0
    reopened.save(7, {"x": jnp.float32(7)}, {"step": jnp.int32(7)}, 0.5)
    reopened.close()
    assert os.listdir(tmp_path) == ["7"]


def test_relative_path_is_that_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = save_all(Path("a b", "c"), 1, [None])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.save(2, {"x": jnp.float32(2)}, {"step": jnp.int32(2)}, None)
    checkpoints.close()
    assert os.listdir(tmp_path / "a b" / "c") == ["2"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_leftovers_of_a_killed_save_are_no_step(tmp_path):
    save_all(tmp_path, 2, [None, None]).close()
    part = tmp_path / "3.orbax-checkpoint-tmp"
    (part / "params.orbax-checkpoint-tmp").mkdir(parents=True)
    (part / "params.orbax-checkpoint-tmp" / "d").write_bytes(b"half")
    reopened = Checkpoints(tmp_path, 2)
    assert reopened.steps() == [1, 2]
    reopened.save(3, {"x": jnp.float32(3)}, {"step": jnp.int32(3)}, None)
    reopened.wait()
    assert reopened.steps() == [2, 3]
    assert float(reopened.restore_params(3, {"x": jnp.float32(0)})["x"]) == 3.0
    reopened.close()
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
