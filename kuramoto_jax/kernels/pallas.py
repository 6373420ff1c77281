"""Kuramoto attention from phases in one Pallas kernel a pass, for GPU and TPU.

Queries, keys and values of the layer are functions of few numbers, the phases and the gates. The
kernels read those and make the features where they are used, so that no query, key, value or
resultant is ever written to memory. With phi = theta + omega t, c = tau / sqrt K, the cotangent da
of the coupling a, and the scores s and weights A of `kuramoto_jax.layer`:

    q_t = c gq_t (cos, sin)(phi_t),  k_u = gk_u (cos, sin)(phi_u),  v_u = (cos, sin)(theta_u)
    G_t = sum_u A_tu v_u,  a_t = Im(conj(z_t) G_t),  r_t = Re(conj(z_t) G_t)
    do_t = (-sin, cos)(theta_t) da_t,  ds_tu = A_tu (do_t . v_u - da_t . a_t)

    dgq_t = c (cos, sin)(phi_t) . dq_t         with dq_t = sum_u ds_tu k_u
    dgk_u = (cos, sin)(phi_u) . dk_u           with dk_u = sum_t ds_tu q_t
    dphi_t = c gq_t (-sin, cos)(phi_t) . dq_t + gk_t (-sin, cos)(phi_t) . dk_t
    dtheta_t = dphi_t + (-sin, cos)(theta_t) . dv_t - r_t da_t,  dv_u = sum_t A_tu do_t
    domega = sum_t t dphi_t,  dtau = sum_t gq_t . dgq_t / tau

Scores are made anew in the backward pass, as in `kuramoto_jax.kernels.xla`. Rows and keys are taken
in blocks; key blocks above the diagonal are never visited.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kuramoto_jax.kernels.xla import accumulation_dtype, dot

BLOCK = 64

Pair = tuple[jax.Array, jax.Array]


def supports(width: int) -> bool:
    """Returns whether heads of so many coordinates fit the kernels: a power of two from 16."""
    return width >= 16 and width & (width - 1) == 0


def coupling(
    theta: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    positions: jax.Array,
) -> jax.Array:
    """Causal Kuramoto attention of one head, from phases to coupling.

    a_tj = sum_{u <= t} A_tu sin(theta_uj - theta_tj). Interpreted where there is no GPU or TPU.

    Args:
      theta: [T, K] angles.
      gate_q: [T, K] gates of the queries, in the compute type; None: no gates.
      gate_k: [T, K] gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [K] rates in radians a position; None: no drift.
      positions: [T] positions.

    Returns:
      [T, K] in the type of `theta`.
    """
    gate_q = jnp.ones_like(theta) if gate_q is None else gate_q
    gate_k = jnp.ones_like(theta) if gate_k is None else gate_k
    omega = jnp.zeros_like(theta[0]) if omega is None else omega
    tau, omega, positions = (jnp.asarray(x, theta.dtype) for x in (tau, omega, positions))
    return _coupling(theta, gate_q, gate_k, tau, omega, positions)


@jax.custom_vjp
def _coupling(
    theta: jax.Array,
    gate_q: jax.Array,
    gate_k: jax.Array,
    tau: jax.Array,
    omega: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    return _coupling_fwd(theta, gate_q, gate_k, tau, omega, positions)[0]


def _coupling_fwd(
    theta: jax.Array,
    gate_q: jax.Array,
    gate_k: jax.Array,
    tau: jax.Array,
    omega: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, tuple]:
    args = _Arguments(theta, gate_q, gate_k, tau, omega, positions)
    wide = accumulation_dtype(theta.dtype)
    coupling, alignment, lse = _call(
        _forward_kernel,
        [args.theta, args.gate_q, args.positions],
        [args.theta, args.gate_k, args.positions],
        [args.scale, args.omega],
        [(args.width, wide), (args.width, wide), (1, wide)],
    )
    saved = (theta, gate_q, gate_k, tau, omega, positions, coupling, alignment, lse)
    return coupling[: len(theta)].astype(theta.dtype), saved


def _coupling_bwd(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    theta, gate_q, gate_k, tau, omega, positions, coupling, alignment, lse = saved
    args = _Arguments(theta, gate_q, gate_k, tau, omega, positions)
    length, width, wide = len(theta), args.width, coupling.dtype
    cotangent = _padded(cotangent.astype(wide))
    delta = jnp.sum(cotangent * coupling, axis=1, keepdims=True)
    queries = [args.theta, args.gate_q, args.positions, cotangent, delta, lse]
    keys = [args.theta, args.gate_k, args.positions]
    shared = [args.scale, args.omega]
    dphi_q, dgate_q = _call(_query_kernel, queries, keys, shared, [(width, wide)] * 2)
    dphi_k, dgate_k, dvalue = _call(_key_kernel, keys, queries, shared, [(width, wide)] * 3)
    dphi = (dphi_q + dphi_k)[:length]
    dtheta = dphi + (dvalue - alignment * cotangent)[:length]
    dgate_q, dgate_k = dgate_q[:length], dgate_k[:length]
    dtau = jnp.sum(gate_q.astype(wide) * dgate_q) / tau.astype(wide)
    domega = jnp.sum(positions.astype(wide)[:, None] * dphi, axis=0)
    return (
        dtheta.astype(theta.dtype),
        dgate_q.astype(gate_q.dtype),
        dgate_k.astype(gate_k.dtype),
        dtau.astype(tau.dtype),
        domega.astype(omega.dtype),
        jnp.zeros_like(positions),
    )


_coupling.defvjp(_coupling_fwd, _coupling_bwd)


class _Arguments:
    """The arguments as the kernels take them: padded to whole blocks, two axes each."""

    def __init__(
        self,
        theta: jax.Array,
        gate_q: jax.Array,
        gate_k: jax.Array,
        tau: jax.Array,
        omega: jax.Array,
        positions: jax.Array,
    ) -> None:
        self.width = theta.shape[1]
        self.theta, self.gate_q, self.gate_k = _padded(theta), _padded(gate_q), _padded(gate_k)
        self.positions = _padded(positions[:, None])
        self.scale = tau[None, None] / math.sqrt(self.width)
        self.omega = omega[None, :]


def _padded(x: jax.Array) -> jax.Array:
    """Adds rows of zeros up to a whole block: keys unseen by any query, queries without slope."""
    return jnp.pad(x, ((0, -len(x) % BLOCK), (0, 0)))


def _call(
    kernel: Any,
    rows: list[jax.Array],
    others: list[jax.Array],
    shared: list[jax.Array],
    outputs: list[tuple[int, jnp.dtype]],
) -> list[jax.Array]:
    """Runs a kernel for each block of `rows`; it sees all of `others` and `shared`."""
    length = len(rows[0])
    blocks = lambda width: pl.BlockSpec((BLOCK, width), lambda i: (i, 0))  # noqa: E731
    whole = lambda x: pl.BlockSpec(x.shape, lambda i: (0, 0))  # noqa: E731
    return pl.pallas_call(
        functools.partial(kernel, blocks=length // BLOCK),
        grid=(length // BLOCK,),
        in_specs=[
            *(blocks(x.shape[1]) for x in rows),
            *(whole(x) for x in (*others, *shared)),
        ],
        out_specs=[blocks(width) for width, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((length, width), dtype) for width, dtype in outputs],
        interpret=jax.default_backend() == "cpu",
    )(*rows, *others, *shared)


# What the kernels share. `rows` is a slice of a reference: a block, or all of what is one already.


def _lift(angle: jax.Array) -> Pair:
    return jnp.cos(angle), jnp.sin(angle)


def _times(pair: Pair, factor: jax.Array, dtype: jnp.dtype) -> Pair:
    return (pair[0] * factor).astype(dtype), (pair[1] * factor).astype(dtype)


def _inner(a: Pair, b: Pair) -> jax.Array:
    """Products of the rows of two features: [rows of a, rows of b]."""
    return dot(a[0], b[0], (1, 1)) + dot(a[1], b[1], (1, 1))


def _visible(first_row: Any, first_key: Any) -> jax.Array:
    """The causal mask of a block of scores."""
    row = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0) + first_row
    return lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1) + first_key <= row


def _part(index: Any) -> tuple:
    """Selects a block of rows of a reference."""
    return pl.ds(index * BLOCK, BLOCK), slice(None)


def _forward_kernel(
    theta_q: Any,
    gate_q: Any,
    positions_q: Any,
    theta_k: Any,
    gate_k: Any,
    positions_k: Any,
    scale: Any,
    omega: Any,
    coupling: Any,
    alignment: Any,
    lse: Any,
    *,
    blocks: int,
) -> None:
    """Coupling, alignment Re(conj(z) G) and normaliser of a block of queries."""
    del blocks
    index = pl.program_id(0)
    dtype = gate_k.dtype
    theta, wide = theta_q[...], coupling.dtype
    rotated = _lift(theta + omega[...] * positions_q[...])
    query = _times(rotated, scale[...] * gate_q[...].astype(theta.dtype), dtype)

    def body(block: jax.Array, carry: tuple) -> tuple:
        top, total, real, imag = carry
        part = _part(block)
        lift = _lift(theta_k[part])
        turned = _lift(theta_k[part] + omega[...] * positions_k[part])
        key = _times(turned, gate_k[part].astype(theta.dtype), dtype)
        score = jnp.where(_visible(index * BLOCK, block * BLOCK), _inner(query, key), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
        weight, shrink = jnp.exp(score - new_top), jnp.exp(top - new_top)
        cos, sin = (x.astype(dtype) for x in lift)
        return (
            new_top,
            shrink * total + jnp.sum(weight, axis=1, keepdims=True),
            shrink * real + dot(weight.astype(dtype), cos),
            shrink * imag + dot(weight.astype(dtype), sin),
        )

    # The first block has the key 0, which every query sees, so that `top` is finite after it.
    start = (
        jnp.full((BLOCK, 1), -jnp.inf, wide),
        jnp.zeros((BLOCK, 1), wide),
        jnp.zeros(theta.shape, wide),
        jnp.zeros(theta.shape, wide),
    )
    top, total, real, imag = lax.fori_loop(0, index + 1, body, start)
    cos, sin = _lift(theta)
    real, imag = real / total, imag / total
    coupling[...] = cos * imag - sin * real
    alignment[...] = cos * real + sin * imag
    lse[...] = top + jnp.log(total)


def _weights_and_slopes(
    query: Pair,
    key: Pair,
    value: Pair,
    cotangent: Pair,
    delta: jax.Array,
    lse: jax.Array,
    visible: jax.Array,
) -> Pair:
    """A_tu and ds_tu of a block of scores."""
    weight = jnp.where(visible, jnp.exp(_inner(query, key) - lse), 0.0)
    return weight, weight * (_inner(cotangent, value) - delta)


def _cotangent_of_resultant(theta: jax.Array, cotangent: jax.Array, dtype: jnp.dtype) -> Pair:
    cos, sin = _lift(theta)
    return (-sin * cotangent).astype(dtype), (cos * cotangent).astype(dtype)


def _query_kernel(
    theta_q: Any,
    gate_q: Any,
    positions_q: Any,
    cotangent: Any,
    delta: Any,
    lse: Any,
    theta_k: Any,
    gate_k: Any,
    positions_k: Any,
    scale: Any,
    omega: Any,
    dphi: Any,
    dgate: Any,
    *,
    blocks: int,
) -> None:
    """What reaches a block of queries: dphi and dgq."""
    del blocks
    index = pl.program_id(0)
    dtype = gate_k.dtype
    theta = theta_q[...]
    cos, sin = _lift(theta + omega[...] * positions_q[...])
    factor = scale[...] * gate_q[...].astype(theta.dtype)
    query = _times((cos, sin), factor, dtype)
    out = _cotangent_of_resultant(theta, cotangent[...], dtype)

    def body(block: jax.Array, carry: Pair) -> Pair:
        part = _part(block)
        value = _times(_lift(theta_k[part]), jnp.ones_like(theta_k[part]), dtype)
        turned = _lift(theta_k[part] + omega[...] * positions_k[part])
        key = _times(turned, gate_k[part].astype(theta.dtype), dtype)
        visible = _visible(index * BLOCK, block * BLOCK)
        _, slope = _weights_and_slopes(query, key, value, out, delta[...], lse[...], visible)
        slope = slope.astype(dtype)
        return carry[0] + dot(slope, key[0]), carry[1] + dot(slope, key[1])

    nothing = jnp.zeros(theta.shape, dphi.dtype)
    dcos, dsin = lax.fori_loop(0, index + 1, body, (nothing, nothing))
    dgate[...] = scale[...] * (cos * dcos + sin * dsin)
    dphi[...] = factor * (cos * dsin - sin * dcos)


def _key_kernel(
    theta_k: Any,
    gate_k: Any,
    positions_k: Any,
    theta_q: Any,
    gate_q: Any,
    positions_q: Any,
    cotangent: Any,
    delta: Any,
    lse: Any,
    scale: Any,
    omega: Any,
    dphi: Any,
    dgate: Any,
    dvalue: Any,
    *,
    blocks: int,
) -> None:
    """What reaches a block of keys and their values: dphi, dgk and the phases' part of dv."""
    index = pl.program_id(0)
    dtype = gate_k.dtype
    theta = theta_k[...]
    lift = _lift(theta)
    cos, sin = _lift(theta + omega[...] * positions_k[...])
    gate = gate_k[...].astype(theta.dtype)
    key, value = _times((cos, sin), gate, dtype), _times(lift, jnp.ones_like(gate), dtype)

    def body(block: jax.Array, carry: tuple) -> tuple:
        part = _part(block)
        turned = _lift(theta_q[part] + omega[...] * positions_q[part])
        query = _times(turned, scale[...] * gate_q[part].astype(theta.dtype), dtype)
        out = _cotangent_of_resultant(theta_q[part], cotangent[part], dtype)
        visible = _visible(block * BLOCK, index * BLOCK)
        weight, slope = _weights_and_slopes(query, key, value, out, delta[part], lse[part], visible)
        weight, slope = weight.astype(dtype), slope.astype(dtype)
        sums = (dot(slope, query[0], (0, 0)), dot(slope, query[1], (0, 0)),
                dot(weight, out[0], (0, 0)), dot(weight, out[1], (0, 0)))  # fmt: skip
        return tuple(a + b for a, b in zip(carry, sums, strict=True))

    nothing = jnp.zeros(theta.shape, dphi.dtype)
    dcos, dsin, dreal, dimag = lax.fori_loop(index, blocks, body, (nothing,) * 4)
    dgate[...] = cos * dcos + sin * dsin
    dphi[...] = gate * (cos * dsin - sin * dcos)
    dvalue[...] = lift[0] * dimag - lift[1] * dreal
