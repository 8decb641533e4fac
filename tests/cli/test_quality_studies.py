"""`jfuse study`: the studies of quality and attention end to end on the tiny model, data and figure side by side."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jfuse.cli import parse
from jfuse.cli.study import STUDIES

LAYERS = ("--layers", 1)


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    """Two questions over passages, answers labelled."""
    rows = []
    for number in range(2):
        texts = [f"The {word} of town {number} is {number + i}{i}." for i, word in enumerate(("mayor", "river"))]
        start = texts[1].index(" is ") + 4
        row = {"question": "The river?", "answers": [texts[1][start:-1]], "chunks": texts}
        rows.append(row | {"gold": [1], "spans": [[start, len(texts[1]) - 1]]})
    path = tmp_path_factory.mktemp("data") / "towns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_files(folder, name):
    saved = json.loads((folder / f"{name}.json").read_text())
    for kind, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (folder / f"{name}.{kind}").read_bytes().startswith(magic)
    return saved


def test_attention_study(as_json, folder, towns, tmp_path):
    result = as_json("study", "attention", "--model", folder, "--task", towns, "--num-samples", 1, "--out", tmp_path)
    assert result["mass"][-1]["mass"] == pytest.approx(1)
    assert [row["layer"] for row in result["overlap"]] == [0, 1]
    assert check_files(tmp_path, "attention")["mass"] == result["mass"]
    settings = {"model": folder.name, "task": towns.name, "num_samples": 1, "dtype": "auto", "longest_request": None}
    assert result["settings"] == settings  # all options, no folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "rows"),
    [
        ("anchors", ("--rules", "sink", "--shares", 0, 1, "--num-samples", 1), 2),
        ("fidelity", ("--selectors", "epic", "--num-samples", 1), 4),
    ],
)
def test_studies_of_attention(as_json, folder, towns, tmp_path, name, arguments, rows):
    asked = ("study", name, "--model", folder, "--task", towns, *arguments, "--out", tmp_path)
    assert len(as_json(*asked)["rows"]) == rows
    check_files(tmp_path, name)


@pytest.mark.slow
def test_layers_study(as_json, folder, towns, tmp_path):
    result = as_json("study", "layers", "--model", folder, "--task", towns, "--num-samples", 2, "--out", tmp_path)
    assert sorted(row["rank"] for row in result["single"]) == [1, 2] and len(result["together"]) == 2
    check_files(tmp_path, "layers")
    made = as_json("profile", "--model", folder, "--samples", towns, "--top", 1, "--out", tmp_path / "p.json")
    drawn = as_json("study", "layers", "--model", folder, "--profile", tmp_path / "p.json", "--out", tmp_path)
    assert [row["recall"] for row in drawn["single"]] == made["recall"] and drawn["num_samples"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "methods"),
    [
        ("tradeoff", ("--selectors", "epic", "--ratios", 0.3, 0.5), 4),
        ("ablation", ("--of", "anchors", "--shares", 0, 0.5), 4),
        ("ablation", ("--of", "layers"), 7),  # one critical layer: it is both "best 1" sets
        ("relaxkv", ("--table", "ratio", "--ratios", 0.3), 6),
        ("relaxkv", ("--table", "context", "--ratios", 0.3), 11),
        ("relaxkv", ("--table", "capacity", "--ratios", 0.3), 4),
    ],
)
def test_studies_of_quality_go_on_where_they_stopped(as_json, folder, towns, tmp_path, name, arguments, methods):
    asked = ("study", name, "--model", folder, "--tasks", towns, "--limit", 1, *LAYERS, *arguments, "--measure", "kl")
    result = as_json(*asked, "--out", tmp_path)
    assert len(result["rows"]) == methods
    assert as_json(*asked, "--out", tmp_path)["rows"] == result["rows"]
    assert result["settings"]["layers"] == [1] and result["settings"]["measure"] == "kl"
    (manifest,) = (tmp_path / "parts").rglob("manifest.json")
    assert json.loads(manifest.read_text())["command"].startswith(f"jfuse study {name} ")
    variant = f"-{arguments[1]}" if name != "tradeoff" else ""
    check_files(tmp_path, name + variant)


@pytest.mark.slow
def test_stress_study(as_json, folder, tmp_path):
    sizes = ("--by", "size", "--values", 600, 1200, "--length", 1200, "--tasks", "single", "--limit", 1)
    asked = ("study", "stress", "--model", folder, *sizes, "--selectors", "epic", "--measure", "kl")
    rows = as_json(*asked, "--out", tmp_path)["rows"]
    assert {(row["num_chunks"], row["chunk_tokens"]) for row in rows} == {(2, 600), (1, 1200)}
    check_files(tmp_path, "stress-size")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra"), [("breakdown", ("--new-tokens", 2)), ("bandwidth", ("--load-shares", 0.5))])
def test_studies_of_time(as_json, folder, tmp_path, name, extra):
    size = ("--chunks", 2, "--chunk-tokens", 32, "--query-tokens", 8, "--repeats", 1, "--selectors", "epic")
    rows = as_json("study", name, "--model", folder, *size, *extra, "--out", tmp_path)["rows"]
    assert [row["method"] for row in rows[:2]] == ["full prefill", "epic"]
    assert len(rows) == (2 if name == "breakdown" else 4)
    check_files(tmp_path, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--num-samples", 0), "num-samples is 0"),
        (("breakdown", "--repeats", 0), "repeats is 0"),
        (("tradeoff", "--measure", "score"), "set --new-tokens"),
        (("breakdown", "--selectors", "nobody"), "nobody"),
    ],
)
def test_what_cannot_be_studied_is_one_line(run, folder, arguments, message):
    code, out, err = run("study", arguments[0], "--model", folder, *arguments[1:])
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_the_page_names_every_study_and_its_commands_can_be_typed():
    """`docs/reproducing.md`: a renamed option or study would leave a dead command there."""
    page = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text(encoding="utf-8")
    blocks = [line.replace("\\\n", " ") for line in re.findall(r"```\n(.*?)```", page, re.S)]
    commands = re.findall(r"`(jfuse study [^`]+)`", page)
    commands += [line for block in blocks for line in block.splitlines() if line.startswith("jfuse study")]
    for command in commands:
        words = shlex.split(command)
        assert isinstance(parse(words[1:]), STUDIES[words[2]]), command
    assert {shlex.split(command)[2] for command in commands} == set(STUDIES)
