"""The commands that read a finished run: sampling and scoring."""

import base64
import io
import json
import shutil
import sys

import numpy as np
import pytest
import tiny_run

from experiments import evaluate, sample
from kuramoto_jax.generate import as_text

CONTENT = b"the cat sat on the mat. " * 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps on a short text; to be read only."""
    sizes = ("model.layers=1", "model.width=8", "model.heads=1", "model.hidden=8")
    return tiny_run.train(tmp_path_factory.mktemp("run"), CONTENT, 16, *sizes)


class Stdin:
    def __init__(self, content):
        self.buffer = io.BytesIO(content)


def sampled(run, capsysbinary, *flags):
    assert sample.main([f"--workdir={run}", *flags]) == 0
    return capsysbinary.readouterr().out


def test_text_is_the_prompt_and_its_continuation(run, capsysbinary):
    text = sampled(run, capsysbinary, "--prompt=the c", "--length=20", "--temperature=0")
    assert text.startswith(b"the c")
    assert sampled(run, capsysbinary, "--prompt=the c", "--length=20", "--temperature=0") == text


def test_raw_bytes_are_those_of_the_json(run, capsysbinary):
    flags = ("--prompt=a", "--length=40", "--temperature=2", "--seed=5")
    raw = sampled(run, capsysbinary, *flags, "--raw")
    row = json.loads(sampled(run, capsysbinary, *flags, "--json"))
    assert len(raw) == 40
    assert base64.b64decode(row["base64"]) == raw


def test_seeds_and_samples_differ(run, capsysbinary):
    flags = ("--prompt=a", "--length=40", "--json")
    one, two = sampled(run, capsysbinary, *flags, "--samples=2").splitlines()
    other = sampled(run, capsysbinary, *flags, "--seed=1")
    assert len({json.loads(line)["base64"] for line in (one, two, other)}) == 3


def test_several_texts_are_those_of_the_json_and_the_first_is_shown_as_it_is_drawn(
    run, capsysbinary
):
    flags = ("--prompt=a", "--length=40", "--samples=2")
    rows = [json.loads(line) for line in sampled(run, capsysbinary, *flags, "--json").splitlines()]
    shown = sampled(run, capsysbinary, *flags).decode()
    expected = [
        f"--- sample {number}\n"
        + as_text(np.frombuffer(b"a" + base64.b64decode(row["base64"]), np.uint8))
        for number, row in enumerate(rows, start=1)
    ]
    assert shown == "\n".join(expected) + "\n"


def test_the_first_of_several_texts_does_not_wait_for_the_others(capsys):
    def pieces():
        yield np.array([[97, 98], [99, 100]], np.uint8)
        assert capsys.readouterr().out == "--- sample 1\n>ab"
        yield np.array([[101], [102]], np.uint8)

    sample.show(np.array([62], np.uint8), pieces(), 2)
    assert capsys.readouterr().out == "e\n--- sample 2\n>cdf\n"


def test_the_window_of_the_memory(run, capsysbinary, monkeypatch):
    asked = []

    def stream(*args, slots, **fields):
        asked.append(slots)
        yield np.zeros((1, 3), np.uint8)

    monkeypatch.setattr(sample, "stream", stream)
    for flags in ([], ["--window=1"], ["--window=64"]):
        assert sampled(run, capsysbinary, "--prompt=a", "--raw", *flags) == bytes(3)
    assert asked == [16, 1, 64]  # the run's own first


@pytest.mark.parametrize("prompt", [b"\x00\xff\xfe", b"", "é€".encode() * 40, b"\r\n\t"])
def test_any_bytes_on_standard_input(run, capsysbinary, monkeypatch, prompt):
    monkeypatch.setattr(sys, "stdin", Stdin(prompt))
    row = json.loads(sampled(run, capsysbinary, "--length=3", "--json"))
    assert len(base64.b64decode(row["base64"])) == 3


def test_characters_of_several_bytes_stay_whole(run, capsysbinary):
    text = sampled(run, capsysbinary, "--prompt=é€", "--length=40", "--temperature=2")
    assert text.decode().startswith("é€")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "workdir"),
        (["--workdir=RUN", "--temperature=-1"], "temperature"),
        (["--workdir=RUN", "--temperature=nan"], "temperature"),
        (["--workdir=RUN", "--top_p=1.5"], "top_p"),
        (["--workdir=RUN", "--top_k=-1"], "top_k"),
        (["--workdir=RUN", "--length=0"], "length"),
        (["--workdir=RUN", "--length=x"], "length"),
        (["--workdir=RUN", "--window=0"], "window"),
        (["--workdir=RUN", "--temprature=1"], "temprature"),
        (["--workdir=RUN", "--json", "--raw"], "raw"),
        (["--workdir=RUN", "word"], "word"),
        (["--workdir=/nowhere/at/all"], "workdir"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line(run, capsys, flags, word):
    flags = [flag.replace("RUN", str(run)) for flag in flags]
    assert sample.main(flags) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert word in error


def score(run, capsys, *flags):
    """The score and the rest of the line that the command prints."""
    assert evaluate.main([f"--workdir={run}", *flags]) == 0
    words = capsys.readouterr().out.split()
    return float(words[1]), " ".join(words)


def test_stride_of_a_window_is_the_score_of_the_run(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    for split, key in (("validation", "val_bpc"), ("test", "test_bpc")):
        for flags in ([], ["--stride=16"]):
            bpc, _ = score(run, capsys, f"--split={split}", *flags)
            assert bpc == pytest.approx(summary[key], abs=1e-4)


def test_a_stride_states_its_context(run, capsys):
    _, line = score(run, capsys, "--stride=4")
    assert "239 bytes" in line
    assert "at least 12 bytes of context" in line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ('{"data": {"sha256": "0", "description": "x"}}', "the data has changed"),
        ("{}", "environment.json is damaged"),
        ('{"data": []}', "environment.json is damaged"),
        ("", "environment.json is damaged"),
    ],
)
def test_a_run_on_other_data_or_on_data_unknown_is_not_scored(
    run, tmp_path, capsys, environment, words
):
    folder = tmp_path / "w"
    shutil.copytree(run, folder)
    (folder / "environment.json").write_text(environment)
    assert evaluate.main([f"--workdir={folder}"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--stride=17"], ["--stride=0"], ["--split=tst"]], ids=str)
def test_bad_scoring_flags_are_one_line(run, capsys, flags):
    assert evaluate.main([f"--workdir={run}", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert flags[0].split("=")[0].lstrip("-") in error


@pytest.mark.parametrize("command", [sample, evaluate])
def test_help_names_the_flags(command, capsys):
    assert command.main(["--help"]) == 0
    assert "--workdir" in capsys.readouterr().out
