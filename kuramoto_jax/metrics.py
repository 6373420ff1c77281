"""What a run writes down: `metrics.jsonl`, TensorBoard event files, progress lines.

`metrics.jsonl` is the record: one JSON object a line, in step order. Nothing needs a network or an
account.
"""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

UNITS = {"train_loss": "nats", "train_bpc": "bpc", "val_bpc": "bpc", "test_bpc": "bpc"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file; a last line cut off by a crash is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and, where wanted, to TensorBoard event files.

    Opened at a step, it first drops the rows beyond it and the test score, which the end of a run
    writes anew: a resumed run writes each thing once.
    """

    def __init__(self, workdir: Path, step: int, tensorboard: bool) -> None:
        path = workdir / "metrics.jsonl"
        self.rows = [
            row for row in read_rows(path) if row["step"] <= step and "test_bpc" not in row
        ]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = path.open("a")
        self._events = None
        if tensorboard:
            self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row, which must hold its `step`."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(name, value, row["step"])

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text to the event files."""
        if self._events is not None:
            self._events.add_text(name, text, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def duration(seconds: float) -> str:
    """Returns a time as "1h02m", "3m05s" or "12s"."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def progress_line(row: dict[str, Any], steps: int, seconds_left: float) -> str:
    """Returns the console line of a training row."""
    return (
        f"step {row['step']:>{len(str(steps))}}/{steps}  loss {row['train_loss']:.4f} nats  "
        f"{row['train_bpc']:.4f} bpc  grad {row['grad_norm']:.2f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  {duration(seconds_left)} left"
    )
