"""Saving and restoring of training state with Orbax. Knows no model.

Each step has two items, `params` and `training` (everything else), so that parameters can be
read without an optimizer. Saves are asynchronous and atomic: a step's directory appears under its
final name when it is whole.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

METRIC = "val_bpc"


class Checkpoints:
    """The checkpoints of one run: the newest `keep` ones, and the best by validation."""

    def __init__(self, directory: Path, keep: int = 1) -> None:
        best = BestN(
            get_metric_fn=lambda metrics: metrics[METRIC],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def steps(self) -> list[int]:
        """Returns the steps that are stored whole, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, params: Any, training: Any, val_bpc: float | None) -> None:
        """Starts saving a step; `val_bpc` is None where the step was not validated.

        An earlier save that failed in the background raises here.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params), training=ocp.args.StandardSave(training)
            ),
            metrics=None if val_bpc is None else {METRIC: val_bpc},
            force=True,
        )

    def restore(self, step: int, params: Any, training: Any) -> tuple[Any, Any]:
        """Returns the params and training state of a step, laid out like the given ones.

        Args:
          step: one of `steps()`.
          params: tree of arrays or `jax.ShapeDtypeStruct` with shardings.
          training: likewise.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(_abstract(params)),
                training=ocp.args.StandardRestore(_abstract(training)),
            ),
        )
        return restored.params, restored.training

    def restore_params(self, step: int, params: Any) -> Any:
        """Returns the parameters of a step alone, laid out like `params`."""
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        return self._manager.restore(step, args=args).params

    def wait(self) -> None:
        """Blocks until every save has ended; raises if one failed."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for every save and lets go of the directory."""
        self.wait()
        self._manager.close()


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
