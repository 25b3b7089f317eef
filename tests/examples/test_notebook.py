# SPDX-License-Identifier: Apache-2.0
"""The notebook of the quick start: `verl_digen.train` with a reward that a notebook defines, and what `Run` shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.grid
def test_the_notebook_trains_and_shows_the_reward_and_pictures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    training = next(cell for cell in notebook.cells if "verl_digen.train(" in cell.source)
    folder = f'"trainer.default_local_dir": "{tmp_path}/run", "data.train_batch_size"'
    training.source = training.source.replace('"data.train_batch_size"', folder)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    trained, shown, table, *pictures = (cell.outputs for cell in notebook.cells if cell.get("outputs"))
    text = "".join(output["text"] for output in trained if output["name"] == "stdout")
    assert "step 3/3 | reward" in text and "reward = 1 x redness" in text
    assert f"{tmp_path}/run" in shown[0]["data"]["text/html"] and "reward/mean" in table[0]["data"]["text/html"]
    assert len(pictures) == 2 and all("image/png" in outputs[0]["data"] for outputs in pictures)
    assert (tmp_path / "run" / "report.html").is_file()
