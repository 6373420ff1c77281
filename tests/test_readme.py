"""README.md is true: its code runs, its commands parse, its tables hold the numbers of the code.

Its two `sh` lines are run word for word by .ci/run.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import enwik8
from kuramoto_jax.config import options, parameter_budget

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run():
    assert blocks("python")
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], check=True, cwd=ROOT)


def test_start_is_two_lines_that_make_their_own_environment():
    commands = blocks("sh")
    assert len(commands) == 2
    for command in commands:
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && ")


def test_commands_name_configurations_that_load():
    commands = re.findall(r"python -m experiments\.enwik8 (--config=\S+\.py)", README)
    assert commands
    for command in commands:
        enwik8.parse(shlex.split(command))


@pytest.mark.parametrize("path", sorted((ROOT / "experiments/configs").glob("[a-z]*.py")), ids=str)
def test_table_states_the_parameters_of_each_configuration(path):
    config, _ = enwik8.parse([f"--config={path}"])
    row = next(line for line in README.splitlines() if line.startswith(f"| `{path.name}` |"))
    assert f" {parameter_budget(config.model)['total']:,} " in row


def test_keys_that_are_named_exist():
    known = options()
    named = re.findall(r"`((?:model|data|optim|train)\.(?!py`)[a-z_]+)[`=]", README)
    named += re.findall(r"--config\.((?:model|data|optim|train)\.[a-z_]+)", README)
    assert named
    assert [key for key in named if key not in known] == []


def test_files_that_are_named_exist():
    for name in re.findall(r"`((?:kuramoto_jax|experiments|tests)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), name
