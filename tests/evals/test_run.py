"""A run can be stopped anywhere and goes on (M-09), belongs to its settings (M-08), and measures what it says."""

import dataclasses
import functools
import json
import sys
from collections import Counter

import numpy as np
import pytest

from jfuse.config import FusionConfig
from jfuse.evals import run as running
from jfuse.evals.estimate import estimate
from jfuse.evals.items import in_batches
from jfuse.evals.manifest import without_folders
from jfuse.evals.measure import Case, Setting
from jfuse.evals.methods import FULL, make_methods
from jfuse.evals.prompts import make_prompt
from jfuse.evals.records import ROWS, TIMINGS, Records, read_rows
from jfuse.evals.results import write_results
from jfuse.evals.run import evaluate, make_plan
from jfuse.evals.settings import Entry, Settings, Task
from jfuse.evals.workload import draw
from jfuse.fingerprint import Fingerprint
from jfuse.generate import prefill_query
from jfuse.pipeline import ResidentChunks, encode_prefix, full_prefill, serve
from jfuse.profile import LayerProfile, save_profile
from jfuse.selectors import by_name
from jfuse.stitch import make_layout
from tests.evals.small import text_model

SETTING = Setting(pad_to=64, row_block=64, staircase_block=64)
METHODS = (Entry("epic", (0.3,)), Entry("prophetkv", (0.3,)), Entry("random", (0.5,), limit=2))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three questions over passages of single bytes, answers labelled."""
    rows = []
    for number in range(3):
        texts = [f"The {word} of town {number} is {number + i}{i}." for i, word in enumerate(("mayor", "river"))]
        start = texts[1].index(" is ") + 4
        chunks = [{"title": "", "text": text} for text in texts]
        row = {"id": f"q{number}", "dataset": "towns", "question": "The river?", "answers": [texts[1][start:-1]]}
        rows.append(row | {"chunks": chunks, "gold": [1], "spans": [[start, len(texts[1]) - 1]]})
    path = tmp_path_factory.mktemp("data") / "towns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(data, **changes) -> Settings:
    task = Task("towns", data=str(data), example=False, new_tokens=3)
    return Settings(**({"tasks": (task,), "methods": METHODS, "limit": 3, "models": ("tiny",)} | changes))


def run(data, out, **changes) -> int:
    return evaluate(settings(data, **changes), out, load=lambda name, dtype: text_model(2), setting=SETTING)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run(data, out) == 3 * 4 + 2  # full, reuse, epic and prophetkv, and random on two samples
    return out


@pytest.mark.parametrize("stop", [1, 6])
def test_stopped_run_goes_on_to_the_same_bytes(data, whole, tmp_path, monkeypatch, stop):
    """M-09: killed after any row, a line torn; then 100 % of the rows, each once, and the same metrics."""
    measure, seen = running.measure_item, []

    def breaks(*arguments, **options):
        for row in measure(*arguments, **options):
            if len(seen) == stop:
                raise KeyboardInterrupt
            seen.append(row)
            yield row

    monkeypatch.setattr(running, "measure_item", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run")
    monkeypatch.undo()
    for name in (ROWS, TIMINGS):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"model": "tiny", "task": "to')  # the line that was being written
    assert run(data, tmp_path / "run") == 14 - stop
    assert (tmp_path / "run" / ROWS).read_bytes() == (whole / ROWS).read_bytes()
    keys = [(row["id"], row["method"]) for row in read_rows(tmp_path / "run" / ROWS)]
    assert len(set(keys)) == len(keys) == 14
    for name in ("metrics.json", "metrics.csv"):
        write_results(whole), write_results(tmp_path / "run")
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()
    assert run(data, tmp_path / "run") == 0


def test_other_settings_are_refused_and_more_of_the_same_joins(data, whole, tmp_path):
    """M-08: rows are never overwritten, nor mixed with those of another run."""
    before = (whole / ROWS).read_bytes()
    with pytest.raises(ValueError, match=r"holds rows of another run: tasks.towns.new_tokens was 3 and is 0"):
        run(data, whole, tasks=(Task("towns", data=str(data), example=False),))
    with pytest.raises(ValueError, match=r"models.tiny.fingerprint was"):
        evaluate(
            settings(data), whole, load=lambda name, dtype: text_model(1), setting=SETTING
        )  # another model of the same name
    assert (whole / ROWS).read_bytes() == before
    first = settings(data, methods=METHODS[:1], limit=2)
    model = text_model(2)
    assert len(make_plan(first, "tiny", model, setting=SETTING).items) == 2
    with Records(tmp_path, make_plan(first, "tiny", model).identity | {"tasks": {"a": 1}}) as records:
        records.add({"model": "tiny", "task": "a", "id": "1", "method": "epic", "ratio": 0.3}, {"seconds": 0.1})
    grown = make_plan(first, "tiny", model).identity | {"tasks": {"b": 2}}
    with Records(tmp_path, grown) as records:
        assert records.identity["tasks"] == {"a": 1, "b": 2} and len(records.rows) == 1
        with pytest.raises(ValueError, match="is there already"):
            records.add({"model": "tiny", "task": "a", "id": "1", "method": "epic", "ratio": 0.3}, {})
        with pytest.raises(BlockingIOError, match="Another process"), Records(tmp_path, grown):
            pass


def test_damage_before_the_last_line_is_refused(tmp_path):
    with Records(tmp_path, {"a": 1}) as records:
        for id in "12":
            records.add({"model": "m", "task": "t", "id": id, "method": "epic", "ratio": 0.3}, {})
    content = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(b"{" + content)
    with pytest.raises(ValueError, match=r"predictions.jsonl, line 1 is damaged"), Records(tmp_path, {"a": 1}):
        pass
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest.json"), Records(tmp_path, {"a": 1}):
        pass


def test_figures_are_those_of_the_serving_path(data, whole):
    """KL, NLL and realised ratio against `serve` and `full_prefill` of every prefix of the answer, in plain NumPy."""
    model = text_model(2)
    sample = draw(settings(data).tasks[0], model.tokenizer, 1)[0]
    prompt = make_prompt(sample, model.tokenizer)
    prefix = encode_prefix(model, prompt.prefix)
    case = Case(model, prompt, setting=SETTING)
    method = make_methods(["prophetkv"], [0.3])[-1]
    assert method.selector is not None
    selection = case.choose(method)
    config = FusionConfig(0.3, pad_to=64, row_block=64)
    source = ResidentChunks(case._chunks)
    served = serve(model, source, prompt.question, method.selector, config, prefix=prefix)
    full, fused = [], []
    for step in range(len(prompt.reference)):
        query = np.concatenate([prompt.question.tokens, prompt.reference[:step]])
        question = prompt.question._replace(tokens=query)
        layout = make_layout(prompt.chunks, prompt.prefix, pad_to=64)
        full.append(full_prefill(model, layout, question).first)
        fused.append(prefill_query(model, served.context, query)[0])
    full, fused = (_log_softmax(np.asarray(x, np.float64)) for x in (full, fused))
    kl = (np.exp(full) * (full - fused)).sum(-1)
    row = next(row for row in read_rows(whole / ROWS) if row["method"] == "prophetkv")
    assert row["id"] == "q0"
    np.testing.assert_allclose([row["kl"], row["first_kl"]], [kl.mean(), kl[0]], rtol=2e-3, atol=1e-7)
    nll = -fused[np.arange(len(prompt.reference)), prompt.reference].mean()
    np.testing.assert_allclose(row["nll"], nll, rtol=1e-5)
    recompute = np.asarray(selection.recompute)
    assert row["rows"] == recompute.sum(1).tolist()
    assert row["realised"] == pytest.approx(recompute.sum() / (recompute.shape[0] * row["context"]), abs=1e-6)
    first, start = [], len(prompt.prefix)
    for chunk in prompt.chunks:
        first += range(start, start + min(4, len(chunk)))
        start += len(chunk)
    assert row["sinks"] == pytest.approx(recompute[:, first].sum() / recompute.sum(), abs=1e-6)  # pitfall 35
    ends = {row["method"]: row for row in read_rows(whole / ROWS) if row["id"] == "q0"}
    assert ends[FULL]["kl"] == 0 and ends["reuse"]["realised"] == 0 and ends["reuse"]["kl"] > 0


def test_batches_give_the_rows_of_single_runs(data, whole, tmp_path):
    """ID-8: two of three questions in one program, the third alone, since no partner is left for it."""
    task = Task("towns", data=str(data), example=False)
    with pytest.raises(ValueError, match=r"batch is 2, but times and greedy answers are those of single requests"):
        settings(data, batch=2)
    with pytest.raises(ValueError, match=r"batch is 2, but"):
        settings(data, tasks=(task,), batch=2, ttft=True)
    with pytest.raises(ValueError, match=r"batch is -1; use an integer >= 0"):
        settings(data, tasks=(task,), batch=-1)
    methods = METHODS[:2]
    assert run(data, tmp_path, tasks=(task,), methods=methods, batch=2) == 3 * 4
    singles = {(row["id"], row["method"]): row for row in read_rows(whole / ROWS)}
    for row in read_rows(tmp_path / ROWS):
        single = singles[row["id"], row["method"]]
        assert row.keys() == single.keys() - {"answer", "score"}
        for name, value in row.items():
            assert value == (pytest.approx(single[name], rel=1e-4, abs=1e-6) if type(value) is float else single[name])
    assert run(data, tmp_path, tasks=(task,), methods=methods, batch=2) == 0
    with pytest.raises(ValueError, match="holds rows of another run"):
        run(data, tmp_path, tasks=(task,), methods=methods)


def test_batches_hold_samples_of_one_bucket_and_the_same_methods(data):
    plan = make_plan(settings(data), "tiny", text_model(2), setting=SETTING)
    assert [[item.number for item in items] for items in in_batches(plan.items, 2, SETTING)] == [[0, 1], [2]]
    longer = plan.items[1]._replace(prompt=plan.items[1].prompt._replace(prefix=np.zeros(999, np.int32)))
    items = [plan.items[0], longer, plan.items[1]]
    assert [len(batch) for batch in in_batches(items, 3, SETTING)] == [2, 1]
    assert [batch[0].number for batch in in_batches(plan.items, 1, SETTING)] == [0, 1, 2]


def _log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_samples_that_do_not_fit_are_left_out_for_every_method(data):
    """M-06: denominators stay equal; a run that nothing is left of is refused."""
    model = text_model(2)
    lengths = [
        len(prompt.prefix) + sum(map(len, prompt.chunks)) + len(prompt.question.tokens) + max(len(prompt.reference), 3)
        for prompt in (
            make_prompt(sample, model.tokenizer) for sample in draw(settings(data).tasks[0], model.tokenizer, 3)
        )
    ]

    def limited(positions):
        return model.replace(config=dataclasses.replace(model.config, max_positions=positions))

    plan = make_plan(settings(data), "tiny", limited(max(lengths)), setting=SETTING)
    assert len(plan.items) == 3 and not plan.too_long
    with pytest.raises(ValueError, match=r"tiny can serve none of the 3 samples: .* its 100 positions"):
        make_plan(settings(data), "tiny", limited(100), setting=SETTING)


def test_one_sample_that_does_not_fit_counts_for_no_method(data, tmp_path):
    """M-06: the second of three questions is longer than the model; every method is measured on the other two."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1]["question"] = "The river, " * 40
    (tmp_path / "towns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = text_model(2).replace(config=dataclasses.replace(text_model(2).config, max_positions=400))
    asked = settings(tmp_path / "towns.jsonl", methods=METHODS[:2])
    plan = make_plan(asked, "tiny", model, setting=SETTING)
    assert plan.too_long == ["towns/q1"] and [item.sample.id for item in plan.items] == ["q0", "q2"]
    counts = Counter(method.key for item in plan.items for method in item.methods)
    assert counts.keys() == plan.planned.keys() and len(counts) == 4 and set(counts.values()) == {2}


def test_own_selector_is_measured_beside_others(data, tmp_path):
    """A selector of the user's own, by the name that the settings use."""
    own = by_name("epic")._replace(name="mine")

    def run_with(selector):
        asked = settings(data, methods=(Entry("mine", (0.3,)),), limit=1)
        load = functools.partial(text_model, 2)
        return evaluate(asked, tmp_path, selectors={"mine": selector}, load=lambda name, dtype: load(), setting=SETTING)

    assert run_with(own) == 3
    assert [row["method"] for row in read_rows(tmp_path / ROWS)] == [FULL, "reuse", "mine"]
    assert run_with(own) == 0
    with pytest.raises(ValueError, match=r"rows of another run: selectors.mine.score_sha256 was"):
        run_with(own._replace(score=lambda evidence, params=None: own.score(evidence, params)))


def test_methods_with_and_without_critical_layers_share_a_folder(data, tmp_path):
    """Layers belong to the run only once a method needs them; then they cannot change."""
    assert run(data, tmp_path, methods=METHODS[:1], limit=1) == 3
    assert run(data, tmp_path, methods=(Entry("qcfuse", (0.3,)),), limit=1, layers=(1,)) == 1
    assert run(data, tmp_path, methods=METHODS[1:2], limit=1) == 1
    with pytest.raises(ValueError, match=r"models.tiny.layers was \[1\] and is \[0\]"):
        run(data, tmp_path, methods=(Entry("qcfuse", (0.5,)),), limit=1, layers=(0,))


def test_the_bar_shows_the_share_of_the_gap_that_is_closed():
    """Running sums; a sample whose reuse is not there yet, and other tasks and ratios, do not count."""
    where = {"model": "m", "task": "t"}

    def row(id, method, ratio, kl, **other):
        return {**where, "id": id, "method": method, "ratio": ratio, "kl": kl, **other}

    so_far = running.ScoreSoFar([row("1", FULL, 1.0, 0.0), row("1", "reuse", 0.0, 1.0), row("1", "epic", 0.3, 0.2)])
    assert so_far.add(row("2", FULL, 1.0, 0.0)).endswith("measuring the gap")
    assert so_far.add(row("2", "reuse", 0.0, 3.0)) == "t reuse 0: 0% of the KL gap closed"
    so_far.add(row("2", "epic", 0.5, 0.0)), so_far.add(row("1", "epic", 0.3, 9.0, task="other"))
    assert so_far.add(row("2", "epic", 0.3, 1.0)) == "t epic 0.3: 70% of the KL gap closed"


def test_a_profile_of_the_models_own_gives_the_layers(data, tmp_path):
    """For a model that jfuse ships no profile of, what the refusal names is what helps."""
    model, asked = text_model(3), settings(data, methods=(Entry("qcfuse", (0.3,)),))
    with pytest.raises(
        LookupError, match=r"`jfuse profile` and give its file as --profile, or name layers, .* --layers"
    ):
        make_plan(asked, "tiny", model)
    path = tmp_path / "profile.json"
    save_profile(LayerProfile(Fingerprint.of(model).model_digest, (0.1, 0.3, 0.2), (0.3,), 1, 0), path)
    plan = make_plan(asked, "tiny", model, profile=path)
    assert plan.identity["models"]["tiny"]["layers"] == [1, 2, 0]
    (selector,) = (method.selector for method in plan.items[0].methods if method.name == "qcfuse")
    assert selector is not None and selector.view.layers == (1, 2, 0)
    given = make_plan(dataclasses.replace(asked, layers=(2,)), "tiny", model, profile=path)
    assert given.identity["models"]["tiny"]["layers"] == [2]


def test_one_model_has_one_key_however_its_path_is_spelled(data, tmp_path, monkeypatch):
    """A resume under another spelling must find the rows."""
    (tmp_path / "models" / "q").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("models/q", "./models/q", "models/q/", "models/../models/q", str(tmp_path / "models" / "q")):
        assert make_plan(settings(data), name, text_model(2)).name == "q"
    assert make_plan(settings(data), "Qwen/Qwen3-8B", text_model(2)).name == "Qwen/Qwen3-8B"  # no such folder here


def test_layers_that_the_model_lacks_are_refused_before_anything_is_measured(data, tmp_path):
    """Also by a dry run; a folder with rows could not be used for the right layers."""
    asked = settings(data, methods=(Entry("epic", (0.3,)), Entry("qcfuse", (0.3,))), layers=(99,))
    for measure in (evaluate, estimate):
        with pytest.raises(ValueError, match=r"View.layers holds 99, but this model has layers 0\.\."):
            measure(asked, tmp_path, load=lambda name, **options: text_model(2))
    assert not (tmp_path / ROWS).exists()


def test_models_are_loaded_for_the_longest_request(data, tmp_path):
    """A longrope model's other factor set can be asked for; its rows are told apart by the fingerprint."""
    loaded = []

    def load(name, **options):
        loaded.append(options)
        raise KeyboardInterrupt

    for longest in (None, 5000):
        for measure in (evaluate, estimate):
            with pytest.raises(KeyboardInterrupt):
                measure(settings(data, longest_request=longest), tmp_path, load=load)
    assert loaded == [{"dtype": "auto"}] * 2 + [{"dtype": "auto", "longest_request": 5000}] * 2


def test_a_rule_without_its_package_is_refused_before_anything_is_answered(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    row = json.loads(data.read_text().splitlines()[0]) | {"metric": "rouge_l"}
    (tmp_path / "summaries.jsonl").write_text(json.dumps(row))
    task = Task("summaries", data=str(tmp_path / "summaries.jsonl"), new_tokens=3)
    with pytest.raises(ModuleNotFoundError, match=r"'rouge_l', which needs the package 'rouge': pip install rouge"):
        make_plan(settings(data, tasks=(task,)), "tiny", text_model(2))
    unanswered = dataclasses.replace(task, new_tokens=0)
    assert make_plan(settings(data, tasks=(unanswered,)), "tiny", text_model(2)).items


def test_manifest_names_no_folder_and_no_secret(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    text = json.dumps(manifest)
    assert str(whole.parent) not in text and "/" not in manifest["settings"]["tasks"][0]["data"]
    assert manifest["identity"]["tasks"]["towns"]["data_sha256"] and manifest["versions"]["jax"]
    assert without_folders("/home/ann/m.gguf") == "m.gguf" and without_folders("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    for secret in ("--token=abc", "HF_TOKEN=abc", "hf_abcdefghijkl", "s3://key:pass@bucket/x"):
        assert without_folders(secret) == "***"
