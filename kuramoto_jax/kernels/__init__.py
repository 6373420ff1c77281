"""Implementations of softmax attention behind `kuramoto_jax.layer.kuramoto_attention`.

The layer reduces to attention on 2K features, softmax(q k^T) v with the scale folded into q. What
is here computes that for one head; batch and heads come from `jax.vmap`.
"""

from kuramoto_jax.kernels.xla import accumulation_dtype, attention, dot

__all__ = ["IMPLEMENTATIONS", "accumulation_dtype", "attention", "dot", "resolve"]

IMPLEMENTATIONS = ("auto", "reference", "xla")


def resolve(implementation: str) -> str:
    """Returns the implementation that a request stands for: "auto" becomes the best one here.

    Raises:
      ValueError: for an unknown name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}"
        )
    return "xla" if implementation == "auto" else implementation
