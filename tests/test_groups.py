"""The layer on groups and spheres: against matrices in float64, and as laws.

The reference holds an element as a matrix (complex 1 x 1, complex 2 x 2, real 3 x 3), takes the
exponential of the group from SciPy and gradients by differences: nothing is shared with the code.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import inputs, random_weights
from scipy.linalg import expm

from kuramoto_jax import groups, layer
from kuramoto_jax.groups import SO3, SU2, Sphere, Torus

pytestmark = pytest.mark.usefixtures("x64")

GROUPS = {"torus": Torus(), "su2": SU2(), "so3": SO3()}
MANIFOLDS = GROUPS | {"s2": Sphere(2), "s3": Sphere(3)}
TOKENS, WIDTH = 5, 3

# Compile fast, run slowly.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
attend = jit(layer.kuramoto_attention)

every_group = pytest.mark.parametrize("name", GROUPS)
every_manifold = pytest.mark.parametrize("name", MANIFOLDS)

# Generators of each group, in the order of its algebra, and the one of the subgroup of position.
HALF_TURNS = np.array([[[1j, 0], [0, -1j]], [[0, 1], [-1, 0]], [[0, 1j], [1j, 0]]])
CROSS = np.array(
    [
        [[0, 0, 0], [0, 0, -1], [0, 1, 0]],
        [[0, 0, 1], [0, 0, 0], [-1, 0, 0]],
        [[0, -1, 0], [1, 0, 0], [0, 0, 0]],
    ]
)
GENERATORS = {"torus": np.array([[[1j]]]), "su2": HALF_TURNS, "so3": CROSS}


def as_matrix(name, element):
    """One element [P] as a matrix."""
    if name == "torus":
        return np.array([[np.exp(1j * element[0])]])
    if name == "su2":
        return element[0] * np.eye(2) + np.tensordot(element[1:], HALF_TURNS, 1)
    return np.asarray(element).reshape(3, 3)


def similarity(x, y):
    return np.trace(x.conj().T @ y).real / len(x)


@functools.partial(jit, static_argnums=0)
def from_chart(manifold, chart):
    return manifold.from_chart(chart)


@functools.cache
def elements(name, seed=0, tokens=TOKENS):
    """Elements [T, P, K] all over the manifold, float64 under x64."""
    manifold = MANIFOLDS[name]
    chart = np.random.default_rng(seed).normal(0, 2, (tokens, manifold.dimension, WIDTH))
    return manifold, np.asarray(from_chart(manifold, chart))


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def head(manifold, seed=0):
    """Gates, inverse temperature and rates of one head."""
    _, gate_q, gate_k, tau, omega = inputs(TOKENS, WIDTH, seed)
    return gate_q, gate_k, tau, jnp.tile(omega[None, :], (manifold.rates, 1))


score = jit(groups.score, static_argnums=0)
similar_to = jit(groups.similarity, static_argnums=0)
resultant = jit(groups.resultant, static_argnums=0)
attention = jit(
    groups.group_attention, static_argnums=0, static_argnames=("mask", "implementation")
)


@functools.partial(jit, static_argnums=0)
def embed(manifold, x):
    return manifold.embed(x)


@functools.partial(jit, static_argnums=0)
def project(manifold, features):
    return manifold.project(features)


@functools.partial(jit, static_argnums=0)
def retract(manifold, x, step):
    return manifold.retract(x, step)


@functools.partial(jit, static_argnums=0)
def tangent(manifold, x, features):
    return manifold.tangent(x, features)


@functools.partial(jit, static_argnums=0)
def translated(manifold, by, x):
    """Returns g x for g [1, P, K] of a group; g is a rotation [P, P, K] for a sphere."""
    if isinstance(manifold, Torus):
        return by + x
    if isinstance(manifold, Sphere):
        return jnp.einsum("pqk,tqk->tpk", by, x)
    return manifold.product(jnp.broadcast_to(by, x.shape), x)


def translation(name):
    """One group element a coordinate, not the same for all."""
    manifold = MANIFOLDS[name]
    if isinstance(manifold, Sphere):
        size = manifold.components
        rotations = np.random.default_rng(5).normal(size=(WIDTH, size, size))
        return jnp.asarray(np.linalg.qr(rotations)[0].transpose(1, 2, 0))
    return elements(name, seed=5, tokens=1)[1]


# Against matrices


@every_group
def test_elements_and_similarity_are_those_of_matrices(name):
    manifold, x = elements(name)
    chart = np.random.default_rng(0).normal(0, 2, (TOKENS, manifold.dimension, WIDTH))
    similar = np.asarray(similar_to(manifold, x[:1], x))
    for t, j in np.ndindex(TOKENS, WIDTH):
        matrix = expm(np.tensordot(chart[t, :, j], GENERATORS[name], 1))
        close(as_matrix(name, x[t, :, j]), matrix, 1e-12)
        close(similar[t, j], similarity(as_matrix(name, x[0, :, j]), matrix), 1e-12)
    close(similar[0], 1.0, 1e-14)
    close(embed(manifold, x), embed(manifold, project(manifold, embed(manifold, x))), 1e-12)


@every_group
def test_score_is_that_of_matrices_moved_by_a_subgroup(name):
    manifold, x = elements(name)
    gate_q, gate_k, tau, omega = head(manifold)
    positions = np.array([3, 0, 7, 8, 20])
    found = score(manifold, x, x, gate_q, gate_k, tau, omega, positions, positions)
    generator = GENERATORS[name][-1]
    expected = np.zeros((TOKENS, TOKENS))
    for t, u, j in np.ndindex(TOKENS, TOKENS, WIDTH):
        moved = [
            as_matrix(name, x[i, :, j]) @ expm(float(omega[0, j]) * int(positions[i]) * generator)
            for i in (t, u)
        ]
        expected[t, u] += gate_q[t, j] * gate_k[u, j] * similarity(*moved)
    close(found, tau / math.sqrt(WIDTH) * expected, 1e-11)


@every_group
def test_update_ascends_the_coherence_of_matrices(name):
    manifold, x = elements(name)
    weights, step = random_weights(TOKENS, TOKENS), 1e-5
    found = np.asarray(tangent(manifold, x, resultant(manifold, weights, x)))
    moved = np.asarray(retract(manifold, x, found))
    for t, j in np.ndindex(TOKENS, WIDTH):
        here = as_matrix(name, x[t, :, j])
        others = [as_matrix(name, x[u, :, j]) for u in range(TOKENS)]

        def coherence(at, others=others, t=t):
            return sum(float(weights[t, u]) * similarity(at, y) for u, y in enumerate(others))

        for s, generator in enumerate(GENERATORS[name]):
            ahead, behind = (here @ expm(sign * step * generator) for sign in (1, -1))
            slope = (coherence(ahead) - coherence(behind)) / (2 * step)
            # |d e(x exp(r v))/dr|^2 = |generator|^2 / size: the metric that the embedding induces
            metric = np.sum(np.abs(generator) ** 2) / len(generator)
            close(found[t, s, j], slope / metric, 1e-9)
        algebra = np.tensordot(found[t, :, j], GENERATORS[name], 1)
        close(as_matrix(name, moved[t, :, j]), here @ expm(algebra), 1e-12)


# Laws


@every_manifold
def test_update_is_the_riemannian_gradient_of_the_coherence(name):
    manifold, x = elements(name)
    weights = random_weights(TOKENS, TOKENS)
    update = tangent(manifold, x, resultant(manifold, weights, x))
    others = embed(manifold, x)
    direction = np.random.default_rng(3).normal(size=update.shape)
    direction = manifold.tangential(jnp.asarray(x), jnp.asarray(direction))

    def along(vector):
        """Velocity of e(x) and slope of the coherence, in the direction of a step."""

        def curve(r):
            at = manifold.embed(manifold.retract(jnp.asarray(x), r * vector))
            return at, jnp.einsum("tu,tek,uek->tk", weights, at, others)

        return jax.jvp(curve, (0.0,), (1.0,))[1]

    velocity, slope = jit(along)(direction)
    ascent, steepest = jit(along)(update)
    close(slope, jnp.sum(velocity * ascent, axis=1), 1e-12)  # <grad C, v> = dC(v)
    close(steepest, jnp.sum(ascent**2, axis=1), 1e-12)
    assert np.all(steepest > 0)


@every_manifold
def test_score_and_step_are_invariant_and_the_update_is_equivariant(name):
    manifold, x = elements(name)
    *gates, tau, omega = head(manifold)
    if isinstance(manifold, Sphere):
        omega = None  # turning with position does not commute with every rotation
    by, positions = translation(name), jnp.arange(TOKENS)
    moved = translated(manifold, by, x)
    assert np.abs(embed(manifold, moved) - embed(manifold, x)).max() > 0.5

    scores = [score(manifold, y, y, *gates, tau, omega, positions, positions) for y in (x, moved)]
    close(scores[1], scores[0], 1e-12)

    def update(x):
        step = attention(manifold, x, *gates, tau, omega)
        step = groups.bounded_step(step, jnp.full((WIDTH,), 0.7), "norm")
        return step, retract(manifold, x, step)

    (step, after), (step_moved, after_moved) = update(x), update(moved)
    if not isinstance(manifold, Sphere):
        close(step_moved, step, 1e-12)
    close(embed(manifold, after_moved), embed(manifold, translated(manifold, by, after)), 1e-12)
    assert np.abs(step).max() > 0.01


@every_manifold
@pytest.mark.parametrize("shift", [1, 100_000])
def test_score_depends_on_position_differences_alone(name, shift):
    manifold, x = elements(name)
    arguments, positions = head(manifold), jnp.array([0, 1, 2, 5, 11])
    here = score(manifold, x, x, *arguments, positions, positions)
    there = score(manifold, x, x, *arguments, positions + shift, positions + shift)
    close(there, here, 1e-9)
    wider = score(manifold, x, x, *arguments, 2 * positions, 2 * positions)
    assert np.abs(wider - here).max() > 0.1


@every_manifold
def test_elements_stay_on_the_manifold_through_a_hundred_layers(name):
    manifold, x = elements(name)
    x = jnp.asarray(x, jnp.float32)
    kick = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, manifold.step, WIDTH)))

    def one(_, x):
        pull = groups.group_attention(manifold, x, None, None, jnp.float32(1.0), None)
        pull += manifold.tangential(x, kick.astype(jnp.float32))  # keeps them moving
        return manifold.retract(x, groups.bounded_step(pull, jnp.float32(1.0), "norm"))

    after = jit(lambda x: jax.lax.fori_loop(0, 100, one, x))(x)
    assert after.dtype == jnp.float32
    features = np.asarray(embed(manifold, after), np.float64)
    close(np.sum(features**2, axis=1), 1.0, 2e-6)  # |e| is within 1e-6 of 1
    if name == "so3":
        rotation = np.asarray(after, np.float64).transpose(0, 2, 1).reshape(-1, 3, 3)
        gram = np.einsum("nji,njk->nik", rotation, rotation)
        close(gram, np.broadcast_to(np.eye(3), gram.shape), 1e-6)
        close(np.linalg.det(rotation), 1.0, 2e-6)
    assert np.abs(features - np.asarray(embed(manifold, x))).max() > 0.1


@every_manifold
def test_the_mean_is_where_the_coherence_is_largest(name):
    manifold, x = elements(name)
    weights = random_weights(2, TOKENS)
    total = resultant(manifold, weights, x)
    mean = project(manifold, total)
    close(tangent(manifold, mean, total), 0.0, 1e-12)
    at_mean = jnp.sum(embed(manifold, mean) * total, axis=1)
    for seed in range(20):
        other = elements(name, seed=seed, tokens=2)[1]
        assert np.all(jnp.sum(embed(manifold, other) * total, axis=1) <= at_mean + 1e-12)


@every_manifold
def test_with_uniform_attention_close_elements_meet_at_their_mean(name):
    manifold, _ = elements(name)
    chart = np.random.default_rng(0).normal(0, 0.3, (TOKENS, manifold.dimension, WIDTH))
    x = from_chart(manifold, chart)

    def one(_, x):
        pull = groups.group_attention(manifold, x, None, None, 0.0, None, mask="full")
        return manifold.retract(x, 0.5 * pull)

    after = jit(lambda x: jax.lax.fori_loop(0, 80, one, x))(x)
    close(similar_to(manifold, after, after[:1]), 1.0, 1e-12)
    mean = project(manifold, resultant(manifold, jnp.full((1, TOKENS), 1 / TOKENS), x))
    assert np.all(similar_to(manifold, after[:1], mean) > 0.999)


# The circle


def test_the_torus_is_the_layer():
    theta, *arguments, omega = inputs(TOKENS, WIDTH)
    expected = attend(theta, *arguments, omega)
    for implementation in ("reference", "xla"):
        found = attention(
            Torus(), theta[:, None], *arguments, omega[None], implementation=implementation
        )
        close(found[:, 0], expected, 1e-14)
    for kind in layer.BOUNDS:
        bounded = groups.bounded_step(expected[:, None], jnp.full((WIDTH,), 0.3), kind)
        expected_bounded = layer.bounded(expected, jnp.full((WIDTH,), 0.3), kind)
        close(bounded[:, 0], expected_bounded, 1e-14)
        moved = retract(Torus(), theta[:, None], bounded)
        close(moved[:, 0], theta + expected_bounded, 1e-14)


def test_u1_as_unit_vectors_is_the_layer():
    theta, *arguments, omega = inputs(TOKENS, WIDTH)
    expected = attend(theta, *arguments, omega)
    x = jnp.stack([jnp.cos(theta), jnp.sin(theta)], axis=1)
    step = attention(Sphere(1), x, *arguments, omega[None])
    along = jnp.stack([-jnp.sin(theta), jnp.cos(theta)], axis=1)
    close(step, expected[:, None] * along, 1e-13)
    moved = theta + expected
    after = retract(Sphere(1), x, step)
    close(after, jnp.stack([jnp.cos(moved), jnp.sin(moved)], axis=1), 1e-13)


def test_a_circle_within_a_larger_group_is_the_layer():
    theta, *arguments, omega = inputs(TOKENS, WIDTH)
    expected = attend(theta, *arguments, omega)
    about_k = jnp.stack([jnp.zeros_like(theta), jnp.zeros_like(theta), theta], axis=1)
    step = attention(SU2(), SU2().from_chart(about_k), *arguments, omega[None])
    close(step[:, 2], expected, 1e-12)
    close(step[:, :2], 0.0, 1e-12)


# By hand


@pytest.mark.parametrize("name", ["su2", "so3", "s2"])
def test_the_pull_of_one_element_is_the_sine_of_its_distance(name):
    manifold = MANIFOLDS[name]
    chart = np.zeros((2, manifold.dimension, 2))
    chart[1, 0] = 0.4, 2.5  # two coordinates, each turned about the first axis
    x = from_chart(manifold, chart)
    step = tangent(manifold, x[:1], embed(manifold, x[1:]))
    close(np.sqrt(np.sum(np.square(step), axis=1)), [np.sin([0.4, 2.5])], 1e-12)


def test_a_step_keeps_its_direction_under_the_bound():
    step = jnp.array([[[3.0, 0.0], [4.0, 0.0]]])  # lengths 5 and 0
    close(groups.bounded_step(step, 0.5), np.array([[[0.3, 0], [0.4, 0]]]) * math.tanh(5), 1e-12)
    rms = math.sqrt(12.5)
    expected = 0.5 * math.tanh(rms) / rms * np.asarray(step)
    close(groups.bounded_step(step, 0.5, "norm"), expected, 1e-12)
    with pytest.raises(ValueError, match="'other': must be one of coordinate, norm"):
        groups.bounded_step(step, 0.5, "other")


# Implementations and gradients


@every_manifold
def test_implementations_agree_in_value_and_gradient(name):
    manifold, x = elements(name)
    arguments = (jnp.asarray(x), *head(manifold))
    readout = np.random.default_rng(4).normal(size=(TOKENS, manifold.step, WIDTH))

    def loss(*arguments, implementation):
        step = groups.group_attention(manifold, *arguments, implementation=implementation)
        return jnp.sum(readout * step), step

    results = [
        jit(jax.grad(loss, argnums=range(5), has_aux=True), static_argnames="implementation")(
            *arguments, implementation=implementation
        )
        for implementation in ("reference", "xla")
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        close(one, other, 1e-11)
        assert np.all(np.isfinite(one))


def test_masks():
    manifold, x = elements("su2")
    arguments = (x, *head(manifold))
    full = attention(manifold, *arguments, mask="full")
    table = jnp.ones((TOKENS, TOKENS), bool)
    close(attention(manifold, *arguments, mask="full", implementation="reference"), full, 1e-12)
    free = jit(functools.partial(groups.group_attention, manifold))
    close(free(*arguments, mask=table), full, 1e-12)
    causal = attention(manifold, *arguments)
    close(causal[-1], full[-1], 1e-12)
    close(causal[0], 0.0, 1e-12)
    with pytest.raises(ValueError, match="mask='sideways'"):
        groups.group_attention(manifold, *arguments, mask="sideways")


@every_manifold
def test_gradients_are_finite_where_elements_are_equal_or_opposite(name):
    manifold, _ = elements(name)
    chart = np.zeros((3, manifold.dimension, 1), np.float32)
    chart[2, 0] = np.pi

    def loss(chart, radius):
        x = manifold.from_chart(chart)
        pull = groups.group_attention(manifold, x, None, None, jnp.float32(1.0), None, mask="full")
        after = manifold.retract(x, groups.bounded_step(pull, radius, "norm"))
        return jnp.sum(manifold.embed(after)[:, 0])

    slopes = jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.asarray(chart), jnp.float32(1.0))
    for slope in jax.tree.leaves(slopes):
        assert np.all(np.isfinite(slope))


@every_manifold
def test_half_precision_is_near(name):
    manifold, x = elements(name)
    gate_q, gate_k, tau, omega = (jnp.asarray(a, jnp.float32) for a in head(manifold))
    x = jnp.asarray(x, jnp.float32)
    step = attention(manifold, x, gate_q, gate_k, tau, omega)
    narrow = (g.astype(jnp.bfloat16) for g in (gate_q, gate_k))
    half = attention(manifold, x, *narrow, tau, omega)
    assert half.dtype == jnp.float32
    close(half, step, 0.05)
    assert np.abs(half - step).max() > 0
