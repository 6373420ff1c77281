"""AdamW with warm-up and cosine decay; decay and rates chosen by parameter path.

A phase has to travel radians and a scalar has few chances to move, so neither learns at the rate of
a matrix entry. `GROUPS` sorts every parameter by its path; one that no pattern meets is an error.
"""

import re
from typing import Any

import jax
import optax

from kuramoto_jax.config import OptimConfig

# First match wins. Only "matrix" and "gate" decay: phases, rates, temperatures, radii, gains,
# biases and the transformer's embedding keep their values under a zero gradient.
GROUPS = (
    (r"(^|/)phases$", "phase"),
    (r"(^|/)embedding$", "embedding"),
    (r"(^|/)omega$", "omega"),
    (r"(^|/)(tau|radius|scale|bias)$", "scalar"),
    (r"(^|/)(gate_q|gate_k|value_gate)/kernel$", "gate"),
    (r"(^|/)(kernel|gate|up)$", "matrix"),
)


def group_of(path: str) -> str:
    """Returns the group of a parameter path such as "blocks/attention/tau".

    Raises:
      ValueError: if no pattern of `GROUPS` meets the path.
    """
    for pattern, group in GROUPS:
        if re.search(pattern, path):
            return group
    raise ValueError(f"parameter {path!r} is in no group of kuramoto_jax.optim.GROUPS")


def group_labels(params: Any) -> Any:
    """Returns a tree like `params` that holds each parameter's group."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: group_of(jax.tree_util.keystr(path, simple=True, separator="/")), params
    )


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Schedule over optimizer steps: linear warm-up, then half a cosine to `final` of the peak.

    It is a function of the total: continuing a run to more steps follows the longer schedule from
    there on.
    """
    warmup = round(config.warmup * steps)
    return optax.schedules.join_schedules(
        [
            lambda step: config.learning_rate * (step + 1) / (warmup + 1),
            optax.schedules.cosine_decay_schedule(
                config.learning_rate, max(steps - warmup, 1), config.final
            ),
        ],
        [warmup],
    )


def _decayed(params: Any) -> Any:
    """Returns a tree like `params` that holds whether each parameter decays."""
    return jax.tree.map(lambda group: group in ("matrix", "gate"), group_labels(params))


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Returns the chain: clip by global norm, Adam, decoupled decay, rate by group, schedule."""
    rates = {
        "phase": config.phase_rate,
        "embedding": config.embedding_rate,
        "gate": config.gate_rate,
        "omega": config.omega_rate,
        "scalar": config.scalar_rate,
        "matrix": 1.0,
    }
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        optax.scale_by_adam(config.beta1, config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        optax.partition({group: optax.scale(rate) for group, rate in rates.items()}, group_labels),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )
