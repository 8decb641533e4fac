"""`jfuse eval` end to end on a tiny model, and what it refuses before it loads one."""

import dataclasses
import json
from pathlib import Path

import pytest

from jfuse.cli import main
from jfuse.cli.evaluate import as_duration, numbered, report
from jfuse.evals.results import Run
from jfuse.evals.settings import Entry, Settings, Task, from_mapping, read_yaml


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [
        {"id": str(i), "dataset": "rivers", "question": "Which river?", "answers": ["Nile"]}
        | {"chunks": [{"title": "", "text": "The Nile flows."}, {"title": "", "text": f"Number {i}."}]}
        for i in range(2)
    ]
    path = tmp_path_factory.mktemp("data") / "rivers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_from_flags_to_files(folder, data, tmp_path, capsys):
    """Dry run, run with times, and a second go that finds everything there."""
    out = tmp_path / "run"
    words = ["eval", "--models", str(folder), "--data", str(data), "--selectors", "epic", "--limit", "1"]
    words += ["--ratios", "0.5", "--ttft", "--new-tokens", "2", "--out", str(out)]
    assert main([*words, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["runs"] == 3 and planned["seconds"] > 0 and not out.exists()
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["added"] == 3 and [row["method"] for row in result["rows"]] == ["full prefill", "reuse", "epic"]
    assert all(row["ttft"] > 0 and row["score"] is not None for row in result["rows"])
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "0 runs added" in shown and "rivers" in shown
    assert main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 0
    words[words.index("--new-tokens") + 1] = "3"  # the folder's rows were answered with 2, so none of them counts
    for more in (["--dry-run"], []):
        assert main([*words, *more]) == 1
        assert "holds rows of another run: tasks.rivers.new_tokens was 2 and is 3" in capsys.readouterr().err
    manifest = json.loads((out / "manifest.json").read_text())
    assert str(folder.parent) not in json.dumps(manifest) and str(data.parent) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--selectors", "qcfuze"], "There is no selector 'qcfuze'"),
        (["--selectors", "relaxkv:width=3"], "Selector 'relaxkv' has no setting 'width'; use some of window"),
        (["--profile", "p.json", "--layers", "1"], "--profile gives the critical layers of one model"),
        (["--profile", "p.json", "--models", "a", "b"], "--profile gives the critical layers of one model"),
        (["--longest-request", "0"], "longest_request is 0; use an integer >= 1"),
        (["--config", "study.yaml", "--longest-request", "9"], "--longest-request stands beside --config"),
        (["--ratios", "1.5"], "ratios of 'random' is 1.5"),
        (["--tasks", "trivia"], "There is no task 'trivia'"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--limit", "0"], "limit is 0"),
        (["--batch", "2", "--ttft"], "batch is 2, but times and greedy answers are those of single requests"),
        (["--config", "study.yaml", "--selectors", "epic"], "--selectors stands beside --config"),
        (["--config", "study.yaml", "--new-tokens", "4"], "--new-tokens stands beside --config"),
    ],
)
def test_wrong_words_are_one_line(words, message, capsys):
    assert main(["eval", *words]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_yaml_holds_all_settings(tmp_path):
    """Read by safe_load: a tag that would construct an object is refused."""
    path = tmp_path / "study.yaml"
    path.write_text(
        "tasks: [mq, {name: squad, new_tokens: 8}]\nmethods: [epic, {selector: qcfuse, ratios: [0.1, 0.3], limit: 5}]\n"
        "limit: 7\ndtype: bfloat16\n"
    )
    read = read_yaml(path)
    assert read == Settings(
        tasks=(Task("mq"), Task("squad", new_tokens=8)),
        methods=(Entry("epic"), Entry("qcfuse", (0.1, 0.3), 5)),
        limit=7,
        dtype="bfloat16",
    )
    assert from_mapping(read.as_dict()) == read
    for text, message in [
        ("limit: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("limits: 3", "has no field 'limits'"),
        ("[1, 2]", "holds list"),
        ("tasks: [{length: 3}]", "has no 'name'"),
        ("tasks: [mq, mq]", "Two tasks have one name"),
        ("methods: [{selector: epic, ratios: []}]", "has no ratios"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_yaml(path)


def test_help_names_what_a_config_may_hold(capsys):
    """The fields are those of `Settings`, in its order, and the example can be read."""
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    *first, last = (field.name for field in dataclasses.fields(Settings))
    assert f"A YAML file of {', '.join(first)} and {last}, as benchmarks/study.yaml is one" in shown
    assert read_yaml(Path(__file__).parents[2] / "benchmarks" / "study.yaml").tasks


def test_fresh_runs_get_a_number(tmp_path):
    assert numbered(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert numbered(tmp_path / "run") == tmp_path / "run-3"
    assert [as_duration(seconds) for seconds in (5.0, 600.0, 9000.0)] == ["5 s", "10 min", "2.5 h"]


def test_methods_that_are_not_shown_are_named():
    assert "Not shown" not in report(Run({}, [], [], [], 0), Path("run"), 1)[-1]
    assert (
        "Not shown, for they lack samples that count: epic@0.3;"
        in report(Run({}, [], [], [], 0, left_out=["epic@0.3"]), Path("run"), 1)[-1]
    )
