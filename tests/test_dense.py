"""Matrix products with their weight gradient written out, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kuramoto_jax.kernels import dense, dense_general


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(actual, expected, tolerance=1e-6):
    atol = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(4, 7), (7, 4), (1, 1)])
def test_value_and_gradients(leading, inputs, outputs):
    x, kernel = normal(*leading, inputs, seed=0), normal(inputs, outputs, seed=1)
    y, pull = jax.vjp(dense, x, kernel)
    close(y, x.astype(np.float64) @ kernel)
    cotangent = normal(*leading, outputs, seed=2)
    dx, dkernel = pull(jnp.asarray(cotangent))
    close(dx, cotangent.astype(np.float64) @ kernel.T)
    rows, drows = x.reshape(-1, inputs).astype(np.float64), cotangent.reshape(-1, outputs)
    close(dkernel, rows.T @ drows)


def test_several_axes_are_contracted_and_made():
    x, kernel = normal(5, 2, 3, seed=0), normal(2, 3, 4, 6, seed=1)
    dimensions = (((1, 2), (0, 1)), ((), ()))
    expected = jax.lax.dot_general(x, kernel, dimensions)
    assert expected.shape == (5, 4, 6)
    close(dense_general(x, kernel, dimensions), np.asarray(expected))


def test_gradients_keep_the_type():
    x, kernel = (jnp.asarray(normal(3, 3, seed=s), jnp.bfloat16) for s in (0, 1))
    y, pull = jax.vjp(dense, x, kernel)
    assert [a.dtype for a in (y, *pull(y))] == [jnp.bfloat16] * 3
