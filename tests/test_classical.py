"""The layer against the theory of coupled oscillators: thresholds, order parameters, clusters.

With constant gates, tau = 0 and no mask attention is uniform, and a step of the layer is an Euler
step of Kuramoto's equations on a complete graph. The runs below are made of the layer's own
functions; one coordinate is one population, its N oscillators are the tokens.

Natural frequencies are the quantiles of a Lorentzian of half width gamma, so nothing is random: for
that distribution Ott and Antonsen (Chaos 18, 037113, 2008) reduce a population to its mean phasor,

    dr/dt = r (K cos(alpha) / 2 (1 - r^2) - gamma)
    dPhi/dt = -K sin(alpha) / 2 (1 + r^2)

with the frustration alpha of Sakaguchi and Kuramoto (Prog. Theor. Phys. 76, 576, 1986), so r grows
from incoherence if K > K_c = 2 / (pi g(0)) = 2 gamma (alpha = 0), towards sqrt(1 - K_c / K).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import circular_mean, inputs, order_parameter, tangent_update

from kuramoto_jax import layer

GAMMA, OSCILLATORS, DT = 0.5, 2000, 0.04
THRESHOLD = 2 / (np.pi * (1 / (np.pi * GAMMA)))  # 2 / (pi g(0))


kuramoto_attention = jax.jit(layer.kuramoto_attention, static_argnames=("mask", "implementation"))


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def harmonic_coupling(theta, harmonic):
    """(1 / N) sum_u sin(m (theta_u - theta_t)) of populations [N, P]: the layer on m theta."""
    turned = harmonic * theta
    mean = layer.order_parameter(turned, axis=0)
    return layer.tangent_update(turned, jnp.broadcast_to(mean[None, :], theta.shape))


@functools.partial(jax.jit, static_argnames=("steps",))
def population(theta, natural, coupling, frustration, *, steps):
    """Mean phasors [steps, P] of populations [N, P] under Euler steps of Sakaguchi's equations."""

    def step(theta, _):
        mean = layer.order_parameter(theta, axis=0)
        resultant = jnp.broadcast_to(mean[None, :], theta.shape)
        pull = layer.tangent_update(theta + frustration[None, :], resultant)
        return theta + DT * (natural[:, None] + coupling[None, :] * pull), mean

    return jax.lax.scan(step, theta, length=steps)[1]


def lorentzian():
    """Quantiles [N] of the Lorentzian of half width gamma about 0."""
    middle = (np.arange(OSCILLATORS) + 0.5) / OSCILLATORS
    return GAMMA * np.tan(np.pi * (middle - 0.5))


def spread(start):
    """Phases [N], whatever their frequency, of mean phasor `start`: a Poisson kernel."""
    even = 2 * np.pi * ((np.arange(OSCILLATORS) * (np.sqrt(5) - 1) / 2) % 1) - np.pi
    return 2 * np.arctan((1 - start) / (1 + start) * np.tan(even / 2))


def run(start, couplings, frustrations=None, *, time):
    """Times [S] and mean phasors [S, P] of populations that differ in their coupling."""
    couplings = np.asarray(couplings, np.float32)
    frustrations = np.zeros_like(couplings) if frustrations is None else np.float32(frustrations)
    theta = np.tile(spread(start)[:, None], len(couplings)).astype(np.float32)
    steps = round(time / DT)
    natural = lorentzian().astype(np.float32)
    args = (jnp.asarray(a) for a in (theta, natural, couplings, frustrations))
    return DT * np.arange(steps), np.asarray(population(*args, steps=steps))


# One step


def euler_step(theta, natural, frustration):
    """Sakaguchi's equations with coupling 2, written out."""
    after = np.array(theta)
    for t, j in np.ndindex(after.shape):
        lead = np.asarray(theta)[:, j] - float(theta[t, j]) - frustration
        after[t, j] += DT * (natural[t, j] + 2.0 * np.mean(np.sin(lead)))
    return after


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_step_with_uniform_attention_is_an_euler_step_on_a_complete_graph(x64, implementation):
    theta, gate, *_ = inputs(7, 3)
    natural, constant = np.random.default_rng(1).normal(size=(7, 3)), jnp.full_like(gate, 1.5)
    pull = kuramoto_attention(
        theta, constant, constant, 0.0, None, mask="full", implementation=implementation
    )
    close(pull, harmonic_coupling(theta, 1), 1e-14)
    close(theta + DT * (natural + 2.0 * pull), euler_step(theta, natural, 0.0), 1e-14)


def test_a_phase_lag_makes_it_a_step_of_sakaguchis_equations(x64):
    theta, natural = inputs(7, 3)[0], np.random.default_rng(1).normal(size=(7, 3))
    mean = circular_mean(jnp.full((7, 7), 1 / 7), theta)
    pull = tangent_update(theta + 0.6, mean)
    close(theta + DT * (natural + 2.0 * pull), euler_step(theta, natural, 0.6), 1e-14)


# Lorentzian frequencies


def test_quantiles_have_the_density_of_the_lorentzian():
    frequencies = lorentzian()
    inside = np.abs(frequencies) < GAMMA / 10
    close(np.mean(inside) / (GAMMA / 5), 2 / (np.pi * THRESHOLD), 0.02)
    close(np.mean(np.abs(frequencies) < GAMMA), 0.5, 1e-6)


def test_a_population_starts_with_the_mean_phasor_it_is_given():
    close(np.mean(np.exp(1j * spread(0.3))), 0.3, 2e-3)


def test_coherence_grows_above_the_threshold_and_fades_below_at_the_rate_of_theory():
    ratios, start = np.array([0.5, 0.8, 1.3, 1.6, 2.0]), 0.1
    times, mean = run(start, ratios * THRESHOLD, time=8.0)
    limit = 1 - 1 / ratios  # r^2 obeys a logistic equation
    rate = 2 * (ratios - 1) * GAMMA
    growth = (limit / start**2 - 1)[None, :] * np.exp(-rate[None, :] * times[:, None])
    expected = np.sqrt(limit[None, :] / (1 + growth))
    close(np.abs(mean), expected, 0.03)
    assert np.all(np.abs(mean[-1, :2]) < start / 2)
    assert np.all(np.abs(mean[-1, 2:]) > start * 2)


def test_order_parameter_of_the_synchronised_state_is_that_of_ott_and_antonsen():
    ratios = np.array([1.25, 1.5, 2.0, 4.0])
    _, mean = run(0.9, ratios * THRESHOLD, time=32.0)
    close(np.abs(mean[-200:]).mean(axis=0), np.sqrt(1 - 1 / ratios), 0.01)


def test_frustration_raises_the_threshold_and_turns_the_population():
    ratios, angles = np.array([0.7, 1.8, 1.8]), np.array([0.0, 0.7, 1.2])
    couplings = ratios * THRESHOLD
    times, mean = run(0.4, couplings, angles, time=32.0)
    locked = 1 - 1 / (ratios * np.cos(angles))
    late = np.abs(mean[-200:]).mean(axis=0)
    close(late[1], np.sqrt(locked[1]), 0.01)
    assert locked[0] < 0 > locked[2]  # below the threshold, which stands at 2 gamma / cos(alpha)
    assert np.all(late[[0, 2]] < 0.05)
    phase = np.unwrap(np.angle(mean[-200:, 1]))
    speed = (phase[-1] - phase[0]) / (times[-1] - times[-200])
    close(speed, -couplings[1] * np.sin(angles[1]) / 2 * (1 + locked[1]), 0.02)


# Harmonics


@functools.partial(jax.jit, static_argnames="steps")
def harmonic_flow(theta, strengths, *, steps):
    """Phases [N, 1] after Euler steps of size 0.1 under harmonics 1, 2, ... of given strengths."""

    def step(_, theta):
        pulls = [s * harmonic_coupling(theta, m + 1) for m, s in enumerate(strengths)]
        return theta + 0.1 * sum(pulls)

    return jax.lax.fori_loop(0, steps, step, theta)


def moments(theta, highest):
    """Moduli of the Daido order parameters |mean exp(i m theta)|, m = 1 .. highest."""
    return [float(np.abs(order_parameter(m * theta, axis=(0, 1)))) for m in range(1, highest + 1)]


def scattered(count):
    return jnp.asarray(np.random.default_rng(2).uniform(-np.pi, np.pi, (count, 1)), jnp.float32)


def test_equal_oscillators_that_attract_meet():
    close(moments(harmonic_flow(scattered(8), (1.0, 0.0, 0.0, 0.0), steps=400), 2), [1, 1], 1e-5)


def test_the_second_harmonic_makes_two_clusters():
    start = scattered(8)
    theta = np.asarray(harmonic_flow(start, (-0.2, 1.0, 0.0, 0.0), steps=400))
    first, second = moments(theta, 2)
    close(second, 1.0, 1e-5)
    sides = np.cos(theta - theta[0])
    close(np.abs(sides), 1.0, 1e-4)  # half a turn apart, or together
    assert 0 < np.sum(sides > 0) < 8
    close(first, np.abs(np.mean(sides)), 1e-4)


def test_oscillators_that_repel_in_every_harmonic_splay():
    theta = np.asarray(harmonic_flow(scattered(8), (-1.0, -1.0, -1.0, -1.0), steps=2000))
    close(moments(theta, 8), [0] * 7 + [1], 1e-3)
    gaps = np.diff(np.sort(theta[:, 0] % (2 * np.pi)))
    close(gaps, 2 * np.pi / 8, 1e-3)
