"""The device mesh and the check that devices divide a batch, on four CPU devices."""

import jax
import numpy as np
import pytest

from kuramoto_jax import sharding
from kuramoto_jax.config import ConfigError


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh()


def test_mesh_holds_every_device_on_one_axis(mesh):
    assert dict(mesh.shape) == {"data": 4}
    assert list(mesh.devices) == jax.local_devices()


@pytest.mark.parametrize("batch_size", [4, 8, 64])
def test_multiples_pass(mesh, batch_size):
    sharding.check_batch("train.batch_size", batch_size, mesh)


@pytest.mark.parametrize(
    ("batch_size", "valid"), [(1, "4"), (3, "4"), (5, "4 or 8"), (6, "4 or 8"), (63, "60 or 64")]
)
def test_others_are_told_what_would_do(mesh, batch_size, valid):
    with pytest.raises(ConfigError) as caught:
        sharding.check_batch("train.batch_size", batch_size, mesh)
    assert str(caught.value) == (
        f"train.batch_size={batch_size}: must be a multiple of the 4 devices, such as {valid}"
    )


def test_one_device_takes_any_batch(mesh):
    alone = jax.sharding.Mesh(mesh.devices[:1], ("data",))
    for batch_size in (1, 3, 7):
        sharding.check_batch("train.batch_size", batch_size, alone)


def test_batches_are_split_and_parameters_repeated(mesh):
    batch = np.arange(24).reshape(8, 3)
    split = jax.device_put(batch, sharding.split_batch(mesh))
    for place, shard in enumerate(split.addressable_shards):
        np.testing.assert_array_equal(shard.data, batch[2 * place : 2 * place + 2])
    same = jax.device_put(batch, sharding.replicated(mesh))
    assert len(same.addressable_shards) == 4
    for shard in same.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch)
