"""Sine and cosine together, fast on CPU.

XLA's CPU sine and cosine are scalar calls. Here both come from one range reduction,
x = n pi/2 + r with |r| <= pi/4, and two short polynomials in r^2, all of it vectorisable. The
derivative reuses the two results, so nothing is evaluated twice and only they are kept for it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kuramoto_jax.kernels.cody_waite import leading_parts

LIMIT = 1e4

# n stays below 2^13 for |x| < LIMIT, so that its products with parts of 11 bits are exact. The last
# part is what pi/2 has beyond float64: near a multiple of pi/2 the result hangs on it.
_HALF_PI_1, _HALF_PI_2, _HALF_PI_3, _HALF_PI_4 = leading_parts(math.pi / 2, bits=11, parts=4)
_HALF_PI_5 = 6.123233995736766e-17

# Minimax fits on |r| <= pi/4 with z = r^2 (Lawson's iteration in float64):
# sin r = r + r z P(z) to 4e-9 and cos r = 1 - z/2 + z^2 Q(z) to 1e-10.
_SIN = (-0.16666655, 0.00833218, -0.00019517)
_COS = (0.0416666469, -0.00138873669, 0.0000244383791)


@jax.custom_jvp
def sincos(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sin x, cos x).

    Float32 on CPU: within 2 units in the last place for |x| < 1e4, the platform's own functions
    beyond. Other types and platforms: the platform's own.

    Args:
      x: array of radians.

    Returns:
      Two arrays like `x`.
    """
    if x.dtype != jnp.float32:
        return jnp.sin(x), jnp.cos(x)
    return lax.platform_dependent(x, cpu=_with_fallback, default=_native)


@sincos.defjvp
def _sincos_jvp(primals: tuple, tangents: tuple) -> tuple:
    sin, cos = sincos(*primals)
    return (sin, cos), (cos * tangents[0], -sin * tangents[0])


def _native(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(x), jnp.cos(x)


@jax.custom_batching.custom_vmap
def _with_fallback(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fast pair where all of `x` is in its range, else the exact one."""
    return lax.cond(jnp.max(jnp.abs(x), initial=0.0) < LIMIT, _polynomials, _native, x)


@_with_fallback.def_vmap
def _with_fallback_vmap(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple:
    # Elementwise, so a batch is just a larger array: this keeps the branch a branch under vmap,
    # where a batched condition would evaluate both sides.
    del axis_size, in_batched
    return _with_fallback(x), (True, True)


def _horner(z: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    result = jnp.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * z + np.float32(coefficient)
    return result


def _polynomials(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    turns = jnp.round(x * np.float32(2 / math.pi))
    coarse = x - turns * np.float32(_HALF_PI_1) - turns * np.float32(_HALF_PI_2)
    step = turns * np.float32(_HALF_PI_3)
    rounded = coarse - step
    lost = (coarse - rounded) - step
    r = rounded + (lost - turns * np.float32(_HALF_PI_4) - turns * np.float32(_HALF_PI_5))
    z = r * r
    sin = r + r * z * _horner(z, _SIN)
    cos = 1.0 - 0.5 * z + z * z * _horner(z, _COS)
    quarter = turns.astype(jnp.int32)
    odd = (quarter & 1) == 1
    # Quarter turns: (s, c), (c, -s), (-s, -c), (-c, s).
    sign_sin = jnp.where((quarter & 2) == 2, -1.0, 1.0).astype(x.dtype)
    sign_cos = jnp.where(((quarter + 1) & 2) == 2, -1.0, 1.0).astype(x.dtype)
    return sign_sin * jnp.where(odd, cos, sin), sign_cos * jnp.where(odd, sin, cos)
