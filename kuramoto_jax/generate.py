"""Sampling of bytes with a decode cache."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kuramoto_jax.baselines import LanguageModel
from kuramoto_jax.cache import Cache


def filter_logits(
    logits: jax.Array,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> jax.Array:
    """Scales logits and rules out unlikely symbols.

    Args:
      logits: [..., V].
      temperature: divides the logits; above 0.
      top_k: keeps the k most likely symbols, of equally likely ones those with lower numbers; 0
        keeps all.
      top_p: keeps the fewest most likely symbols whose probabilities sum to at least p; the most
        likely one always stays.
      min_p: keeps the symbols at least this times as likely as the most likely one.

    Top-k, top-p and min-p act in this order, each on what the one before left.

    Returns:
      Float32 logits, -inf for what is ruled out.
    """
    logits = logits.astype(jnp.float32) / temperature
    if top_k or top_p < 1.0:
        order = jnp.argsort(-logits, axis=-1)
        ordered = jnp.take_along_axis(logits, order, axis=-1)
        if top_k:
            ordered = ordered.at[..., top_k:].set(-jnp.inf)
        if top_p < 1.0:
            probability = jax.nn.softmax(ordered, axis=-1)
            kept = (jnp.cumsum(probability, axis=-1) - probability < top_p).at[..., 0].set(True)
            ordered = jnp.where(kept, ordered, -jnp.inf)
        logits = jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)
    if min_p > 0.0:
        floor = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p)
        logits = jnp.where(logits < jnp.broadcast_to(floor, logits.shape), -jnp.inf, logits)
    return logits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next byte is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely byte each time.
      top_k: see `filter_logits`; 0 keeps all.
      top_p: see `filter_logits`; 1 keeps all.
      min_p: see `filter_logits`; 0 keeps all.

    Raises:
      ValueError: for a value outside its range, in one line that names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: must be a finite number, 0 or above")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (keep all) or above")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: must be from 0 to 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: must be from 0 to 1")

    def draw(self, key: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns symbols [...] int32 drawn from logits [..., V]."""
        if self.temperature < 1e-6:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        filtered = filter_logits(logits, self.temperature, self.top_k, self.top_p, self.min_p)
        return jax.random.categorical(key, filtered, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("model", "slots"))
def prefill(
    model: LanguageModel, params: Any, prompt: jax.Array, slots: int
) -> tuple[jax.Array, Cache]:
    """Reads prompts [B, T], T at least 1, into an empty cache of `slots` tokens.

    A prompt longer than the cache is read in pieces of `slots` tokens: the window slides.

    Returns:
      The logits [B, V] of the byte that follows, and the cache.

    Raises:
      ValueError: for an empty prompt.
    """
    if prompt.shape[1] == 0:
        raise ValueError("prompt: must hold at least one byte")

    def read(cache: Cache, piece: jax.Array) -> tuple[Cache, jax.Array]:
        logits, cache = model.apply({"params": params}, piece, cache, method="decode")
        return cache, logits[:, -1]

    batch, length = prompt.shape
    pieces = (length - 1) // slots
    whole = prompt[:, : pieces * slots].reshape(batch, pieces, slots).transpose(1, 0, 2)
    cache, _ = jax.lax.scan(read, model.init_cache(batch, slots), whole)
    cache, logits = read(cache, prompt[:, pieces * slots :])
    return logits, cache


@functools.partial(
    jax.jit, static_argnames=("model", "length", "sampling"), donate_argnames="cache"
)
def extend(
    model: LanguageModel,
    params: Any,
    logits: jax.Array,
    cache: Cache,
    key: jax.Array,
    *,
    length: int,
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Draws `length` bytes.

    The draw at position p uses fold_in(key, p): texts do not depend on how a continuation is cut
    into calls.

    Args:
      model: a language model.
      params: its parameters.
      logits: [B, V] of the next byte, from `prefill` or an earlier call.
      cache: likewise.
      key: random key, the same for all calls of a continuation.
      length: bytes to draw.
      sampling: how.

    Returns:
      Bytes [B, length] int32, and logits and cache for the next call.
    """

    def step(carry: tuple[jax.Array, Cache], _: None) -> tuple[tuple[jax.Array, Cache], jax.Array]:
        logits, cache = carry
        token_B = sampling.draw(jax.random.fold_in(key, cache.position), logits)
        logits, cache = model.apply({"params": params}, token_B[:, None], cache, method="decode")
        return (logits[:, -1], cache), token_B

    (logits, cache), tokens = jax.lax.scan(step, (logits, cache), length=length)
    return tokens.T, logits, cache


@functools.partial(jax.jit, static_argnames=("model", "length", "slots", "sampling"))
def generate(
    model: LanguageModel,
    params: Any,
    prompt: jax.Array,
    key: jax.Array,
    *,
    length: int,
    slots: int,
    sampling: Sampling,
) -> jax.Array:
    """Continues prompts [B, T] int32 byte by byte, all in one compiled call.

    Args:
      model: a language model.
      params: its parameters.
      prompt: [B, T], T at least 1.
      key: random key.
      length: bytes to draw.
      slots: window of the decode cache: in each layer a token attends to the last `slots` ones.
      sampling: how bytes are drawn.

    Returns:
      [B, length] int32.
    """
    logits, cache = prefill(model, params, prompt, slots)
    return extend(model, params, logits, cache, key, length=length, sampling=sampling)[0]


def stream(
    model: LanguageModel,
    params: Any,
    prompt: jax.Array,
    key: jax.Array,
    *,
    length: int,
    slots: int,
    sampling: Sampling,
    chunk: int = 16,
) -> Iterator[np.ndarray]:
    """`generate` as an iterator: yields [B, n] bytes as they are drawn, n at most `chunk`.

    The text is the one that `generate` gives.
    """
    logits, cache = prefill(model, params, prompt, slots)
    for first in range(0, length, chunk):
        tokens, logits, cache = extend(
            model, params, logits, cache, key, length=chunk, sampling=sampling
        )
        yield np.asarray(tokens, np.uint8)[:, : length - first]


def printable(text: str) -> str:
    """Returns a text with what is not printable escaped, save newlines and tabs."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def as_text(tokens: np.ndarray) -> str:
    """Returns bytes as text that is safe to show; what is not valid UTF-8 is escaped too."""
    return printable(np.asarray(tokens, np.uint8).tobytes().decode("utf-8", "backslashreplace"))
