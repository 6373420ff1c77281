"""The layer's functions compiled whole, and random arguments for them.

Compiling operation by operation takes most of the time of a test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kuramoto_jax import layer

IMPLEMENTATIONS = ("reference", "xla")

attention_weights = jax.jit(layer.attention_weights)
bounded = jax.jit(layer.bounded, static_argnames="kind")
circular_mean = jax.jit(layer.circular_mean)
drift = jax.jit(layer.drift)
kuramoto_coupling = jax.jit(layer.kuramoto_coupling)
normalized_gate = jax.jit(layer.normalized_gate)
order_parameter = jax.jit(layer.order_parameter, static_argnames="axis")
phase_features = jax.jit(layer.phase_features)
phase_score = jax.jit(layer.phase_score)
tangent_update = jax.jit(layer.tangent_update)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def inputs(tokens, width, seed=0):
    """Random layer arguments, float64 under x64 and float32 otherwise."""
    return tuple(jnp.asarray(a) for a in reference.random_inputs(tokens, width, seed))


def random_weights(rows, cols, seed=0):
    """Random attention weights [T, U], each row summing to one."""
    weights = np.random.default_rng(seed).uniform(0.0, 1.0, (rows, cols)) ** 3
    return jnp.asarray(weights / weights.sum(axis=1, keepdims=True))
