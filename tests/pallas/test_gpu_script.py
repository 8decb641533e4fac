"""The GPU benchmark from end to end on a CPU, tiny and interpreted: so that its minutes on a card are not lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_section_runs_in_miniature(tmp_path):
    """Every section leaves figures, no method fails, every op is right, and the file is whole."""
    out = tmp_path / "gpu.json"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--miniature", "--seconds", "3000", "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    sections = results["sections"]
    assert list(sections) == ["ceilings", "correctness", "ops", "ttft qwen3", "ttft llama", "blocks"]
    assert results["miniature"] and sections["correctness"]["met"] and len(sections["correctness"]["rows"]) >= 20
    assert all(isinstance(row["pallas"], float) and isinstance(row["xla"], float) for row in sections["ops"]["rows"])
    for name in ("qwen3", "llama"):
        rows = {row["variant"]: row for row in sections[f"ttft {name}"]["rows"]}
        assert all(row["median"] > 0 for row in rows.values()), rows
        methods = {variant.split()[0] for variant in rows}
        assert {"full", "reuse", "qcfuse", "prophetkv", "relaxkv"} <= methods
        assert {variant.split()[-1] for variant in rows} >= {"ready", "host"}


@pytest.mark.slow
def test_a_section_that_fails_costs_no_other(tmp_path, monkeypatch):
    """Its traceback is written, the rest runs, and the script says which one failed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_ops

    def broken(scale):
        raise MemoryError("no room")

    monkeypatch.setattr(gpu_ops, "correctness", broken)
    results = gpu.run(gpu.MINIATURE, float("inf"), tmp_path / "gpu.json", ["ceilings", "correctness"])
    assert (
        "no room" in results["sections"]["correctness"]["error"] and "product_flops" in results["sections"]["ceilings"]
    )
    assert json.loads((tmp_path / "gpu.json").read_text()) == results
    late = gpu.run(gpu.MINIATURE, 0.0, tmp_path / "late.json", ["ceilings"])
    assert late["sections"]["ceilings"]["skipped"] == "out of time"
