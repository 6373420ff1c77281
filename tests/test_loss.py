"""Next-byte cross-entropy against hand-computed values and float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kuramoto_jax.loss import bits, next_byte_loss

loss = jax.jit(next_byte_loss)


def exact(logits, targets, weights):
    """Sum over the last axis but one of w (log sum exp l - l_target), in float64 loops."""
    total = np.zeros(targets.shape[:-1])
    for index in np.ndindex(targets.shape):
        row = np.asarray(logits[index]).astype(np.float64)
        nats = math.log(sum(math.exp(v - row.max()) for v in row)) + row.max()
        total[index[:-1]] += weights[index] * (nats - row[targets[index]])
    return total


@pytest.mark.parametrize("level", [0.0, 7.0, -300.0])
def test_equal_logits_cost_eight_bits_a_byte(level):
    total, count = loss(jnp.full((2, 5, 256), level), jnp.array([[0, 1, 2, 254, 255]] * 2))
    np.testing.assert_allclose(total / count, math.log(256), rtol=1e-5)
    np.testing.assert_array_equal(count, [5.0, 5.0])
    assert bits(math.log(256)) == pytest.approx(8, rel=1e-15)
    assert bits(0.0) == 0


def test_two_symbols_by_hand():
    # probabilities 1/4 and 3/4
    logits = jnp.log(jnp.array([[1.0, 3.0], [1.0, 3.0]]))
    total, count = loss(logits, jnp.array([0, 1]))
    assert float(total) == pytest.approx(math.log(4) + math.log(4 / 3), rel=1e-6)
    assert count == 2


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_against_float64(shape, dtype, scale):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(scale * rng.normal(size=(*shape, 9)), dtype)
    targets = rng.integers(0, 9, shape)
    weights = rng.integers(0, 2, shape).astype(np.float32)
    for given, used in ((None, np.ones(shape)), (jnp.asarray(weights), weights)):
        total, count = loss(logits, jnp.asarray(targets), given)
        assert total.dtype == count.dtype == jnp.float32
        assert total.shape == count.shape == shape[:-1]
        expected = exact(logits.astype(jnp.float32), targets, used)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(count, used.sum(axis=-1))


def test_weights_take_out_and_count():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 5, 6))
    kept = jnp.array([1.0, 0, 1, 1, 0, 0])
    total, count = loss(logits, targets, kept)
    expected = loss(logits[jnp.array([0, 2, 3])], targets[jnp.array([0, 2, 3])])
    np.testing.assert_allclose((total, count), expected, rtol=1e-6)
    assert tuple(loss(logits, targets, jnp.zeros(6))) == (0.0, 0.0)
    half = loss(logits, targets, jnp.full((6,), 0.5))
    np.testing.assert_allclose(half, 0.5 * np.asarray(loss(logits, targets)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32])
def test_every_byte_is_scored_and_zero_is_no_padding(dtype):
    logits = jnp.tile(jnp.arange(256, dtype=jnp.float32)[None] / 64, (256, 1))
    total, count = jax.jit(jax.vmap(next_byte_loss))(
        logits[:, None], jnp.arange(256).astype(dtype)[:, None]
    )
    np.testing.assert_array_equal(count, np.ones(256))
    row = np.arange(256) / 64
    np.testing.assert_allclose(total, np.log(np.exp(row).sum()) - row, rtol=1e-5, atol=1e-5)


def test_gradient_is_probability_less_one_at_the_target():
    logits = jnp.log(jnp.array([[1.0, 3.0], [2.0, 2.0]]))
    weighted = functools.partial(loss, targets=jnp.array([1, 0]), weights=jnp.array([1.0, 2.0]))
    slope = jax.jit(jax.grad(lambda x: weighted(x)[0]))(logits)
    np.testing.assert_allclose(slope, [[0.25, -0.25], [-1, 1]], atol=1e-6)


def test_certain_and_impossible_bytes_are_finite():
    logits = jnp.array([[1e4, -1e4]] * 2, jnp.float32)
    assert float(loss(logits[:1], jnp.array([0]))[0]) == 0
    assert float(loss(logits[:1], jnp.array([1]))[0]) == 2e4
