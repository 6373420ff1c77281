"""Sampling of bytes with a decode cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kuramoto_jax.baselines import LanguageModel


def filter_logits(
    logits: jax.Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> jax.Array:
    """Scales logits and rules out unlikely symbols.

    Args:
      logits: [..., V].
      temperature: divides the logits; above 0.
      top_k: keeps the k most likely symbols, of equally likely ones those with lower numbers; 0
        keeps all.
      top_p: keeps the fewest most likely symbols whose probabilities sum to at least p; the most
        likely one always stays.

    Returns:
      Float32 logits, -inf for what is ruled out.
    """
    logits = logits.astype(jnp.float32) / temperature
    if top_k or top_p < 1.0:
        order = jnp.argsort(-logits, axis=-1)
        ordered = jnp.take_along_axis(logits, order, axis=-1)
        if top_k:
            ordered = ordered.at[..., top_k:].set(-jnp.inf)
        probability = jax.nn.softmax(ordered, axis=-1)
        kept = (jnp.cumsum(probability, axis=-1) - probability < top_p).at[..., 0].set(True)
        ordered = jnp.where(kept, ordered, -jnp.inf)
        logits = jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)
    return logits


@functools.partial(
    jax.jit, static_argnames=("model", "length", "slots", "temperature", "top_k", "top_p")
)
def generate(
    model: LanguageModel,
    params: dict,
    prompt: jax.Array,
    key: jax.Array,
    *,
    length: int,
    slots: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> jax.Array:
    """Continues prompts byte by byte, the prompt read in one pass.

    Args:
      model: a language model.
      params: its parameters.
      prompt: [B, T] int32, 1 <= T <= slots.
      key: random key.
      length: bytes to draw.
      slots: window of the decode cache; what lies further back is forgotten.
      temperature: 0 takes the most likely byte each time.
      top_k: see `filter_logits`.
      top_p: see `filter_logits`.

    Returns:
      [B, length] int32.
    """

    def draw(logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0.0:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        filtered = filter_logits(logits_BV, temperature, top_k, top_p)
        return jax.random.categorical(key, filtered, axis=-1).astype(jnp.int32)

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        token_B, cache = carry
        logits, cache = model.apply({"params": params}, token_B[:, None], cache, method="decode")
        return (draw(logits[:, -1], key), cache), token_B

    cache = model.init_cache(prompt.shape[0], slots)
    logits, cache = model.apply({"params": params}, prompt, cache, method="decode")
    first_key, key = jax.random.split(key)
    first = draw(logits[:, -1], first_key)
    _, tokens = jax.lax.scan(step, (first, cache), jax.random.split(key, length))
    return tokens.T


def as_text(tokens: np.ndarray) -> str:
    """Returns bytes as text that is safe to show.

    What is not valid UTF-8 and what is not printable is escaped, but for newlines and tabs.
    """
    text = np.asarray(tokens, np.uint8).tobytes().decode("utf-8", "backslashreplace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
