"""Which implementation runs where one is asked for, and the kernels made for accelerators."""

import functools
import logging

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kuramoto_jax import kernels, layer
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.kernels import cudnn, pallas
from kuramoto_jax.modules import KuramotoAttention


@pytest.fixture
def heard(caplog):
    """What the library says in its log from here on."""
    kernels._say_once.cache_clear()
    caplog.set_level(logging.WARNING, "kuramoto_jax")
    return lambda: [record.getMessage() for record in caplog.records]


# The choice.


@pytest.mark.parametrize(
    ("asked", "case", "chosen", "why"),
    [
        ("auto", {}, "xla", ""),
        ("xla", {}, "xla", ""),
        ("reference", {}, "reference", ""),
        ("cudnn", {}, "xla", "the backend is cpu, not an NVIDIA GPU"),
        ("pallas", {"from_phases": True}, "pallas", ""),
        ("pallas", {}, "xla", "what is averaged is not the lift of the phases alone"),
        ("pallas", {"from_phases": True, "causal": False}, "xla", "the mask is not causal"),
        (
            "pallas",
            {"from_phases": True, "features": 48},
            "xla",
            "24 coordinates a head are not a power of two from 16",
        ),
    ],
)
def test_a_request_that_cannot_be_met_falls_back_and_says_so_once(heard, asked, case, chosen, why):
    for _ in range(2):
        case = {"dtype": jnp.float32, "features": 64} | case
        assert kernels.resolve(asked, **case) == chosen
    assert heard() == ([f"attention by {asked} falls back to xla: {why}"] if why else [])


def test_unknown_implementation():
    with pytest.raises(ValueError, match="implementation='fast': must be one of auto, reference"):
        kernels.resolve("fast", jnp.float32, 64)


def test_auto_takes_cudnn_where_it_works(monkeypatch, heard):
    monkeypatch.setattr(cudnn, "refusal", lambda dtype, features: "" if features == 64 else "no")
    assert kernels.resolve("auto", jnp.bfloat16, 64) == "cudnn"
    assert kernels.resolve("auto", jnp.bfloat16, 64, causal=False) == "xla"
    assert kernels.resolve("auto", jnp.bfloat16, 256) == "xla"
    assert heard() == []


def test_cudnn_is_tried_before_it_is_trusted(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "not in float32" in cudnn.refusal.__wrapped__(jnp.dtype("float32"), 64)
    # there is no GPU here, so the trial fails as it does with a cuDNN that lacks the case
    assert "refuses 64 features of bfloat16" in cudnn.refusal.__wrapped__(jnp.bfloat16.dtype, 64)


# Pallas, interpreted.


def random_arguments(tokens, width, dtype=np.float64):
    args = reference.random_inputs(tokens, width, seed=tokens)
    return tuple(jnp.asarray(a, dtype) for a in args)


@functools.partial(jax.jit, static_argnames=("implementation", "without"))
def value_and_slopes(args, cotangent, implementation, without=()):
    """Coupling of one head and its gradient; `without` leaves arguments out, as None."""

    def function(*args):
        args = [None if i in without else a for i, a in enumerate(args)]
        return layer.kuramoto_attention(
            *args, positions=3 + 2 * jnp.arange(len(args[0])), implementation=implementation
        )

    value, pull = jax.vjp(function, *args)
    return value, pull(cotangent)


@pytest.mark.parametrize(
    ("tokens", "without"), [(1, ()), (64, (1, 2)), (130, ()), (130, (4,))], ids=str
)
def test_pallas_is_the_reference_in_value_and_gradient(x64, heard, tokens, without):
    args = random_arguments(tokens, 16)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 16)))
    one, other = (
        value_and_slopes(args, cotangent, name, without) for name in ("pallas", "reference")
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * (1 + np.abs(b).max()))
    assert heard() == []


def test_pallas_in_half_precision(heard):
    theta, gate_q, gate_k, tau, omega = random_arguments(70, 16, np.float32)
    args = (theta, gate_q.astype(jnp.bfloat16), gate_k.astype(jnp.bfloat16), tau, omega)
    cotangent = jnp.ones((70, 16), jnp.float32)
    one, other = (value_and_slopes(args, cotangent, name) for name in ("pallas", "xla"))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.03 * (1 + np.abs(b).max()))
    assert heard() == []


def test_pallas_in_the_module(heard):
    config = ModelConfig(layers=1, width=32, heads=2, hidden=4, symbols=5)
    theta = jax.random.uniform(jax.random.key(0), (1, 66, 32), jnp.float32, -3, 3)
    params = KuramotoAttention(config).init(jax.random.key(1), theta)["params"]

    def slopes(implementation):
        module = KuramotoAttention(ModelConfig(**vars(config) | {"implementation": implementation}))

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        @functools.partial(jax.grad, argnums=(0, 1))
        def of(params, theta):
            return jnp.sum(jnp.sin(module.apply({"params": params}, theta)[0]))

        return of(params, theta)

    for a, b in zip(*(jax.tree.leaves(slopes(name)) for name in ("pallas", "xla")), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * (1 + np.abs(b).max()))
    assert heard() == []


def test_pallas_never_writes_queries_keys_or_values(x64):
    """What enters and leaves the kernels has K numbers a token, where features have 2K."""
    args, cotangent = random_arguments(130, 16), jnp.ones((130, 16))
    jaxpr = jax.make_jaxpr(lambda *a: value_and_slopes(a, cotangent, "pallas"))(*args)
    shapes = {tuple(var.aval.shape) for eqn in equations(jaxpr.jaxpr) for var in eqn.outvars}
    assert (192, 16) in shapes
    assert not any(len(shape) > 1 and shape[-1] in (32, 130, 192) for shape in shapes)


def equations(jaxpr):
    """All equations of a program, but for the insides of kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "pallas_call":
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("width", "fits"), [(8, False), (16, True), (24, False), (32, True), (128, True)]
)
def test_pallas_supports_powers_of_two(width, fits):
    assert pallas.supports(width) is fits
