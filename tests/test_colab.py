"""The notebook runs from top to bottom, on a budget of a few steps."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "experiments" / "colab.ipynb"


@pytest.fixture
def notebook(tmp_path):
    """The notebook with a tiny budget in a directory of its own, the installed package as it is."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    changes = {
        "STEPS = 500": "STEPS = 6",
        'WORKDIR = "runs/quickstart"': f"WORKDIR = {str(tmp_path / 'run')!r}",
        "%pip install --quiet {SOURCE} matplotlib": "",
        "settings = quickstart.get_config()\n": (
            "settings = quickstart.get_config()\n"
            "settings.data.split = (0.998, 0.001, 0.001)\n"
            "settings.model.layers = 1\n"
        ),
        "length=300": "length=20",
    }
    for old, new in changes.items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        assert len(cells) == 1, old
        cells[0].source = cells[0].source.replace(old, new)
    return notebook


def test_runs_from_top_to_bottom(notebook, tmp_path):
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "step 6/6" in text
    assert "step 8/8" in text
    assert "def __init__(self, " in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
