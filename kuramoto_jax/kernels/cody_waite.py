"""Constants cut into short parts, for range reduction without rounding (Cody and Waite, 1980)."""

import math


def leading_parts(x: float, bits: int, parts: int) -> tuple[float, ...]:
    """Cuts a constant into a sum of short numbers and a rest.

    Args:
      x: the constant.
      bits: significant bits of each short number: its product with a whole number of up to
        24 - bits bits is exact in float32.
      parts: how many numbers in all.

    Returns:
      parts - 1 numbers of at most `bits` significant bits, then what is left of `x`.
    """
    found = []
    for _ in range(parts - 1):
        mantissa, exponent = math.frexp(x)
        found.append(math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits))
        x -= found[-1]
    return (*found, x)
