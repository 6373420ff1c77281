"""Saving and restoring of training state with Orbax. Knows no model.

Each step has two items, `params` and `training` (everything else), so that parameters can be
read without an optimizer. Saves are asynchronous and atomic: a step's directory appears under its
final name when it is whole.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

METRIC = "val_bpc"


def _score(metrics: dict[str, float] | None) -> float:
    """Returns the validation score of a step, infinite where it was not validated."""
    return metrics[METRIC] if metrics else math.inf


@dataclasses.dataclass(frozen=True)
class _NewestAndBest:
    """Orbax preservation policy: the newest `keep` steps and the best validated one."""

    keep: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each step, oldest first, whether it stays."""
        del context
        scores = [_score(checkpoint.metrics) for checkpoint in checkpoints]
        best = min(scores, default=math.inf)
        chosen = scores.index(best) if math.isfinite(best) else None
        newest = len(checkpoints) - self.keep
        return [index >= newest or index == chosen for index in range(len(checkpoints))]


class Checkpoints:
    """The checkpoints of one run: the newest `keep` ones, and the best by validation."""

    def __init__(self, directory: Path, keep: int = 1, *, create: bool = True) -> None:
        """Opens the checkpoints in a directory.

        The run that writes them opens them with `create`: the directory is made if missing, and
        what an interrupted save left is removed. Without, nothing is changed, and a run may be read
        while it is training.
        """
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(keep),
            # Orbax stores scores, to be there when a run is continued, only if it can rank them.
            best_fn=_score,
            best_mode="min",
            create=create,
            cleanup_tmp_directories=create,
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
            metrics={METRIC: math.inf if val_bpc is None else val_bpc},
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
