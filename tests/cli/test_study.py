"""`jfuse study`: each study end to end on the tiny model; data and figure lie side by side."""

import json
from pathlib import Path

import pytest

from jfuse.cli.study import STUDIES
from jfuse.fingerprint import Fingerprint
from jfuse.profile import LayerProfile, save_profile

SMALL = ("--chunks", 2, "--chunk-tokens", 40, "--query-tokens", 9)


def test_help_lists_the_studies_and_each_shows_an_example(run):
    code, out, _ = run("study", "--help")
    assert code == 0 and all(f"• {name} " in out for name in STUDIES)
    for name, study in STUDIES.items():
        code, out, _ = run("study", name, "--help")
        assert code == 0 and study.name == name and study.example.startswith(f"jfuse study {name}")
        assert study.example in " ".join(out.replace("│", " ").split())
    code, out, err = run("study")
    assert (code, out) == (2, "") and "throughput" in err


def test_throughput(as_json, run, folder):
    """One row per method and load; the figure has a line per method."""
    asked = ("study", "throughput", "--model", folder, *SMALL, "--requests", 2, "--loads", 0.5, "--layers", 1)
    found = as_json(*asked, "--selectors", "qcfuse", "--out", "deep/out")
    loads = [(row["load"], row["method"]) for row in found["rows"]]
    assert loads == [(load, name) for load in ("single", "saturation", 0.5) for name in ("full prefill", "qcfuse")]
    assert all(row["failed"] == 0 and row["served"] in (2, 5) and row["p50"] > 0 for row in found["rows"])
    assert found["settings"]["ratio"] == 0.5 and found["saved"] == "deep/out/throughput.json"
    saved = json.loads(Path("deep/out/throughput.json").read_text())
    assert saved["rows"] == found["rows"]
    assert {path.name for path in Path("deep/out").iterdir()} >= {"throughput.png", "throughput.pdf"}


def test_timeline(run, folder):
    """The link makes reads visible; the figure draws them."""
    asked = ("study", "timeline", "--model", folder, *SMALL, "--selector", "prophetkv", "--load-share", 0.5)
    code, out, err = run(*asked)
    assert (code, err) == (0, ""), err
    assert "prophetkv, ratio 0.5" in out and "memory for select" in out
    events = json.loads(Path("runs/studies/timeline/timeline.json").read_text())["report"]["events"]
    assert {"read", "select", "fuse", "query"} <= {event["what"] for event in events}
    assert Path("runs/studies/timeline/timeline.png").stat().st_size > 5_000


REFUSED = {
    "selector": (["throughput", "--selectors", "magic"], ["'magic'", "qcfuse"]),
    "requests": (["throughput", "--requests", "0"], ["--requests is 0", ">= 1"]),
    "loads": (["throughput", "--loads", "0.5", "0"], ["--loads holds 0", "above 0"]),
    "ratio": (["timeline", "--ratio", "1.5"], ["1.5", "0 (reuse) to 1"]),
    "query": (["timeline", "MODEL", "--selector", "reuse", "--query-tokens", "99999"], ["99999", "query tokens"]),
    "share": (["timeline", "--selector", "reuse", "--load-share", "0"], ["--load-share is 0", "above 0"]),
    "shares": (["bandwidth", "--load-shares", "0.5", "0"], ["--load-shares holds 0", "above 0"]),
    "breakdown": (["breakdown", "--ratio", "3"], ["--ratio is 3", "0 (reuse) to 1"]),
    "fidelity": (["fidelity", "--ratio", "3"], ["--ratio is 3", "0 (reuse) to 1"]),
    "throughput": (["throughput", "--ratio", "3"], ["--ratio is 3", "0 (reuse) to 1"]),
    "ablation": (["ablation", "--of", "layers", "--ratio", "3"], ["--ratio is 3", "0 (reuse) to 1"]),
    "size": (["breakdown", "--chunks", "0"], ["--chunks is 0", ">= 1"]),
    "setting": (["throughput", "--selectors", "relaxkv:window=wide"], ["window", "'wide'", "use int"]),
    "no layers": (["bandwidth", "--selectors", "epic", "--layers", "1"], ["epic takes no critical layers"]),
    "layers and profile": (["tradeoff", "--layers", "1", "--profile", "p.json"], ["--layers and --profile"]),
}


NEED_LAYERS = {
    **{name: ("study", name) for name in STUDIES if name not in ("attention", "anchors", "layers", "relaxkv")},
    "ablation": ("study", "ablation", "--of", "layers"),
    "eval": ("eval",),
}


@pytest.mark.parametrize("name", NEED_LAYERS)
def test_a_model_without_a_shipped_profile_takes_its_own(run, folder, model, tmp_path, name):
    """What the refusal names can be done: the profile is read, and refused for what it holds."""
    asked = (*NEED_LAYERS[name], "--models" if name == "eval" else "--model", folder)
    code, out, err = run(*asked)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "jfuse profile" in err and "--profile" in err and "--layers" in err
    profile = LayerProfile(Fingerprint.of(model).model_digest, (0.5, 0.25), (0.5, 0.5), 1, 0)
    for given, part in ((profile, "use 1 to 2 layers"), (profile._replace(model="other"), "fingerprint other")):
        save_profile(given, tmp_path / "profile.json")
        code, _, err = run(*asked, "--profile", tmp_path / "profile.json")
        assert code == 1 and part in err


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_one_line_with_the_remedy(run, folder, name):
    words, parts = REFUSED[name]
    arguments = [part for word in words for part in (("--model", folder) if word == "MODEL" else (word,))]
    code, out, err = run("study", *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert all(part in err for part in parts), err
