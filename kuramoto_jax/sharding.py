"""The device mesh and what lies where on it.

One axis, "data": windows of a batch are split over it, parameters are the same everywhere. One
device is the one-element mesh.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kuramoto_jax.config import ConfigError


def make_mesh() -> Mesh:
    """Returns the mesh of all local devices."""
    return Mesh(np.asarray(jax.local_devices()), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """The leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def check_batch(key: str, windows: int, mesh: Mesh) -> None:
    """Checks that the devices divide a number of windows, the value of a configuration's key.

    Raises:
      ConfigError: if they do not; the message names two sizes that would do.
    """
    devices = mesh.size
    if windows % devices:
        lower = windows - windows % devices
        valid = " or ".join(str(size) for size in (lower, lower + devices) if size)
        raise ConfigError(
            f"{key}={windows}: must be a multiple of the {devices} devices, such as {valid}"
        )
