"""What a run writes: rows, event files, and what is left of them after a crash."""

import json
import struct

import pytest

from kuramoto_jax.metrics import (
    MetricsWriter,
    duration,
    progress_line,
    read_rows,
    write_atomically,
)

ROWS = [
    {"step": 10, "train_loss": 2.5, "train_bpc": 3.6},
    {"step": 10, "val_bpc": 3.5},
    {"step": 20, "train_loss": 2.25, "train_bpc": 3.2},
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def written(tmp_path, step=0, rows=ROWS, tensorboard=False):
    with MetricsWriter(tmp_path, step, tensorboard) as writer:
        for row in rows:
            writer.write(row)


def test_one_json_object_a_line_in_order(tmp_path, path):
    written(tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert path.read_text().endswith("\n")
    assert read_rows(path) == ROWS


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path, path):
    with MetricsWriter(tmp_path, 0, False) as writer:
        writer.write(ROWS[0])
        assert read_rows(path) == writer.rows == ROWS[:1]


def test_no_file_is_no_rows(path):
    assert read_rows(path) == []


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (9, 0), (10, 2), (19, 2), (20, 3), (99, 3)])
def test_reopening_at_a_step_drops_the_rows_beyond_it(tmp_path, path, step, kept):
    written(tmp_path)
    with MetricsWriter(tmp_path, step, False) as writer:
        assert read_rows(path) == writer.rows == ROWS[:kept]
        writer.write({"step": 100})
    assert read_rows(path) == [*ROWS[:kept], {"step": 100}]


@pytest.mark.parametrize("cut", [1, 2, 5, 30])
def test_a_last_line_cut_off_is_left_out(tmp_path, path, cut):
    written(tmp_path)
    whole = path.read_text()
    path.write_text(whole[: -1 - cut])
    assert read_rows(path) == ROWS[:2]
    written(tmp_path, 20, ROWS[2:])
    assert path.read_text() == whole


def test_a_last_line_without_its_end_is_whole(tmp_path, path):
    written(tmp_path)
    path.write_text(path.read_text().rstrip("\n"))
    written(tmp_path, 20, [{"step": 30}])
    assert read_rows(path) == [*ROWS, {"step": 30}]


def test_writing_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path, path):
    write_atomically(path, "long first text\n")
    write_atomically(path, "short\n")
    assert path.read_text() == "short\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path, path, monkeypatch):
    write_atomically(path, "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def records(path):
    """Return the payloads of an event file: length, checksum, payload, checksum, each."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_event_files_hold_each_value_under_its_name(tmp_path):
    with MetricsWriter(tmp_path, 0, True) as writer:
        for row in ROWS:
            writer.write(row)
        writer.write_text(20, "sample", "some text")
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert "tfevents" in file.name
    for name, value, count in (("train_loss", 2.5, 2), ("val_bpc", 3.5, 1), ("train_bpc", 3.2, 2)):
        held = [record for record in records(file) if name.encode() in record]
        assert len(held) == count
        assert struct.pack("<f", value) in b"".join(held)
    assert any(b"sample" in record and b"some text" in record for record in records(file))
    assert not any(b"\x04step" in record for record in records(file))


def test_without_tensorboard_there_is_only_the_table(tmp_path, path):
    with MetricsWriter(tmp_path, 0, False) as writer:
        writer.write(ROWS[0])
        writer.write_text(10, "sample", "some text")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.4, "0s"),
        (12, "12s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (60, "1m00s"),
        (185, "3m05s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (3720, "1h02m"),
        (90_061, "25h01m"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_progress_line():
    row = {
        "step": 20,
        "train_loss": 2.25,
        "train_bpc": 3.246,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_second": 12345.6,
    }
    line = progress_line(row, 1000, 185)
    expected = [
        "step   20/1000",
        "loss 2.2500 nats",
        "3.2460 bpc",
        "grad 0.50",
        "lr 1.00e-03",
        "12,346 tokens/s",
        "3m05s left",
    ]
    assert line == "  ".join(expected)
