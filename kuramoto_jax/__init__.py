"""Attention by phase synchronisation, in JAX and Flax.

Arrays carry their axes in their names, one letter an axis:

  B batch        T query positions    U key positions      H heads
  K coordinates of a head             D = H K coordinates of a token
  C = 2K features of a head           F feed-forward width
  V symbols      L layers             N bytes of a corpus  S slots of a cache
"""
