"""The README's table of selectors is the catalogue, and its example runs on names that exist."""

import re
from pathlib import Path

import jfuse
from jfuse import selectors

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


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


def test_what_is_left_out_is_named():
    for name in selectors.LEFT_OUT:
        assert name in README


def test_names_in_the_examples_exist():
    used = set(re.findall(r"\bjf\.(\w+)", README))
    assert used and not [name for name in used if not hasattr(jfuse, name)]
