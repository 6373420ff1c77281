"""The linen modules against float64 loops with the modules' own parameters."""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kuramoto_jax.config import ModelConfig
from kuramoto_jax.modules import (
    KuramotoAttention,
    KuramotoBlock,
    PhaseEmbed,
    PhaseReadout,
    PhaseSwiGLU,
    TanhBound,
    position_rates,
)

SMALL = ModelConfig(symbols=11, layers=1, width=6, heads=2, hidden=5)
BATCH, TOKENS = 2, 5
QUICK = {"xla_backend_optimization_level": 0}  # compile fast, run slowly


def config_of(**fields):
    return dataclasses.replace(SMALL, **fields)


def close(actual, expected, tolerance=1e-5):
    atol = tolerance * (1 + np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def phases(seed=0, shape=(BATCH, TOKENS, 6)):
    return jnp.asarray(np.random.default_rng(seed).uniform(-4, 4, shape), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def initial(module, select, *args):
    """Initial parameters, of which `select` picks what is wanted: only that is compiled."""
    return select(module.init(jax.random.key(0), *args)["params"])


def everything(params):
    return params


def randomized(module, *args, seed=1, scale=0.5):
    """Parameters far from the initial ones, so that none hides behind a zero or a one."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)["params"]
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0.3, scale, p.shape), p.dtype), shapes)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def apply(module, params, *args):
    return module.apply({"params": params}, *args)


def float64(tree):
    return jax.tree.map(lambda p: np.asarray(p).astype(np.float64), tree)


# The modules in NumPy


def attention_in_numpy(config, params, theta, mask="causal"):
    """Steps 1 to 6 of one sequence [T, D]: the increment before the bound."""
    params, theta = float64(params), np.asarray(theta, np.float64)
    heads, width = config.heads, config.head_width
    split = theta.reshape(len(theta), heads, width)
    lift = np.stack([reference.phase_features(split[:, h]) for h in range(heads)], axis=1)
    inputs = lift
    if config.normalization:
        flat = reference.rms_norm(lift.reshape(len(theta), -1), params["norm"]["scale"].ravel())
        inputs = flat.reshape(lift.shape)

    def read(name):
        """A head's own readout, kernel [H, 2K, K], or the whole token's, [H, 2K, H, features]."""
        kernel, bias = params[name]["kernel"], params[name].get("bias", 0.0)
        return (
            np.einsum("thc,hcj->thj" if kernel.ndim == 3 else "thc,hcij->tij", inputs, kernel)
            + bias
        )

    gate_q = gate_k = np.ones(split.shape)
    if config.gates:
        rho = reference.normalized_gate if config.gate_normalization else softplus
        gate_q, gate_k = rho(read("gate_q")), rho(read("gate_k"))
    omega = {
        "learned": params.get("omega"),
        "fixed": np.tile(10000.0 ** -(np.arange(width) / width), (heads, 1)),
        "none": np.zeros((heads, width)),
    }[config.drift]
    value = read("value") if config.value_projection else lift
    value_gate = read("value_gate") if config.value_gate else np.ones(split.shape)
    out = np.zeros(split.shape)
    positions = range(len(theta))
    for h in range(heads):
        score = reference.phase_score(
            split[:, h], split[:, h], gate_q[:, h], gate_k[:, h], params["tau"][h], omega[h],
            positions, positions,
        )  # fmt: skip
        allowed = reference.allowed(mask, len(theta))
        averaged = reference.attention_weights(score, allowed) @ value[:, h]
        resultant = averaged[:, :width] + 1j * averaged[:, width:]
        out[:, h] = value_gate[:, h] * reference.tangent_update(split[:, h], resultant)
    return out.reshape(theta.shape)


def softplus(x):
    return np.logaddexp(0.0, x)


def block_in_numpy(config, params, theta, mask="causal"):
    """One layer of one sequence [T, D], steps 1 to 8."""
    params, theta = float64(params), np.asarray(theta, np.float64)

    def bounded(increment, part):
        if config.bound == "none":
            return increment
        return reference.bounded(increment, params[part]["radius"], config.bound)

    increment = attention_in_numpy(config, params["attention"], theta, mask)
    theta = theta + bounded(increment, "attention_bound")
    if config.feedforward == "none":
        return theta
    weights = params["feedforward"]
    inputs = reference.phase_features(theta) if config.feedforward == "lift" else theta
    if config.normalization:
        inputs = reference.rms_norm(inputs, weights["norm"]["scale"])
    increment = reference.swiglu(inputs, weights["gate"], weights["up"], weights["out"]["kernel"])
    return theta + bounded(increment, "feedforward_bound")


def readout_in_numpy(params, theta, table):
    """logit_tc = scale sum_j cos(theta_tj - phi_cj) + bias_c."""
    table = np.asarray(params.get("phases", table))
    out = np.zeros((len(theta), len(table)))
    for t, c in np.ndindex(out.shape):
        agreement = sum(
            math.cos(float(a) - float(b)) for a, b in zip(theta[t], table[c], strict=True)
        )
        out[t, c] = float(params["scale"]) * agreement + float(params["bias"][c])
    return out


# Attention and block


# Each leaves out a part, or puts one back, with the parameters that come and go with it.
ABLATIONS = {
    "gates": ({"gates": False}, {"attention/gate_q", "attention/gate_k"}),
    "gate normalisation": ({"gate_normalization": False}, set()),
    "value gate": ({"value_gate": False}, {"attention/value_gate"}),
    "drift": ({"drift": "none"}, {"attention/omega"}),
    "learned rates": ({"drift": "fixed"}, {"attention/omega"}),
    "bound": ({"bound": "none"}, {"attention_bound", "feedforward_bound"}),
    "bound of the norm": ({"bound": "coordinate"}, set()),
    "feed-forward": ({"feedforward": "none"}, {"feedforward", "feedforward_bound"}),
    "value projection": ({"value_projection": True}, {"attention/value"}),
    "normalisation": ({"normalization": True}, {"attention/norm", "feedforward/norm"}),
}
ablations = pytest.mark.parametrize(("fields", "names"), ABLATIONS.values(), ids=ABLATIONS)


def parts(params):
    """Names of a block's parts, those of the attention and the feed-forward one by one."""
    found = set(params) - {"attention"}
    for name in ("attention", "feedforward"):
        found |= {f"{name}/{part}" for part in params.get(name, ())}
    return found


@ablations
def test_an_ablation_takes_its_parameters_along(fields, names):
    def of(config):
        shapes = jax.eval_shape(KuramotoBlock(config).init, jax.random.key(0), phases())
        return parts(shapes["params"])

    differing = of(SMALL) ^ of(config_of(**fields))
    assert names <= differing
    assert all(any(name.startswith(removed) for removed in names) for name in differing)


@ablations
def test_an_ablation_changes_the_computation(fields, names):
    full, ablated = (KuramotoBlock(config) for config in (SMALL, config_of(**fields)))
    params = randomized(full, phases())
    for part, values in randomized(ablated, phases()).items():
        params[part] = values | params.get(part, {})
    # Each block takes of the parameters what it has.
    after, other = (apply(block, params, phases())[0] for block in (full, ablated))
    assert np.abs(after - other).max() > 1e-2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"implementation": "reference"},
        {"gate_inputs": "token"},
        {"gate_inputs": "token", "normalization": True},
        {"width": 4, "heads": 4},
        {"value_projection": True, "implementation": "reference"},
        *(fields for fields, _ in ABLATIONS.values() if "bound" not in fields),
    ],
    ids=str,
)
def test_attention(fields):
    config = config_of(**fields)
    theta = phases(shape=(BATCH, TOKENS, config.width))
    params = randomized(KuramotoAttention(config), theta)
    increment, cache = apply(KuramotoAttention(config), params, theta)
    assert cache is None
    assert increment.dtype == jnp.float32
    for row, theta_row in zip(increment, theta, strict=True):
        close(row, attention_in_numpy(config, params, theta_row))


@pytest.mark.parametrize("gate_inputs", ["head", "token"])
def test_gates_of_a_head_read_its_own_coordinates_or_the_token(gate_inputs):
    module, theta = KuramotoAttention(config_of(gate_inputs=gate_inputs)), phases()
    params = randomized(module, theta)

    def gates(theta):
        _, seen = module.apply({"params": params}, theta, mutable="intermediates")
        seen = seen["intermediates"]
        return [*seen["gates"][0], seen["value_gates"][0]]

    last_head = np.where(np.arange(SMALL.width) < SMALL.head_width, 0.0, 0.5)
    for before, after in zip(
        gates(theta), gates(theta + jnp.asarray(last_head, jnp.float32)[None, None, :]), strict=True
    ):
        change = np.abs(before - after).max(axis=(0, 2, 3))
        assert change[1] > 1e-2
        assert change[0] > 1e-2 if gate_inputs == "token" else change[0] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bound": "coordinate", "feedforward": "lift"},
        {"bound": "none"},
        {"feedforward": "none"},
        {"normalization": True},
        {"normalization": True, "feedforward": "lift"},
    ],
    ids=str,
)
def test_block(fields):
    config, theta = config_of(**fields), phases()
    params = randomized(KuramotoBlock(config), theta)
    after, _ = apply(KuramotoBlock(config), params, theta)
    for row, theta_row in zip(after, theta, strict=True):
        close(row, block_in_numpy(config, params, theta_row), 2e-5)


def test_normalisation_ignores_the_size_of_what_the_feed_forward_reads():
    module, theta = PhaseSwiGLU(config_of(normalization=True)), phases()
    params = randomized(module, theta)
    close(apply(module, params, 3 * theta), np.asarray(apply(module, params, theta)), 1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ones", [1, 1, 1]), ("alternating", [1, 0, 1]), ("zeros", [0, 0, 0])],
)
def test_gates_start_at_their_bias(kind, expected):
    def biases(params):
        return {name: params[name]["bias"] for name in ("gate_q", "gate_k", "value_gate")}

    found = initial(KuramotoAttention(config_of(value_bias=kind)), biases, phases())
    close(found["value_gate"], [expected, expected], 0)
    close(found["gate_q"], 0, 0)
    close(found["gate_k"], 0, 0)


def test_tau_starts_at_its_value():
    tau = initial(KuramotoAttention(config_of(tau=2.5)), operator.itemgetter("tau"), phases())
    close(tau, [2.5, 2.5], 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1.0, 0.1, 0.01]),
        ({"rate_scale": 0.5}, [0.5, 0.05, 0.005]),
        ({"rates": "zero"}, [0, 0, 0]),
    ],
)
def test_rates_start_geometric_scaled_or_at_zero(fields, expected):
    module = KuramotoAttention(config_of(rate_base=1000.0, **fields))
    close(initial(module, operator.itemgetter("omega"), phases()), [expected] * 2, 1e-7)


def test_rates_by_hand():
    close(position_rates(ModelConfig(), 4), [1.0, 0.1, 0.01, 0.001], 1e-12)


@pytest.mark.parametrize("rates", ["zero", "rope"])
def test_without_rates_the_order_of_the_past_does_not_matter(rates):
    theta, order = phases(), np.array([2, 0, 3, 1, 4])
    module = KuramotoAttention(SMALL)
    params = randomized(module, theta)
    omega = initial(KuramotoAttention(config_of(rates=rates)), operator.itemgetter("omega"), theta)
    params = {**params, "omega": omega}
    one, other = (
        np.asarray(apply(module, params, jnp.asarray(x))[0])[:, -1]
        for x in (np.asarray(theta), np.asarray(theta)[:, order])
    )
    change = np.abs(one - other).max()
    assert change < 2e-6 if rates == "zero" else change > 1e-2


# Feed-forward and bound


@pytest.mark.parametrize("feedforward", ["raw", "lift"])
def test_feedforward(feedforward):
    config, theta = config_of(feedforward=feedforward), phases()
    module = PhaseSwiGLU(config)
    params = randomized(module, theta)
    turned = theta + jnp.float32(2 * np.pi)
    result, turned = (apply(module, params, x) for x in (theta, turned))
    for row, theta_row in zip(result, theta, strict=True):
        inputs = reference.phase_features(theta_row) if feedforward == "lift" else theta_row
        weights = float64((params["gate"], params["up"], params["out"]["kernel"]))
        close(row, reference.swiglu(inputs, *weights), 2e-5)
    change = np.abs(turned - result).max() / np.abs(result).max()
    assert change < 1e-5 if feedforward == "lift" else change > 0.1


def test_feedforward_scale_is_a_factor_on_the_initial_output_matrix():
    one, other = (
        initial(PhaseSwiGLU(config_of(feedforward_scale=scale)), everything, phases())
        for scale in (0.1, 0.4)
    )
    close(other["out"]["kernel"], 4 * np.asarray(one["out"]["kernel"]), 1e-6)
    close(other["gate"], one["gate"], 0)
    assert np.abs(one["out"]["kernel"]).max() > 0.01


def test_feedforward_in_bfloat16_does_not_round_angles():
    # gate = up = theta_0 - theta_1 = 2^-9, which 8 bits at theta = 3 cannot tell from zero
    config = config_of(width=2, heads=1, hidden=1, dtype="bfloat16")
    column = jnp.array([[1.0], [-1.0]])
    params = {"gate": column, "up": column, "out": {"kernel": jnp.ones((1, 2))}}
    theta = jnp.array([[[3 + 2.0**-9, 3.0], [3.0, 3.0]]], jnp.float32)
    result = apply(PhaseSwiGLU(config), params, theta)
    assert result.dtype == jnp.float32
    step = 2.0**-9
    np.testing.assert_allclose(result[0, 0], step**2 / (1 + math.exp(-step)), rtol=0.02)
    close(result[0, 1], 0, 0)


@pytest.mark.parametrize("kind", ["norm", "coordinate"])
def test_bound(kind):
    module, x = TanhBound(config_of(bound=kind, radius=0.7)), phases()
    params = initial(module, everything, x)
    assert list(params) == ["radius"]
    close(params["radius"], [0.7] * 6, 1e-7)
    params = randomized(module, x)
    close(apply(module, params, x), reference.bounded(x, params["radius"], kind))


def test_bfloat16_keeps_phases_and_parameters_in_float32():
    theta, narrow = phases(), KuramotoBlock(config_of(dtype="bfloat16"))
    params = randomized(narrow, theta, scale=0.2)
    shapes = jax.eval_shape(narrow.init, jax.random.key(0), theta)
    assert {p.dtype for p in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    result = apply(narrow, params, theta)[0]
    assert result.dtype == jnp.float32
    expected = np.stack([block_in_numpy(SMALL, params, row) for row in theta])
    change = np.abs(np.asarray(result) - expected)
    assert 1e-4 < change.max() < 0.1


def test_bfloat16_leaves_fine_differences_of_phases():
    # nothing moves: the radii are zero, and what is left is the state itself
    theta, module = phases(), KuramotoBlock(config_of(dtype="bfloat16"))
    params = randomized(module, theta)
    for name in ("attention_bound", "feedforward_bound"):
        params[name] = {"radius": jnp.zeros(6)}
    close(apply(module, params, theta)[0], theta, 0)


# Embedding and readout


def test_embedding_looks_up():
    tokens = jnp.array([[3, 0, 10], [10, 10, 1]])
    params = initial(PhaseEmbed(SMALL), everything, tokens)
    theta = apply(PhaseEmbed(SMALL), params, tokens)
    assert theta.shape == (2, 3, 6)
    assert theta.dtype == jnp.float32
    close(theta, np.asarray(params["phases"])[np.asarray(tokens)], 0)


def extent(table, heads):
    """Greatest absolute phase of each coordinate, [H, K]."""
    return np.abs(np.asarray(table)).max(axis=0).reshape(heads, -1)


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_initial_phases_of_a_ramp_spread_along_each_head(power):
    config = ModelConfig(
        symbols=2000,
        width=12,
        heads=3,
        phase_spread_min=0.2,
        phase_spread=2.0,
        phase_power=power,
    )
    table = initial(PhaseEmbed(config), operator.itemgetter("phases"), jnp.zeros((1, 1), jnp.int32))
    reach, spread = extent(table, 3), np.array([[0.2, 0.8, 1.4, 2.0]])
    assert np.all(reach <= spread * (1 + 1e-6))
    assert np.all(reach > 0.98 * spread)
    assert np.all(np.diff(reach, axis=1) > 0)
    deviation = np.asarray(table).std(axis=0).reshape(3, 4)
    np.testing.assert_allclose(
        deviation, np.repeat(spread, 3, 0) / np.sqrt(2 * power + 1), rtol=0.07
    )


@pytest.mark.parametrize("spread", [0.3, math.pi])
def test_initial_phases_uniform(spread):
    config = ModelConfig(symbols=2000, width=12, heads=3, phase_init="uniform", phase_spread=spread)
    table = initial(PhaseEmbed(config), operator.itemgetter("phases"), jnp.zeros((1, 1), jnp.int32))
    reach = extent(table, 3)
    assert np.all(reach <= spread * (1 + 1e-6))
    assert np.all(reach > 0.98 * spread)
    close(np.asarray(table).mean(axis=0), 0, 0.1 * spread)


def test_a_power_lets_most_symbols_nearly_agree():
    config = ModelConfig(symbols=4000, width=2, heads=1, phase_init="uniform", phase_power=6.0)
    table = initial(PhaseEmbed(config), operator.itemgetter("phases"), jnp.zeros((1, 1), jnp.int32))
    # |u|^6 < x for a part x^(1/6) of the uniform u
    for part in (0.2, 0.5, 0.9):
        below = np.abs(np.asarray(table)) < math.pi * part**6
        assert below.mean() == pytest.approx(part, abs=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_readout(tied):
    module = PhaseReadout(config_of(tied_readout=tied, readout_logit=0.25 * 6))
    theta, table = phases(), phases(5, (11, 6))
    params = initial(module, everything, theta, table)
    assert sorted(params) == ["bias", "scale"] if tied else ["bias", "phases", "scale"]
    close(params["scale"], 0.25, 0)
    close(params["bias"], 0, 0)
    params = randomized(module, theta, table)
    logits = apply(module, params, theta, table)
    assert logits.shape == (BATCH, TOKENS, 11)
    assert logits.dtype == jnp.float32
    for row, theta_row in zip(logits, theta, strict=True):
        close(row, readout_in_numpy(params, theta_row, table))
    change = np.abs(apply(module, params, theta, table + 1.0) - logits).max()
    assert change > 0.01 if tied else change == 0


def test_readout_is_largest_for_the_phases_it_is_given():
    table = phases(5, (11, 6))
    params = initial(PhaseReadout(SMALL), everything, table[None], table)
    logits = np.asarray(apply(PhaseReadout(SMALL), params, table[None], table))[0]
    assert np.all(logits.argmax(axis=1) == np.arange(11))
    close(np.diag(logits), SMALL.readout_logit, 1e-6)


def test_readout_in_bfloat16_gives_float32():
    theta, table = phases(), phases(5, (11, 6))
    params = initial(PhaseReadout(SMALL), everything, theta, table)
    logits = apply(PhaseReadout(config_of(dtype="bfloat16")), params, theta, table)
    assert logits.dtype == jnp.float32
    close(logits, apply(PhaseReadout(SMALL), params, theta, table), 0.01)
