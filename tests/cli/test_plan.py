"""`jfuse plan`: what it prints is what `jfuse.plan` reckons, for machines given and measured."""

import math

import pytest

from jfuse import selectors
from jfuse.hardware import Hardware
from jfuse.models.public import public_config
from jfuse.plan import break_even, fusion_row
from jfuse.selectors.listing import NAMED
from jfuse.types import Sizes

GIVEN = ("--model", "qwen3-8b", "--tflops", 100, "--memory", 3200, "--link", 50, "--disk", 10, "--chunks", 20)


def test_a_machine_that_is_given_needs_no_weights(as_json):
    """Issue: which is fastest, and from what N; every figure is that of the library."""
    found = as_json("plan", *GIVEN, "--selectors", "qcfuse", "prophetkv", "reuse", "--ratio", 0.5, "--layers", 20, 21)
    config, sizes = public_config("Qwen3-8B"), Sizes(32, (512,) * 20, 64)
    machine, chosen = Hardware("given", 100e12, 3200e9, 50e9, 10e9), selectors.qcfuse((20, 21))
    rows = {row["method"]: row for row in found["rows"]}
    assert set(rows) == {"full prefill", "qcfuse", "prophetkv", "reuse"}
    expected = fusion_row(config, machine, sizes, chosen, ratio=0.5)
    for name in ("ttft", "selection", "selection_bytes", "edges", "flops", "realised_ratio"):
        assert rows["qcfuse"][name] == getattr(expected, name)
    assert rows["qcfuse"]["rows"] == [5120] * 36
    assert rows["qcfuse"]["pays_from"] == break_even(config, machine, chosen, ratio=0.5) == 512
    assert [row["fastest"] for row in found["rows"]] == [True, False, False, False]
    assert [row["ttft"] for row in found["rows"]] == sorted(row["ttft"] for row in found["rows"])
    assert found["hardware"]["disk"] == 10e9 and found["request"]["chunks"] == [512] * 20


def test_a_slow_disk_makes_full_prefill_the_fastest(run):
    """B-05, need 9: full prefill stands first, and the caches never pay."""
    slow = ("--disk", 0.1, "--selectors", "qcfuse", "prophetkv", "--chunks", 4)
    code, out, err = run("plan", "--model", "Qwen3-8B", "--tflops", 100, *slow)
    assert (code, err) == (0, "")
    assert out.count("never") == 2 and "Fastest: full prefill" in out and "link unlimited" in out
    assert "0.1 GB/s" in out and "32 prefix, 4 x 512 context, 64 query tokens" in out


def test_every_selector_is_planned_unless_some_are_named(as_json):
    found = as_json("plan", *GIVEN[:-1], 2)
    assert {row["method"] for row in found["rows"]} == {*NAMED} - {"recompute_all"} | {"full prefill"}
    assert found["critical_layers"] == [19, 20, 21]


def test_selectors_with_settings_are_planned_apart(as_json):
    rows = as_json("plan", *GIVEN, "--selectors", "relaxkv", "relaxkv:window=512")["rows"]
    edges = {row["method"]: row["edges"] for row in rows}
    assert edges.keys() == {"full prefill", "relaxkv", "relaxkv:window=512"}
    assert edges["relaxkv"] < edges["relaxkv:window=512"]
    assert all(row["pays_from"] for row in rows if row["method"] != "full prefill")


def test_this_machine_is_measured_with_the_model(as_json, folder, tmp_path):
    found = as_json(
        "plan", "--model", folder, "--chunks", 1, "--chunk-tokens", 64, "--selectors", "qcfuse", "--disk", 2
    )
    rates = [found["hardware"][name] for name in ("flops", "memory", "link", "disk")]
    assert all(0 < rate < math.inf for rate in rates) and rates[3] == 2e9 and "measured" in found["hardware"]["name"]
    assert found["critical_layers"] == [0, 1] and not list(tmp_path.iterdir())


REFUSED = {
    "chunks": (["--chunks", "0"], ["--chunks is 0", ">= 1"]),
    "prefix": (["--prefix-tokens", "-1"], ["--prefix-tokens is -1", ">= 0"]),
    "rate": (["--disk", "0"], ["--disk is 0", "above 0"]),
    "not a rate": (["--tflops", "nan"], ["--tflops is nan", "above 0"]),
    "ratio": (["--ratio", "2"], ["2", "0 (reuse) to 1"]),
    "selector": (["--selectors", "magic"], ["'magic'", "qcfuse"]),
    "profile": (["--model", "Qwen3-8B", "--tflops", "1", "--profile", "p.json"], ["--profile", "name --layers"]),
    "no weights": (["--model", "Qwen3-8B"], ["Qwen3-8B is known here by its configuration alone", "--tflops"]),
    "too long": (["--model", "Qwen3-8B", "--tflops", "1", "--chunks", "200"], ["102496", "40960"]),
    "layers": (["--model", "Qwen3-8B", "--tflops", "1", "--layers", "36"], ["36", "0..35"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_one_line_with_the_remedy(run, name):
    arguments, parts = REFUSED[name]
    code, out, err = run("plan", *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert all(part in err for part in parts), err
