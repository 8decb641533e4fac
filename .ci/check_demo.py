"""Checks the demo's result file: a finite row for full prefill, direct reuse and QCFuse at each shown ratio.

Usage: check_demo.py runs/demo/demo.json
"""

import json
import math
import sys
from pathlib import Path

EXPECTED = [("full prefill", 1.0), ("reuse", 0.0), ("qcfuse", 0.1), ("qcfuse", 0.3), ("qcfuse", 0.5)]


def numbers(value, path=""):
    """Every (path, number) inside a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{path}[{index}]")
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield path, value


def main(path: str) -> int:
    """Prints what is wrong with the file; returns the number of faults."""
    result = json.loads(Path(path).read_text())
    rows = result["rows"]
    faults = [f"{name} is {number}" for name, number in numbers(result) if not math.isfinite(number)]
    present = {(row["method"].replace("_", " "), row["ratio"]) for row in rows}
    faults += [f"no row for {method} at ratio {ratio}" for method, ratio in EXPECTED if (method, ratio) not in present]
    for row in rows:
        times = [value for name, value in row.items() if "ttft" in name and isinstance(value, float)]
        if not times or min(times) <= 0:
            faults.append(f"no time to first token for {row['method']} at ratio {row['ratio']}")
    for fault in faults:
        print(f"{path}: {fault}", file=sys.stderr)
    return len(faults)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
