"""The studies in a small setting: what each runs, and that its rows are what it says. No test looks at a clock."""

import dataclasses
import json

import numpy as np
import pytest

from jfuse import plot
from jfuse.evals.attention import question_mass
from jfuse.evals.measure import Case, Setting
from jfuse.evals.methods import Method, make_methods
from jfuse.evals.prompts import make_prompt
from jfuse.evals.settings import Entry, Task
from jfuse.evals.studies import ablation, relaxkv
from jfuse.evals.studies.anchors import anchor_recall
from jfuse.evals.studies.attention import concentration
from jfuse.evals.studies.bandwidth import bandwidth
from jfuse.evals.studies.breakdown import time_breakdown
from jfuse.evals.studies.fidelity import layer_fidelity
from jfuse.evals.studies.layers import layer_rows
from jfuse.evals.studies.parts import pooled, run_parts
from jfuse.evals.studies.served import make_request
from jfuse.evals.studies.stress import by_chunk_count, by_chunk_size
from jfuse.evals.studies.tradeoff import tradeoff
from jfuse.evals.workload import draw
from jfuse.pipeline import Question
from jfuse.profile import LayerProfile
from jfuse.selectors import by_name
from tests.evals.small import bytes_tokenizer, text_model
from tests.reference import Reference
from tests.selectors import plain
from tests.tiny import Request

SETTING = Setting(pad_to=64, row_block=32, staircase_block=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two questions over passages of single bytes, answers labelled."""
    rows = []
    for number in range(2):
        texts = [f"The {word} of town {number} is {number + i}{i}." for i, word in enumerate(("mayor", "river"))]
        start = texts[1].index(" is ") + 4
        chunks = [{"title": "", "text": text} for text in texts]
        row = {"id": f"q{number}", "question": "The river?", "answers": [texts[1][start:-1]]}
        rows.append(row | {"chunks": chunks, "gold": [1], "spans": [[start, len(texts[1]) - 1]]})
    path = tmp_path_factory.mktemp("data") / "towns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompts(data):
    task = Task("towns", data=str(data), example=False)
    return [make_prompt(sample, bytes_tokenizer()) for sample in draw(task, bytes_tokenizer(), 2)]


@pytest.fixture(scope="module")
def case(prompts):
    return Case(text_model(), prompts[0], setting=SETTING)


# Configurations: what is run.


def test_tradeoff_runs_every_method_at_every_ratio_and_times_it():
    (part,) = tradeoff(methods=("epic", "qcfuse"), ratios=(0.1, 0.5), limit=3)
    assert part.settings.methods == (Entry("epic", (0.1, 0.5)), Entry("qcfuse", (0.1, 0.5)))
    assert part.settings.ttft and part.settings.limit == 3
    assert [task.name for task in part.settings.tasks] == ["mq", "mv", "hotpotqa", "squad"]


def test_stress_by_count_grows_the_context_and_by_size_does_not():
    grown = by_chunk_count((2, 8), chunk_tokens=256)
    assert [(p.settings.tasks[0].length, p.settings.tasks[0].num_chunks) for p in grown] == [(512, 2), (2048, 8)]
    assert [p.columns["num_chunks"] for p in grown] == [2, 8]
    sized = by_chunk_size((64, 512), length=1024)
    assert [(p.settings.tasks[0].length, p.settings.tasks[0].num_chunks) for p in sized] == [(1024, 16), (1024, 2)]
    assert len({p.label for p in (*grown, *sized)}) == 4
    for size in (2048, 300):
        with pytest.raises(ValueError, match=f"chunk size is {size}; use a divisor of 1024"):
            by_chunk_size((size,), length=1024)
    with pytest.raises(ValueError, match="Task 'squad' has passages of its own"):
        by_chunk_count((2,), tasks=("squad",))


def test_ablation_scores_on_the_layers_it_names():
    (part,) = ablation.scored_layers((23, 22, 21), 30)
    layers = {name: selector.view.layers for name, selector in part.selectors.items()}
    assert layers == {
        "qcfuse, first 3": (0, 1, 2),
        "qcfuse, middle 3": (13, 14, 15),
        "qcfuse, final 3": (27, 28, 29),
        "qcfuse, best 1": (23,),
        "qcfuse, best 3": (23, 22, 21),
        "qcfuse, all": tuple(range(30)),
    }
    assert [entry.selector for entry in part.settings.methods] == list(layers)
    with pytest.raises(ValueError, match="critical names 0 layers"):
        ablation.scored_layers((), 30)


def test_relaxkv_tables_name_selectors_that_exist():
    methods = [
        entry
        for parts in (relaxkv.ratio_sweep(), relaxkv.context_controls(), relaxkv.target_capacity())
        for part in parts
        for entry in part.settings.methods
    ]
    for entry in methods:
        assert len(make_methods([entry.selector], entry.ratios)) == 2 + len(entry.ratios)
    assert {entry.ratios for entry in relaxkv.context_controls(0.15)[0].settings.methods} == {(0.15,)}


# Configurations: that they run, once, and their rows.


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    task = Task("towns", data=str(data), example=False)
    (part,) = tradeoff((task,), methods=("epic", "prophetkv"), ratios=(0.3,), limit=2, model="tiny")
    part = part._replace(settings=dataclasses.replace(part.settings, ttft=False), columns={"num_chunks": 2})
    out = tmp_path_factory.mktemp("study")
    loaded = []

    def load(name, dtype):
        loaded.append(name)
        return text_model()

    options = {"load": load, "setting": SETTING}
    return [run_parts([part], out, **options), run_parts([part], out, **options), out / part.label]


def test_parts_give_one_row_per_configuration_and_are_not_run_twice(ran):
    first, second, folder = ran
    assert first == second
    keys = [(row["method"], row["ratio"], row["num_chunks"], row["n"]) for row in first]
    assert keys == [("full prefill", 1.0, 2, 2), ("reuse", 0.0, 2, 2), ("epic", 0.3, 2, 2), ("prophetkv", 0.3, 2, 2)]
    assert first[0]["kl"] == pytest.approx(0, abs=1e-6) and first[1]["kl"] > 1e-4
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 8  # the second call measured nothing


def test_pooled_means_are_over_the_same_tasks_for_all():
    """Pitfall 50: a task without a clear gap counts for no method."""
    rows = [
        {"task": task, "method": method, "ratio": 0.3, "kl_closed": value, "ttft": ttft, "realised": 0.3}
        for task, method, value, ttft in [
            ("a", "x", 0.2, 1.0),
            ("a", "y", 0.4, 3.0),
            ("b", "x", 0.6, 2.0),
            ("b", "y", 0.8, 5.0),
            ("c", "x", None, 9.0),
            ("c", "y", None, 9.0),
        ]
    ]
    found = {row["method"]: row for row in pooled(rows)}
    assert found["x"] == {
        "method": "x",
        "ratio": 0.3,
        "tasks": 2,
        "kl_closed": pytest.approx(0.4),
        "realised": pytest.approx(0.3),
        "visible": None,
        "ttft": pytest.approx(1.5),
    }
    assert found["y"]["kl_closed"] == pytest.approx(0.6)


# Attention.


def test_concentration_is_that_of_the_stitched_cache(prompts, case):
    curve, overlap = concentration(text_model(), prompts[:1], shares=(0.1, 0.5, 1.0), setting=SETTING)
    mass = question_mass(text_model(), case.stale, prompts[0].question).sum(0)
    ranked = sorted(mass, reverse=True)
    whole = len(mass) * 0.5
    half = (sum(ranked[: int(whole)]) + (whole % 1) * ranked[int(whole)]) / sum(ranked)
    assert [row["share"] for row in curve] == [0.1, 0.5, 1.0]
    assert curve[1]["mass"] == pytest.approx(half, rel=1e-4) and curve[2]["mass"] == pytest.approx(1)
    assert [row["layer"] for row in overlap] == [0, 1, 2] and all(0 <= row["overlap"] <= 1 for row in overlap)


def test_anchor_recall_is_that_of_plain_loops_and_its_ends_do_not_depend_on_the_rule(prompts, case):
    """QCFuse Fig. 6. Sinks at 0.3: the query sees the prefix and the first ceil(0.3 * C) tokens of each chunk."""
    chunks = tuple(case._chunks)
    count = sum(len(chunk.tokens) for chunk in chunks)
    labelled = np.sort(np.random.default_rng(0).choice(count, count // 3, replace=False)).astype(np.int32)
    prompts = [prompts[0]._replace(evidence=labelled)]
    rows = anchor_recall(text_model(), prompts, rules=("sink", "kvzip"), ratios=(0.0, 0.3, 1.0), setting=SETTING)
    found = {(row["rule"], row["anchor_ratio"]): row["recall"] for row in rows}
    assert found["sink", 0.0] == found["kvzip", 0.0] and found["sink", 1.0] == found["kvzip", 1.0]
    model, question = text_model(), prompts[0].question
    reference = Reference(model.config, model.params)
    request = Request(model, reference, chunks, case._prefix, question.tokens, SETTING.pad_to, case.stale)
    seen, start = set(range(request.num_prefix)), request.num_prefix
    for chunk in chunks:
        seen |= set(range(start, start + -(-3 * len(chunk.tokens) // 10)))
        start += len(chunk.tokens)
    asking = range(len(question.tokens))[question.scoring]
    expected = plain.recall(plain.question_attention(request, [seen] * 3, rows=asking).sum(0), labelled)
    assert found["sink", 0.3] == pytest.approx(expected) and 0 < expected < 1
    assert all(row["n"] == 1 for row in rows)
    with pytest.raises(ValueError, match="No prompt has a labelled answer"):
        anchor_recall(text_model(), [prompts[0]._replace(evidence=np.zeros(0, np.int32))], rules=("sink",))


def test_layer_rows_rank_layers_and_keep_the_sums():
    profile = LayerProfile("m", (0.1, 0.5, 0.3), (0.5, 0.6), 7, 0)
    single, together = layer_rows(profile)
    assert [(row["layer"], row["recall"], row["rank"]) for row in single] == [(0, 0.1, 3), (1, 0.5, 1), (2, 0.3, 2)]
    assert together == [{"k": 1, "recall": 0.5, "n": 7}, {"k": 2, "recall": 0.6, "n": 7}]


def test_layer_fidelity_of_the_ends(prompts):
    methods = [Method("all", 1.0, by_name("recompute_all")), Method("reuse", 0.0, by_name("reuse"))]
    rows = layer_fidelity(text_model(), prompts[:1], methods, setting=SETTING)
    by_method = {name: [row for row in rows if row["method"] == name] for name in ("all", "reuse")}
    assert [row["layer"] for row in by_method["all"]] == [0, 1, 2]
    assert all(row["error"] < 1e-4 and row["recovery"] > 0.9999 for row in by_method["all"])
    assert by_method["reuse"][0]["error"] < 1e-5 and all(row["error"] > 1e-3 for row in by_method["reuse"][1:])
    assert all(row["recovery"] < 0.9999 for row in by_method["reuse"][1:])


# Time.


@pytest.fixture(scope="module")
def request_(prompts):
    prompt = prompts[0]
    return make_request(text_model(), prompt.chunks, prompt.question, prefix=prompt.prefix, pad_to=64)


@pytest.mark.slow
def test_breakdown_adds_up(request_):
    rows = time_breakdown(request_, {"epic": by_name("epic")}, ratio=0.5, repeats=2, new_tokens=2)
    full, fused = rows
    assert (full["method"], full["ratio"], fused["method"], fused["ratio"]) == ("full prefill", 1.0, "epic", 0.5)
    assert full["ttft"] == full["prefill"] and full["select_share"] == 0
    assert fused["ttft"] == pytest.approx(fused["select"] + fused["fuse"] + fused["query"])
    assert fused["total"] == pytest.approx(fused["ttft"] + fused["decode"])
    assert fused["select_share"] == pytest.approx(fused["select"] / fused["ttft"])


@pytest.mark.slow
def test_bandwidth_is_set_by_the_time_of_full_prefill(request_):
    rows = bandwidth(request_, {"epic": by_name("epic")}, load_shares=(0.5,), ratio=0.5, repeats=1)
    assert [(row["method"], row["load_share"]) for row in rows] == [
        ("full prefill", 0.0),
        ("epic", 0.0),
        ("full prefill", 0.5),
        ("epic", 0.5),
    ]
    alone, slow = rows[0]["ttft"], rows[3]
    tokens = sum(len(tokens) for tokens in request_.resident.tokens)
    num_bytes = tokens * 2 * 3 * 2 * 16 * 4  # K and V, layers, KV heads, head size, float32
    assert request_.num_bytes == num_bytes
    assert slow["gb_per_s"] == pytest.approx(num_bytes / (0.5 * alone) / 1e9)
    with pytest.raises(ValueError, match="share is 0"):
        bandwidth(request_, {}, load_shares=(0.0,), repeats=1)


def test_request_without_a_prefix(prompts):
    request = make_request(text_model(), prompts[0].chunks, Question(prompts[0].question.tokens), pad_to=64)
    assert request.prefix is None and request.layout.end == sum(map(len, prompts[0].chunks))


# Figures.

ROWS = [
    {"method": "full prefill", "task": "a", "ratio": 1.0, "ttft": 2.0, "kl": 0.0, "realised": 1.0},
    {"method": "qcfuse", "task": "a", "ratio": 0.1, "ttft": 0.5, "kl": 0.2, "kl_se": 0.05, "realised": 0.1},
    {"method": "qcfuse", "task": "a", "ratio": 0.5, "ttft": 1.0, "kl": 0.1, "kl_se": 0.05, "realised": 0.5},
    {"method": "qcfuse", "task": "b", "ratio": 0.5, "ttft": 1.1, "kl": None, "realised": 0.5},
]


def test_a_method_has_one_colour_everywhere():
    assert plot.colour("relaxkv:window=32") == plot.colour("relaxkv") == plot.colour("target_union:window=32")
    assert plot.colour("prophetkv_qcfuse") == plot.colour("prophetkv") != plot.colour("qcfuse")
    assert plot.colour("qcfuse, first 3") == plot.COLOURS["qcfuse"]
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)
    assert plot.OTHER not in plot.COLOURS.values() and plot.colour("mine") == plot.OTHER
    ax = plot.quality_against_ttft(ROWS[:3], quality="kl")
    assert [line.get_color() for line in ax.get_lines()[:1]] == [plot.COLOURS["full prefill"]]


def test_lines_are_joined_by_ratio_and_leave_blanks_out():
    ax = plot.quality_against_work([ROWS[2], ROWS[1], ROWS[3]], quality="kl", label="KL")
    (container,) = ax.containers
    np.testing.assert_array_equal(container[0].get_xdata(), [0.1, 0.5])  # by ratio, with whiskers
    assert sorted(text.get_text() for text in ax.texts) == ["0.1", "0.5"]


def test_panels_are_one_per_value():
    seen = []
    ax = plot.panels(ROWS, "task", lambda own, ax: seen.append((len(own), ax)))
    assert [count for count, _ in seen] == [3, 1]
    assert [panel.get_title() for panel in plot.figure_of(ax).get_axes()] == ["a", "b"]


def test_panels_share_one_legend_of_all_that_any_of_them_shows():
    """Also where the first panel is empty, because full prefill has no clear lead there."""
    empty = [{**row, "task": "flat", "kl": None} for row in ROWS[:2]]
    ax = plot.panels([*empty, *ROWS], "task", lambda own, ax: plot.quality_against_ttft(own, quality="kl", ax=ax))
    figure = plot.figure_of(ax)
    assert [panel.get_legend() for panel in figure.get_axes()] == [None] * 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full prefill", "qcfuse"]


def test_bars_tell_variants_of_one_family_apart():
    rows = [{"method": name, "task": "a", "kl": 1.0} for name in ("relaxkv", "relaxkv_g", "qcfuse")]
    ax = plot.bars(rows, x="task", y="kl", by="method", ylabel="KL")
    looks = [(patch.get_facecolor(), patch.get_hatch()) for patch in ax.patches]
    assert looks[0][0] == looks[1][0] != looks[2][0] and len(set(looks)) == 3


def test_bars_have_whiskers_where_rows_have_them():
    rows = [{"method": "qcfuse", "task": task, "kl": 1.0, "kl_low": 0.75, "kl_high": 1.5} for task in "ab"]
    (bars,) = plot.bars(rows, x="task", y="kl", by="method", ylabel="KL").containers[-1:]
    (whiskers,) = bars.errorbar[2]
    np.testing.assert_allclose([segment[:, 1] for segment in whiskers.get_segments()], [[0.75, 1.5]] * 2)
    bare = plot.bars([ROWS[0]], x="task", y="kl", by="method", ylabel="KL").containers
    assert [container.errorbar for container in bare] == [None]


def test_breakdown_bars_are_stages_one_after_another():
    rows = [{"method": "qcfuse", "ratio": 0.3, "select": 1.0, "fuse": 2.0, "query": 0.5, "load_share": 0.09}]
    ax = plot.time_breakdown(rows)
    assert [(patch.get_x(), patch.get_width()) for patch in ax.patches] == [(0.0, 1.0), (1.0, 2.0), (3.0, 0.5)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["qcfuse 0.3, load 0.09"]


def test_layers_that_matter_are_marked():
    rows = [{"layer": l, "recall": 0.1 * l} for l in range(4)]
    ax = plot.by_layer(rows, y="recall", ylabel="recall", marked=(2, 3))
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"] == [2, 3]


def test_curves_of_the_attention_studies():
    masses = [{"share": s, "mass": m, "mass_se": 0.01} for s, m in ((0.01, 0.6), (0.1, 0.8), (1.0, 1.0))]
    assert plot.mass_concentration(masses).get_xscale() == "log"
    rules = [{"rule": r, "anchor_ratio": a, "recall": 0.2} for r in ("sink", "kvzip") for a in (0.0, 0.1)]
    shades = {line.get_label(): line.get_color() for line in plot.anchor_recall(rules).get_lines()}
    assert shades["sink"] != shades["kvzip"]
    (line,) = plot.top_layer_recall([{"k": 1, "recall": 0.3}, {"k": 2, "recall": 0.4}]).get_lines()
    np.testing.assert_array_equal(line.get_ydata(), [0.3, 0.4])


def test_load_curve_shows_rates_and_where_methods_saturate():
    same = {"method": "qcfuse", "p95": 3.0}
    rows = [
        {**same, "load": 0.8, "offered": 2.0, "achieved": 1.9, "p50": 2.0},
        {**same, "load": 0.4, "offered": 1.0, "achieved": 1.0, "p50": 1.0},
        {**same, "load": "saturation", "offered": None, "achieved": 2.5, "p50": 9.0},
    ]
    median, high, saturated = plot.ttft_against_load(rows).get_lines()
    np.testing.assert_array_equal(median.get_xdata(), [1.0, 1.9])
    np.testing.assert_array_equal(high.get_ydata(), [3.0, 3.0])
    assert saturated.get_xdata()[0] == 2.5
