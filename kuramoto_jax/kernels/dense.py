"""Matrix products whose weight gradients compile well.

The gradient of y = x w with respect to w is x^T dy. JAX's own rule asks for (dy^T x)^T, and XLA's
CPU compiler fuses the elementwise work that makes dy into the transposition of dy, where it runs
along the wrong axis: a feed-forward block then takes twice the time. Asked for as x^T dy, the
product transposes x, which is there already.
"""

import math

import jax
from jax import lax

Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@jax.custom_vjp
def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns x @ kernel for x [..., C] and a kernel [C, F]; reverse-mode gradients alone."""
    return _product(x, kernel, x.ndim - 1, 0)


def _product(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())))


def _dense_fwd(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dense(x, kernel), (x, kernel)


def _dense_bwd(
    residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    dx = _product(dy, kernel, dy.ndim - 1, 1)
    dkernel = _product(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), 0, 0)
    return dx, dkernel


dense.defvjp(_dense_fwd, _dense_bwd)


def dense_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Dimensions, precision: None = None
) -> jax.Array:
    """`dense` as the `dot_general` of `flax.linen.Dense` and `DenseGeneral`.

    Args:
      x: [..., *C], contracted over its last axes.
      kernel: [*C, *F].
      dimension_numbers: as Flax passes them; they say how many axes C has.
      precision: Flax's argument; the default precision is what there is.

    Returns:
      [..., *F].
    """
    del precision
    axes = len(dimension_numbers[0][1])
    features = math.prod(kernel.shape[:axes])
    y = dense(x.reshape(*x.shape[:-axes], features), kernel.reshape(features, -1))
    return y.reshape(*y.shape[:-1], *kernel.shape[axes:])
