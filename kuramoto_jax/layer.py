r"""Kuramoto attention as pure functions of one head, unbatched.

A token's state is a vector of K angles. The layer (paper, section 2) takes these steps, to which
docstrings refer by number:

    1  gates      g = softplus(W psi(theta)) / mean_j softplus(W psi(theta))
    2  score      s_tu = tau / sqrt(K) sum_j gq_tj gk_uj cos(theta_tj - theta_uj + omega_j (t - u))
    3  weights    A_t = softmax over the allowed u of s_tu
    4  resultant  G_tj = sum_u A_tu exp(i theta_uj)
    5  tangent    a_tj = Im(conj(exp(i theta_tj)) G_tj) = sum_u A_tu sin(theta_uj - theta_tj)
    6  value gate v = W_v psi(theta) + b_v, of either sign
    7  attention  theta <- theta + bound(v a)
    8  feed-forward  theta <- theta + bound(SwiGLU(theta))

where psi(theta) = (cos theta, sin theta). Step 5 is an exact Kuramoto coupling term with kernel A.
Steps 2 to 5 and the gate's normalisation and bound are here; the learned maps of steps 1, 6 and 8,
which read all coordinates of a token and not one head's alone, are in `kuramoto_jax.modules`. Batch
and heads come from `jax.vmap`; every function is jit-, grad- and vmap-safe.

Steps 2 to 4 are ordinary scaled dot-product attention in 2K features, which is what the fast
implementations use (`attention_features`): with q_t = tau gq_t psi(theta_t + omega t),
k_u = gk_u psi(theta_u + omega u) and values psi(theta_u), s_tu = q_t . k_u / sqrt(K).

Angles and updates are float32 (float64 where the angles are float64) whatever the compute type,
which is the type of the gates: lower precision starts at the lift, and scores and softmax
accumulate in float32. Float32 products are asked for at full precision on every backend.

Axes are named as in the package docstring: T queries, U keys, K coordinates of a head, C = 2K.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kuramoto_jax import kernels
from kuramoto_jax.kernels.cody_waite import leading_parts
from kuramoto_jax.kernels.sincos import sincos

Mask = str | jax.Array
MASKS = ("causal", "full")
BOUNDS = ("coordinate", "norm")


def _wide(x: jax.Array) -> jax.Array:
    """Returns `x` in the type of angles and sums: float64 stays, all else is float32."""
    return x.astype(kernels.accumulation_dtype(x.dtype))


def phase_features(theta: jax.Array) -> jax.Array:
    """Lifts angles to the plane: psi(theta) = (cos theta, sin theta).

    Args:
      theta: [..., K] angles in radians.

    Returns:
      [..., 2K] in the type of `theta`, the K cosines first, then the K sines (computed in at least
      float32).

    Source: paper, section 2 (the lift).
    """
    sin, cos = sincos(_wide(theta))
    return jnp.concatenate([cos, sin], axis=-1).astype(theta.dtype)


def normalized_gate(preactivation: jax.Array) -> jax.Array:
    """Positive gates of mean one: g = softplus(x) / mean_j softplus(x_j).

    Args:
      preactivation: [..., K], any real numbers.

    Returns:
      [..., K] in the type of `preactivation`: positive (0 where the type underflows), with mean 1
      over the last axis. Where every softplus of a row underflows, the limit is taken: softplus(x)
      is exp(x) there, so the row is the softmax of x times K.

    Source: paper, section 2, step 1.
    """
    x = _wide(preactivation)
    # softplus(x) = exp(x) f(x) with f between log(2) and 1 for x <= 0. Shifting rows that lie far
    # below zero by their maximum leaves the ratio as it is and keeps it from becoming 0 / 0.
    shift = lax.stop_gradient(jnp.minimum(jnp.max(x, axis=-1, keepdims=True) + 20.0, 0.0))
    positive = jax.nn.softplus(x - jnp.broadcast_to(shift, x.shape))
    mean = jnp.mean(positive, axis=-1, keepdims=True)
    return (positive / jnp.broadcast_to(mean, x.shape)).astype(preactivation.dtype)


# The first parts of 2 pi have 8 bits: their products with up to 2^16 turns are exact.
_TWO_PI = leading_parts(2 * math.pi, bits=8, parts=3)


def _reduce_angle(x: jax.Array) -> jax.Array:
    """Reduces an exactly known float32 angle to [-pi, pi], exact to rounding for |x| < 4e5."""
    turns = jnp.round(x * np.float32(1 / (2 * math.pi)))
    for part in _TWO_PI:
        x = x - turns * np.float32(part)
    return x


@jax.custom_jvp
def _reduced_product(omega_K: jax.Array, coarse_T: jax.Array, fine_T: jax.Array) -> jax.Array:
    """Returns omega (coarse + fine) modulo 2 pi, [T, K], without rounding the product first."""
    if omega_K.dtype == jnp.float64:
        return jnp.remainder((coarse_T + fine_T)[:, None] * omega_K[None, :], 2 * math.pi)
    # Halves of 12 bits: each of the four products below is exact in float32, hence so is its
    # reduction, and a compiler that contracts a product and a sum changes nothing.
    bits = lax.bitcast_convert_type(omega_K, jnp.int32)
    high_K = lax.bitcast_convert_type(bits & np.int32(~0xFFF), jnp.float32)
    low_K = omega_K - high_K
    parts = [
        _reduce_angle(position_T[:, None] * rate_K[None, :])
        for position_T in (coarse_T, fine_T)
        for rate_K in (high_K, low_K)
    ]
    return _reduce_angle(functools.reduce(jnp.add, parts))


@_reduced_product.defjvp
def _reduced_product_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    omega_K, coarse_T, fine_T = primals
    omega_dot_K, coarse_dot_T, fine_dot_T = tangents
    tangent_TK = (coarse_T + fine_T)[:, None] * omega_dot_K[None, :]
    tangent_TK += (coarse_dot_T + fine_dot_T)[:, None] * omega_K[None, :]
    return _reduced_product(*primals), tangent_TK


def drift(omega: jax.Array, positions: jax.Array) -> jax.Array:
    """Phase drift omega_j t modulo 2 pi: the rotary position of the paper's Remark 1.

    Multiplied out in float32, omega t loses its accuracy with distance (2^-8 rad at t = 100,000 and
    omega = 1). Here both factors are split so that every partial product is exact, and each is
    reduced before the sum: the error stays below 2e-6 rad for |omega t| < 4e5.

    Args:
      omega: [K] rates in radians a position.
      positions: [T] positions, whole numbers (any real type).

    Returns:
      [T, K] angles, equal to omega_j t up to a multiple of 2 pi; float32, or float64 where `omega`
      is. The derivative is that of omega_j t.
    """
    omega = _wide(omega)
    if jnp.issubdtype(positions.dtype, jnp.integer):
        positions = positions.astype(np.promote_types(positions.dtype, np.int32))
        fine = positions & jnp.asarray(0xFFF, positions.dtype)
    else:
        positions = _wide(positions)
        fine = positions - jnp.floor(positions / 4096) * 4096
    coarse = (positions - fine).astype(omega.dtype)
    return _reduced_product(omega, coarse, fine.astype(omega.dtype))


@jax.custom_vjp
def rotate_features(lift: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotates a lift: psi(theta) becomes psi(theta + angle), without another cosine of theta.

    Args:
      lift: [..., 2K], cosines first, then sines.
      angle: [..., K] radians, of the same leading axes.

    Returns:
      [..., 2K].
    """
    return _rotate_fwd(lift, angle)[0]


def _turned(lift: jax.Array, cos_angle: jax.Array, sin_angle: jax.Array) -> jax.Array:
    cos, sin = jnp.split(lift, 2, axis=-1)
    return jnp.concatenate(
        [cos * cos_angle - sin * sin_angle, sin * cos_angle + cos * sin_angle], axis=-1
    )


def _rotate_fwd(lift: jax.Array, angle: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    sin_angle, cos_angle = sincos(angle)
    rotated = _turned(lift, cos_angle, sin_angle)
    return rotated, (rotated, cos_angle, sin_angle)


def _rotate_bwd(
    residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The transposed map turns back; moving the angle moves the result along its circle.

    Left to automatic differentiation, the gradient of an angle that a batch shares becomes one sum
    with all its factors inside, which the CPU compiler runs along the wrong axis.
    """
    rotated, cos_angle, sin_angle = residuals
    cos, sin = jnp.split(rotated, 2, axis=-1)
    dcos, dsin = jnp.split(cotangent, 2, axis=-1)
    return _turned(cotangent, cos_angle, -sin_angle), cos * dsin - sin * dcos


rotate_features.defvjp(_rotate_fwd, _rotate_bwd)


def gated(gate: jax.Array | None, lift: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Multiplies features by gates, in the compute type.

    Args:
      gate: [T, K] gates; None: none.
      lift: [T, 2K] cosines and sines, or other features of K coordinates, [T, E K].
      scale: [] a further factor.

    Returns:
      [T, E K] in the gates' type where that is a half type, else in the lift's.
    """
    if gate is None:
        return lift if scale is None else lift * scale
    dtype = gate.dtype if gate.dtype.itemsize < 4 else lift.dtype
    gate = gate.astype(lift.dtype)
    if scale is not None:
        gate = gate * scale
    repeats = lift.shape[-1] // gate.shape[-1]
    return (jnp.concatenate([gate] * repeats, axis=-1) * lift).astype(dtype)


def _drifted(lift: jax.Array, omega: jax.Array | None, positions: jax.Array) -> jax.Array:
    """Rotates a lift by the drift of its positions; without rates there is none."""
    if omega is None:
        return lift
    return rotate_features(lift, drift(omega.astype(lift.dtype), positions))


def phase_score(
    theta_q: jax.Array,
    theta_k: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    positions_q: jax.Array,
    positions_k: jax.Array,
) -> jax.Array:
    """Gated cosine similarity of phases that drift with position.

    s_tu = tau / sqrt(K) sum_j gq_tj gk_uj cos(theta_tj - theta_uj + omega_j (t - u))

    Args:
      theta_q: [T, K] angles of the queries.
      theta_k: [U, K] angles of the keys.
      gate_q: [T, K] positive gates of the queries; their type is the compute type. None: no gates.
      gate_k: [U, K] positive gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [K] rates in radians a position; None (or zeros) gives the bare cosine kernel.
      positions_q: [T] positions of the queries.
      positions_k: [U] positions of the keys.

    Returns:
      [T, U] scores, accumulated in at least float32. They depend on positions through t - u alone.

    Source: paper, section 2, step 2 and Remark 1.
    """
    theta_q, theta_k = _wide(theta_q), _wide(theta_k)
    lift_q = _drifted(phase_features(theta_q), omega, positions_q)
    lift_k = _drifted(phase_features(theta_k), omega, positions_k)
    dot_TU = kernels.dot(gated(gate_q, lift_q), gated(gate_k, lift_k), (1, 1))
    return dot_TU * (jnp.asarray(tau, dot_TU.dtype) / math.sqrt(theta_q.shape[-1]))


def attention_weights(score: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Softmax over the keys a query may attend to.

    Row t is the maximiser of sum_u A_tu s_tu + H(A_t) over the simplex on the allowed keys.

    Args:
      score: [T, U] scores.
      mask: [T, U] boolean, True = may attend; None allows every key.

    Returns:
      [T, U] weights in at least float32. A row with nothing to attend to is zero, in value and
      gradient.

    Source: paper, section 2, step 3 and Proposition 2.
    """
    score = _wide(score)
    allowed = jnp.ones(score.shape, bool) if mask is None else jnp.broadcast_to(mask, score.shape)
    # Forbidden scores are replaced before and after the exponential: `where` differentiates both of
    # its branches.
    finite = jnp.where(allowed, score, 0.0)
    top = jnp.max(score, axis=-1, keepdims=True, initial=-jnp.inf, where=allowed)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    unnormalized = jnp.where(allowed, jnp.exp(finite - jnp.broadcast_to(top, score.shape)), 0.0)
    total = jnp.sum(unnormalized, axis=-1, keepdims=True)
    total = jnp.where(total > 0.0, total, 1.0)
    return unnormalized / jnp.broadcast_to(total, score.shape)


def circular_mean(weights: jax.Array, theta_k: jax.Array) -> jax.Array:
    """Resultant of the attended phases: G_tj = sum_u A_tu exp(i theta_uj).

    The argument of G is the mean phase, its modulus (at most one where the weights sum to one) says
    how far the attended tokens agree: the local order parameter.

    Args:
      weights: [T, U] non-negative weights.
      theta_k: [U, K] angles.

    Returns:
      [T, K] complex resultant (complex64, or complex128 where the angles are float64).

    Source: paper, section 2, step 4.
    """
    theta_k = _wide(theta_k)
    weights = weights.astype(theta_k.dtype)
    sin, cos = sincos(theta_k)
    return lax.complex(kernels.dot(weights, cos), kernels.dot(weights, sin))


def tangent_update(theta_q: jax.Array, resultant: jax.Array) -> jax.Array:
    """Component of the resultant along the circle: a = Im(conj(z) G), z = exp(i theta).

    Args:
      theta_q: [T, K] angles.
      resultant: [T, K] complex resultants.

    Returns:
      [T, K] real: a_tj = -sin(theta_tj) Re G_tj + cos(theta_tj) Im G_tj, so |a_tj| <= |G_tj|.

    Source: paper, section 2, step 5 and Proposition 1.
    """
    sin, cos = sincos(_wide(theta_q))
    return -sin * jnp.real(resultant) + cos * jnp.imag(resultant)


def kuramoto_coupling(weights: jax.Array, theta_q: jax.Array, theta_k: jax.Array) -> jax.Array:
    """Kuramoto coupling written out: a_tj = sum_u A_tu sin(theta_uj - theta_tj).

    Equal to `tangent_update(theta_q, circular_mean(weights, theta_k))`, in O(T U K) memory: for
    tests and analysis.

    Args:
      weights: [T, U] coupling kernel.
      theta_q: [T, K] angles that are moved.
      theta_k: [U, K] angles they couple to.

    Returns:
      [T, K] coupling; positive where a phase is pulled forward.

    Source: paper, Proposition 1.
    """
    theta_q, theta_k = _wide(theta_q), _wide(theta_k)
    difference_TUK = theta_k[None, :, :] - theta_q[:, None, :]
    return jnp.sum(weights.astype(theta_q.dtype)[:, :, None] * jnp.sin(difference_TUK), axis=1)


def tanh_over_root(square: jax.Array) -> jax.Array:
    """Returns tanh(x) / x as a smooth function of x^2 >= 0, finite in value and slope at 0."""
    small = square < 1e-4
    root = jnp.sqrt(jnp.where(small, 1.0, square))
    series = 1.0 - square / 3.0 + 2.0 * square * square / 15.0
    return jnp.where(small, series, jnp.tanh(root) / root)


def bounded(
    increment: jax.Array,
    radius: jax.typing.ArrayLike,
    kind: str = "coordinate",
) -> jax.Array:
    """Tanh bound on an angle increment, with a learned radius.

    coordinate: r_j tanh(x_j)
    norm:       r_j tanh(rms(x)) x_j / rms(x), rms over the last axis

    Both scale small increments by the radius and leave their proportions; large ones are squeezed
    towards the radius, each coordinate for itself or the increment as a whole.

    Args:
      increment: [..., K] proposed increments, below 1e18 in float32.
      radius: radii in radians, broadcast against `increment`: the most that a coordinate moves
        ("coordinate"), or that the increment's root mean square reaches for equal radii ("norm").
      kind: "coordinate" or "norm". The paper's text leaves open which; both are offered.

    Returns:
      [..., K] bounded increments, finite in value and gradient, at 0 too.

    Raises:
      ValueError: for another `kind`.

    Source: paper, section 2, steps 7 and 8.
    """
    if kind not in BOUNDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(BOUNDS)}")
    radius = jnp.broadcast_to(jnp.asarray(radius, increment.dtype), increment.shape)
    if kind == "coordinate":
        return radius * jnp.tanh(increment)
    mean_square = jnp.mean(jnp.square(increment), axis=-1, keepdims=True)
    return radius * increment * jnp.broadcast_to(tanh_over_root(mean_square), increment.shape)


def order_parameter(theta: jax.Array, axis: int | Sequence[int] = -1) -> jax.Array:
    """Mean phasor: R exp(i Phi) = mean over `axis` of exp(i theta).

    Its modulus is 1 when all phases agree and 0 when they balance; 2 pi periodic in each phase.

    Args:
      theta: angles of any shape.
      axis: axis or axes to average over.

    Returns:
      Complex array without the averaged axes.
    """
    theta = _wide(theta)
    axis = axis if isinstance(axis, int) else tuple(axis)
    sin, cos = sincos(theta)
    return lax.complex(jnp.mean(cos, axis=axis), jnp.mean(sin, axis=axis))


def mask_array(mask: Mask, queries: int, keys: int) -> jax.Array | None:
    """Returns a mask as a boolean [T, U] array, or None where every key is allowed.

    Args:
      mask: "causal" (key index at most the query index), "full", or a boolean array.
      queries: T.
      keys: U.

    Raises:
      ValueError: for another string, or an array that is not boolean or not [T, U].
    """
    if isinstance(mask, str):
        if mask not in MASKS:
            raise ValueError(f"mask={mask!r}: must be a boolean array or one of {', '.join(MASKS)}")
        return jnp.tri(queries, keys, dtype=bool) if mask == "causal" else None
    if mask.dtype != jnp.bool_ or mask.shape != (queries, keys):
        raise ValueError(
            f"mask: must be a boolean array of shape {(queries, keys)}, "
            f"got {mask.dtype} {mask.shape}"
        )
    return mask


def attention_features(
    lift: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value features whose dot-product attention is steps 2 to 4.

    q_t = tau / sqrt(K) gq_t psi(theta_t + omega t), k_u = gk_u psi(theta_u + omega u),
    v_u = psi(theta_u).

    Args:
      lift: [T, 2K] psi(theta), as `phase_features` gives it.
      gate_q: [T, K] gates of the queries; their type is the compute type. None: no gates.
      gate_k: [T, K] gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [K] rates in radians a position; None: no drift.
      positions: [T] positions.

    Returns:
      Three [T, 2K] arrays in the compute type. The attention they define has no further scale.
    """
    rotated = _drifted(lift, omega, positions)
    scale = jnp.asarray(tau, lift.dtype) / math.sqrt(lift.shape[-1] // 2)
    query, key = gated(gate_q, rotated, scale), gated(gate_k, rotated)
    return query, key, lift.astype(query.dtype)


def tangent_from_lift(lift: jax.Array, resultant: jax.Array) -> jax.Array:
    """`tangent_update` on lifts: -sin(theta) Re G + cos(theta) Im G.

    Args:
      lift: [T, 2K] psi(theta).
      resultant: [T, 2K], Re G first, then Im G.

    Returns:
      [T, K] in the type of the lift.
    """
    cos, sin = jnp.split(lift, 2, axis=-1)
    real, imag = jnp.split(resultant.astype(lift.dtype), 2, axis=-1)
    return cos * imag - sin * real


def kuramoto_attention(
    theta: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    *,
    positions: jax.Array | None = None,
    mask: Mask = "causal",
    implementation: str = "auto",
) -> jax.Array:
    """Steps 2 to 5 in one call: from phases and gates to the coupling each phase feels.

    a_tj = sum_u A_tu sin(theta_uj - theta_tj), A_t = softmax_u s_tu, s as in `phase_score`.

    Args:
      theta: [T, K] angles of one head.
      gate_q: [T, K] positive gates of the queries; their type is the compute type. None: no gates.
      gate_k: [T, K] positive gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [K] rates in radians a position; None: no drift.
      positions: [T] integer positions; 0, 1, ... T - 1 where absent.
      mask: "causal" (a token attends to itself and to earlier ones), "full", or a boolean [T, T]
        array, True = may attend. A token with nothing to attend to feels no coupling.
      implementation: "reference" composes the functions of this module; "xla" never holds the
        [T, T] matrix and is fast on CPU and correct everywhere; "cudnn" is for half precision on
        NVIDIA GPUs; "pallas" makes queries, keys and values inside its kernel, on GPU and TPU
        (interpreted, and slow, on CPU); "auto" picks. All agree in value and gradient. One that
        does not work with these arguments here gives way to "xla" and says so once in the log.

    Returns:
      [T, K] coupling, float32 (float64 where `theta` is), |a| <= 1.

    Raises:
      ValueError: for an unknown mask or implementation.

    Source: paper, section 2, steps 2 to 5.
    """
    length = theta.shape[0]
    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)
    causal = isinstance(mask, str) and mask == "causal"
    dtype = theta.dtype if gate_q is None else gate_q.dtype
    chosen = kernels.resolve(
        implementation, dtype, 2 * theta.shape[-1], causal=causal, from_phases=True
    )
    if chosen == "reference":
        score = phase_score(theta, theta, gate_q, gate_k, tau, omega, positions, positions)
        weights = attention_weights(score, mask_array(mask, length, length))
        return tangent_update(theta, circular_mean(weights, theta))
    if chosen == "pallas":
        return kernels.pallas.coupling(_wide(theta), gate_q, gate_k, tau, omega, positions)
    lift = phase_features(_wide(theta))
    query, key, value = attention_features(lift, gate_q, gate_k, tau, omega, positions)
    if chosen == "cudnn":
        one_head = (x[None, None] for x in (query, key, value))
        resultant = kernels.cudnn.attention(*one_head)[0, 0]
    else:
        allowed = None if causal else mask_array(mask, length, length)
        resultant = kernels.attention(query, key, value, allowed, causal=causal)
    return tangent_from_lift(lift, resultant)
