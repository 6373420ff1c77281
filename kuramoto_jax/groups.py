r"""The layer on other manifolds: compact groups, and spheres as the homogeneous case.

An invariant similarity and a mean on the manifold define the layer on any compact group G (paper,
section 2). Here every group is embedded in a Euclidean space, e: G -> R^E with |e(x)| = 1, so that
<e(x), e(y)> is invariant under translation, and steps 2 to 8 of `kuramoto_jax.layer` become

    2  score      s_tu = tau / sqrt(K) sum_j gq_tj gk_uj <e(x_tj p_j(t)), e(x_uj p_j(u))>
    4  resultant  G_tj = sum_u A_tu e(x_uj); the mean is the element nearest to it
    5  tangent    a_tj = gradient of <e(x), G_tj> at x = x_tj, in the metric that e induces
    7  update     x <- x exp(v a), v a signed gate and exp the group's exponential map

p_j(t) = exp(t omega_j xi) is a one-parameter subgroup, which plays the part of the phase drift. A
translation from the left, x -> g x, leaves score and a as they are and carries the update along; p
acts from the right, and since <e(x p(t)), e(y p(u))> = <e(x p(t - u)), e(y)> the score depends on
positions through t - u alone. Which xi it is does not matter: another one is another name for x.

On the circle a = sin(theta_u - theta_t) averaged: the Kuramoto coupling. On the others a has the
length sin(phi) where a single element is attended to that a rotation by phi reaches.

Element arrays are [..., P, K]: P numbers hold an element, the coordinates come last. Features are
[..., E, K], tangent steps [..., S, K]. A step on a group is an element of its Lie algebra (S = n,
its dimension), on a sphere a vector of the surrounding space orthogonal to x (S = P). Functions are
pure, of one head and without batch, as in `kuramoto_jax.layer`.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp

from kuramoto_jax import kernels, layer
from kuramoto_jax.kernels.sincos import sincos


@dataclasses.dataclass(frozen=True)
class Manifold(abc.ABC):
    """What the layer has to know of a manifold.

    Attributes:
      dimension: n, coordinates of the chart.
      components: P, numbers that hold an element.
      features: E, numbers of an embedded element.
      step: S, numbers of a tangent step.
      rates: R, rates of a one-parameter subgroup.
    """

    dimension: int
    components: int
    features: int
    step: int
    rates: int

    @abc.abstractmethod
    def from_chart(self, chart: jax.Array) -> jax.Array:
        """Returns the elements [..., P, K] of chart coordinates [..., n, K]; 0 is the identity."""

    @abc.abstractmethod
    def embed(self, x: jax.Array) -> jax.Array:
        """Returns features [..., E, K] of length 1, whose products are the similarity."""

    @abc.abstractmethod
    def project(self, features: jax.Array) -> jax.Array:
        """Returns the elements nearest to features [..., E, K]: of a resultant, the mean."""

    @abc.abstractmethod
    def tangent(self, x: jax.Array, resultant: jax.Array) -> jax.Array:
        """Returns the gradient [..., S, K] of <e(x), G> for a resultant G [..., E, K]."""

    def tangential(self, x: jax.Array, vector: jax.Array) -> jax.Array:
        """Returns the part of a vector [..., S, K] that is a step at x: on a group, all of it."""
        del x
        return vector

    @abc.abstractmethod
    def retract(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """Returns the elements that tangent steps [..., S, K] lead to, by the exponential map."""

    @abc.abstractmethod
    def advance(self, x: jax.Array, angle: jax.Array) -> jax.Array:
        """Moves x along a one-parameter subgroup by angles [..., R, K], of period 2 pi."""


def _cos_and_sinc(square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos(x) and sin(x) / x as smooth functions of x^2 >= 0."""
    small = square < 1e-3
    root = jnp.sqrt(jnp.where(small, 1.0, square))
    sin, cos = sincos(root)
    cos_series = 1.0 - square / 2.0 + square * square / 24.0
    sinc_series = 1.0 - square / 6.0 + square * square / 120.0
    return jnp.where(small, cos_series, cos), jnp.where(small, sinc_series, sin / root)


def _square(x: jax.Array) -> jax.Array:
    """Squared length [..., 1, K] of vectors [..., P, K]."""
    return jnp.sum(x * x, axis=-2, keepdims=True)


def _unit(x: jax.Array) -> jax.Array:
    """Vectors [..., P, K] scaled to length 1; zero has no direction and becomes the first axis."""
    square = _square(x)
    zero = square == 0.0
    first = jnp.zeros(x.shape, x.dtype).at[..., 0, :].set(1.0)
    length = jnp.sqrt(jnp.where(zero, 1.0, square))
    return jnp.where(zero, first, x / length)


def _flat(features: jax.Array) -> jax.Array:
    """Features [..., E, K] as [..., E K], the first of all coordinates before the second."""
    return features.reshape(*features.shape[:-2], -1)


class Torus(Manifold):
    """U(1) as angles, in closed form: the layer of `kuramoto_jax.layer`."""

    def __init__(self) -> None:
        super().__init__(dimension=1, components=1, features=2, step=1, rates=1)

    def from_chart(self, chart: jax.Array) -> jax.Array:
        """An angle is its own chart."""
        return chart

    def embed(self, x: jax.Array) -> jax.Array:
        """(cos theta, sin theta)."""
        lift = layer.phase_features(x[..., 0, :])
        return lift.reshape(*x.shape[:-2], 2, x.shape[-1])

    def project(self, features: jax.Array) -> jax.Array:
        """The argument."""
        return jnp.arctan2(features[..., 1:, :], features[..., :1, :])

    def tangent(self, x: jax.Array, resultant: jax.Array) -> jax.Array:
        """Im(conj(z) G)."""
        return layer.tangent_from_lift(_flat(self.embed(x)), _flat(resultant))[..., None, :]

    def retract(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """Theta + a."""
        return x + step

    def advance(self, x: jax.Array, angle: jax.Array) -> jax.Array:
        """Theta + angle."""
        return x + angle


class _UnitVectors(Manifold):
    """Elements that are unit vectors of n + 1 components, and their own features."""

    def from_chart(self, chart: jax.Array) -> jax.Array:
        """The exponential map at the first axis: (cos |v|, v sin |v| / |v|)."""
        cos, sinc = _cos_and_sinc(_square(chart))
        return jnp.concatenate([cos, sinc * chart], axis=-2)

    def embed(self, x: jax.Array) -> jax.Array:
        """The vector itself."""
        return x

    def project(self, features: jax.Array) -> jax.Array:
        """G / |G|."""
        return _unit(features)


class SU2(_UnitVectors):
    """SU(2) as unit quaternions (w, x, y, z), P = 4; the algebra is that of pure quaternions.

    The similarity <q, p> = Re(conj(q) p) is the cosine of half the angle between two rotations.
    """

    def __init__(self) -> None:
        super().__init__(dimension=3, components=4, features=4, step=3, rates=1)

    def product(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Hamilton's product [..., 4, K]."""
        (a, b, c, d), (e, f, g, h) = _parts(x), _parts(y)
        return jnp.stack(
            [
                a * e - b * f - c * g - d * h,
                a * f + b * e + c * h - d * g,
                a * g - b * h + c * e + d * f,
                a * h + b * g - c * f + d * e,
            ],
            axis=-2,
        )

    def tangent(self, x: jax.Array, resultant: jax.Array) -> jax.Array:
        """The pure part of conj(q) G."""
        conjugate = jnp.concatenate([x[..., :1, :], -x[..., 1:, :]], axis=-2)
        return self.product(conjugate, resultant)[..., 1:, :]

    def retract(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """Q exp(a), scaled to length 1 against rounding."""
        return _unit(self.product(x, self.from_chart(step)))

    def advance(self, x: jax.Array, angle: jax.Array) -> jax.Array:
        """Q exp(angle k)."""
        (w, i, j, k), (sin, cos) = _parts(x), sincos(angle[..., 0, :])
        turned = [w * cos - k * sin, i * cos + j * sin, j * cos - i * sin, k * cos + w * sin]
        return jnp.stack(turned, axis=-2)


class SO3(Manifold):
    """SO(3) as rotation matrices, P = 9 in rows; the algebra is that of rotation vectors.

    The similarity tr(R^T Q) / 3 is (1 + 2 cos phi) / 3 where R^T Q is a rotation by phi.
    """

    def __init__(self) -> None:
        super().__init__(dimension=3, components=9, features=9, step=3, rates=1)

    def from_chart(self, chart: jax.Array) -> jax.Array:
        """Rodrigues' formula: exp of the rotation vector v."""
        square = _square(chart)
        cos, sinc = _cos_and_sinc(square)
        _, half = _cos_and_sinc(square / 4.0)
        outer = half * half / 2.0  # (1 - cos |v|) / |v|^2
        (x, y, z), (cos, sinc, outer) = _parts(chart), (a[..., 0, :] for a in (cos, sinc, outer))
        rows = [
            [cos + outer * x * x, outer * x * y - sinc * z, outer * x * z + sinc * y],
            [outer * x * y + sinc * z, cos + outer * y * y, outer * y * z - sinc * x],
            [outer * x * z - sinc * y, outer * y * z + sinc * x, cos + outer * z * z],
        ]
        return jnp.stack([entry for row in rows for entry in row], axis=-2)

    def embed(self, x: jax.Array) -> jax.Array:
        """R / sqrt(3)."""
        return x * (1 / math.sqrt(3))

    def project(self, features: jax.Array) -> jax.Array:
        """The nearest rotation U diag(1, 1, det(U V^T)) V^T of G = U S V^T.

        Its gradient is not finite everywhere; the layer does without it.
        """
        u, _, vt = jnp.linalg.svd(jnp.moveaxis(_matrix(features), -1, -3))
        last = jnp.linalg.det(u @ vt)[..., None, None]
        u = jnp.concatenate([u[..., :2], u[..., 2:] * last], axis=-1)
        return jnp.moveaxis(u @ vt, -3, -1).reshape(features.shape)

    def product(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Matrix product [..., 9, K]."""
        return _matrix_product(_matrix(x), _matrix(y)).reshape(x.shape)

    def tangent(self, x: jax.Array, resultant: jax.Array) -> jax.Array:
        """The axial vector of (M - M^T) / 2, M = sqrt(3) R^T G: sin(phi) about the axis."""
        m = _matrix_product(_transposed(_matrix(x)), _matrix(resultant))
        axial = [m[..., i, j, :] - m[..., j, i, :] for i, j in ((2, 1), (0, 2), (1, 0))]
        return jnp.stack(axial, axis=-2) * (math.sqrt(3) / 2)

    def retract(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """R exp(a), and one step of Newton and Schulz to the nearest rotation against rounding."""
        moved = self.product(x, self.from_chart(step))
        gram = _matrix_product(_transposed(_matrix(moved)), _matrix(moved)).reshape(x.shape)
        correction = 1.5 * self.from_chart(jnp.zeros_like(step)) - 0.5 * gram
        return self.product(moved, correction)

    def advance(self, x: jax.Array, angle: jax.Array) -> jax.Array:
        """R times the rotation by `angle` about the third axis."""
        sin, cos = sincos(angle[..., 0, :])
        first, second, third = (_matrix(x)[..., :, i, :] for i in range(3))
        sin, cos = (a[..., None, :] for a in (sin, cos))
        columns = [first * cos + second * sin, second * cos - first * sin, third]
        return jnp.stack(columns, axis=-2).reshape(x.shape)


class Sphere(_UnitVectors):
    """S^n in n + 1 dimensions: not a group but the homogeneous case that AKOrN uses.

    Rotations of the surrounding space take the part of translations. The one-parameter subgroup
    turns components in pairs, so a score with drift is invariant under what commutes with that.
    """

    def __init__(self, dimension: int) -> None:
        ambient = dimension + 1
        super().__init__(dimension, ambient, ambient, ambient, rates=ambient // 2)

    def tangent(self, x: jax.Array, resultant: jax.Array) -> jax.Array:
        """G - <x, G> x."""
        return resultant - x * jnp.sum(x * resultant, axis=-2, keepdims=True)

    def tangential(self, x: jax.Array, vector: jax.Array) -> jax.Array:
        """What is orthogonal to x."""
        return self.tangent(x, vector)

    def retract(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """Returns cos |a| x + sin |a| / |a| a, scaled to length 1 against rounding."""
        cos, sinc = _cos_and_sinc(_square(step))
        return _unit(cos * x + sinc * step)

    def advance(self, x: jax.Array, angle: jax.Array) -> jax.Array:
        """Turns components 2i and 2i + 1 by angle i; an odd one out stays."""
        sin, cos = sincos(angle)
        pairs = 2 * self.rates
        even, odd = x[..., 0:pairs:2, :], x[..., 1:pairs:2, :]
        turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-2)
        turned = turned.reshape(*x.shape[:-2], pairs, x.shape[-1])
        return jnp.concatenate([turned, x[..., pairs:, :]], axis=-2)


def _parts(x: jax.Array) -> list[jax.Array]:
    """The components [..., K] of [..., P, K]."""
    return [x[..., i, :] for i in range(x.shape[-2])]


def _matrix(x: jax.Array) -> jax.Array:
    """[..., 9, K] as [..., 3, 3, K]."""
    return x.reshape(*x.shape[:-2], 3, 3, x.shape[-1])


def _transposed(x: jax.Array) -> jax.Array:
    """Transposes matrices [..., 3, 3, K]."""
    return jnp.swapaxes(x, -3, -2)


def _matrix_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Matrix product of [..., 3, 3, K], written out: the coordinates stay last."""
    return jnp.sum(x[..., :, :, None, :] * y[..., None, :, :, :], axis=-3)


def similarity(manifold: Manifold, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns <e(x), e(y)> [..., K] of elements [..., P, K]; 1 where they are equal."""
    return jnp.sum(manifold.embed(x) * manifold.embed(y), axis=-2)


def _moved(
    manifold: Manifold, x: jax.Array, omega: jax.Array | None, positions: jax.Array
) -> jax.Array:
    """Features [T, E, K] of elements that positions have moved; without rates none has."""
    if omega is None:
        return manifold.embed(x)
    angle = layer.drift(omega.reshape(-1).astype(x.dtype), positions)
    return manifold.embed(manifold.advance(x, angle.reshape(x.shape[0], *omega.shape)))


def score(
    manifold: Manifold,
    x_q: jax.Array,
    x_k: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    positions_q: jax.Array,
    positions_k: jax.Array,
) -> jax.Array:
    """Gated similarity of elements that move with position (step 2).

    s_tu = tau / sqrt(K) sum_j gq_tj gk_uj <e(x_tj p_j(t)), e(x_uj p_j(u))>

    Args:
      manifold: where the elements are.
      x_q: [T, P, K] elements of the queries.
      x_k: [U, P, K] elements of the keys.
      gate_q: [T, K] positive gates of the queries; their type is the compute type. None: no gates.
      gate_k: [U, K] positive gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [R, K] rates in radians a position; None: elements do not move with position.
      positions_q: [T] positions of the queries.
      positions_k: [U] positions of the keys.

    Returns:
      [T, U] scores, accumulated in at least float32.
    """
    features_q = _flat(_moved(manifold, x_q, omega, positions_q))
    features_k = _flat(_moved(manifold, x_k, omega, positions_k))
    query, key = layer.gated(gate_q, features_q), layer.gated(gate_k, features_k)
    dot_TU = kernels.dot(query, key, (1, 1))
    return dot_TU * (jnp.asarray(tau, dot_TU.dtype) / math.sqrt(x_q.shape[-1]))


def resultant(manifold: Manifold, weights: jax.Array, x_k: jax.Array) -> jax.Array:
    """Weighted sum of embedded elements: G_tj = sum_u A_tu e(x_uj) (step 4).

    Its projection is the mean of the attended elements: the element that maximises their coherence
    sum_u A_tu <e(x), e(x_uj)>. Its length, at most one, says how far they agree.

    Args:
      manifold: where the elements are.
      weights: [T, U] non-negative weights.
      x_k: [U, P, K] elements.

    Returns:
      [T, E, K].
    """
    features = manifold.embed(x_k)
    return kernels.dot(weights.astype(features.dtype), _flat(features)).reshape(
        weights.shape[0], *features.shape[1:]
    )


def attention_features(
    manifold: Manifold,
    x: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value features whose dot-product attention is steps 2 to 4.

    Args:
      manifold: where the elements are.
      x: [T, P, K] elements.
      gate_q: [T, K] gates of the queries; their type is the compute type. None: no gates.
      gate_k: [T, K] gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [R, K] rates in radians a position; None: elements do not move with position.
      positions: [T] positions.

    Returns:
      Three [T, E K] arrays in the compute type. The attention they define has no further scale.
    """
    moved = _flat(_moved(manifold, x, omega, positions))
    scale = jnp.asarray(tau, x.dtype) / math.sqrt(x.shape[-1])
    query, key = layer.gated(gate_q, moved, scale), layer.gated(gate_k, moved)
    return query, key, _flat(manifold.embed(x)).astype(query.dtype)


def group_attention(
    manifold: Manifold,
    x: jax.Array,
    gate_q: jax.Array | None,
    gate_k: jax.Array | None,
    tau: jax.typing.ArrayLike,
    omega: jax.Array | None,
    *,
    positions: jax.Array | None = None,
    mask: layer.Mask = "causal",
    implementation: str = "auto",
) -> jax.Array:
    """Steps 2 to 5 in one call: from elements and gates to the tangent step of each.

    Args:
      manifold: where the elements are.
      x: [T, P, K] elements of one head.
      gate_q: [T, K] positive gates of the queries; their type is the compute type. None: no gates.
      gate_k: [T, K] positive gates of the keys, likewise.
      tau: [] inverse temperature.
      omega: [R, K] rates in radians a position; None: elements do not move with position.
      positions: [T] integer positions; 0, 1, ... T - 1 where absent.
      mask: as in `layer.kuramoto_attention`.
      implementation: likewise; "pallas" gives way to "xla".

    Returns:
      [T, S, K] steps, |a| <= 1, which `Manifold.retract` takes.

    Raises:
      ValueError: for an unknown mask or implementation.
    """
    length = x.shape[0]
    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)
    causal = isinstance(mask, str) and mask == "causal"
    allowed = layer.mask_array(mask, length, length)
    dtype = x.dtype if gate_q is None else gate_q.dtype
    features = manifold.features * x.shape[-1]
    chosen = kernels.resolve(implementation, dtype, features, causal=causal)
    if chosen == "reference":
        scores = score(manifold, x, x, gate_q, gate_k, tau, omega, positions, positions)
        mean = resultant(manifold, layer.attention_weights(scores, allowed), x)
        return manifold.tangent(x, mean)
    query, key, value = attention_features(manifold, x, gate_q, gate_k, tau, omega, positions)
    if causal:
        mean = kernels.causal_attention(
            query[None, None], key[None, None], value[None, None], chosen
        )
        mean = mean[0, 0]
    else:
        mean = kernels.attention(query, key, value, allowed, causal=False)
    mean = mean.astype(x.dtype).reshape(length, manifold.features, x.shape[-1])
    return manifold.tangent(x, mean)


def bounded_step(
    step: jax.Array, radius: jax.typing.ArrayLike, kind: str = "coordinate"
) -> jax.Array:
    """Tanh bound on the lengths of tangent steps: `layer.bounded` for more than one dimension.

    coordinate: r_j tanh(|a_j|) a_j / |a_j|
    norm:       r_j tanh(rms) a_j / rms, rms^2 the mean of |a_j|^2 over the coordinates

    The direction of a step stays, so a tangent vector stays one.

    Args:
      step: [..., S, K] steps.
      radius: [K] or [] radii.
      kind: "coordinate" or "norm".

    Returns:
      [..., S, K].

    Raises:
      ValueError: for another `kind`.
    """
    if kind not in layer.BOUNDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(layer.BOUNDS)}")
    square = _square(step)
    if kind == "norm":
        square = jnp.mean(square, axis=-1, keepdims=True)
    radius = jnp.broadcast_to(jnp.asarray(radius, step.dtype), step.shape)
    return radius * step * jnp.broadcast_to(layer.tanh_over_root(square), step.shape)
