"""The notebooks as committed: run once from top to bottom, outputs kept, and small. `make notebooks` runs them."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MOST_BYTES, MOST_CELLS = 400_000, 40


def test_all_are_here():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path):
    """A reader of the repository sees the plots; nobody's errors, warnings or folders are among them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert path.stat().st_size <= MOST_BYTES and len(cells) <= MOST_CELLS
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    text = json.dumps([output for output in outputs if output["output_type"] == "stream"])
    assert "/home/" not in text and "/tmp/" not in text and "Traceback" not in text


def test_times_that_are_shown_were_taken_on_an_idle_machine():
    """In notebook 05 a method takes longer the more it recomputes, and never as long as full prefill."""
    text = json.dumps(json.loads(NOTEBOOKS[4].read_text(encoding="utf-8"))["cells"])
    shown = re.findall(r"(full prefill|prophetkv|qcfuse) +([0-9.]+) +([0-9.]+) s   KL", text)
    (full,) = (float(seconds) for method, _, seconds in shown if method == "full prefill")
    for method in ("prophetkv", "qcfuse"):
        own = [float(seconds) for name, _, seconds in shown if name == method]
        assert len(own) == 3 and own == sorted(own) and own[-1] < full
