"""Every subcommand end to end, in process, on a tiny model in a Hugging Face folder that the tests write."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jfuse import selectors
from jfuse.chat import chat_request
from jfuse.cli import COMMANDS
from jfuse.cli.prompt import make_prompt
from jfuse.models.resolve import load_model
from jfuse.models.tokenizer import Tokenizer
from jfuse.profile import load_profile
from jfuse.store import ChunkStore
from jfuse.verify import Check
from tests.cli.conftest import PASSAGES
from tests.reference import Reference

TEMPLATE = "<s>user\n{{ messages[-1].content }}</s>\n<s>assistant"


def greedy(reference: Reference, ids, count: int) -> list[int]:
    """Greedy tokens by whole passes of the dense reference."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(np.argmax(reference.run(np.asarray(ids, np.int32)).logits[-1])))
    return ids[-count:]


# encode and inspect


def test_encode_then_skip_what_is_stored(as_json, folder, passages, model):
    """The chunks are the passages' own tokens, long ones cut evenly; a second run encodes nothing."""
    first = as_json("encode", passages, "--store", "store", "--model", folder, "--chunk-tokens", 32)
    assert first["encoded"] == len(first["chunks"]) and first["skipped"] == 0
    sizes = [chunk["tokens"] for chunk in first["chunks"] if chunk["passage"] == "thames"]
    assert len(sizes) > 1 and max(sizes) <= 32 and max(sizes) - min(sizes) <= 1
    store = ChunkStore.open("store", model)
    tokens = store.tokens([chunk["id"] for chunk in first["chunks"]])
    text = "".join(model.tokenizer.decode(piece) for piece in tokens)
    titles = ("Nile\n", "", "")
    assert text == "".join(title + p["text"] + "\n\n" for title, p in zip(titles, PASSAGES, strict=True))
    second = as_json("encode", passages, "--store", "store", "--model", folder, "--chunk-tokens", 32)
    assert (second["encoded"], second["skipped"]) == (0, len(first["chunks"]))
    assert [chunk["id"] for chunk in second["chunks"]] == [chunk["id"] for chunk in first["chunks"]]
    assert all(chunk["was_stored"] for chunk in second["chunks"])


def test_encode_reads_text_files_and_folders(as_json, folder, tmp_path):
    """T-05: an empty file is no passage; hidden order is the order of paths."""
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "b.md").write_text("\ufeffThe Nile.")
    (notes / "a.txt").write_text("The Amstel.")
    (notes / "deep" / "c.jsonl").write_text('{"text": "The Thames."}\n')
    (notes / "empty.txt").write_text(" \n")
    (notes / "picture.png").write_bytes(b"\x89PNG")
    chunks = as_json("encode", "notes", "--store", "store", "--model", folder)["chunks"]
    assert [(chunk["source"], chunk["passage"]) for chunk in chunks] == [
        ("notes/a.txt", "a.txt"),
        ("notes/b.md", "b.md"),
        ("notes/deep/c.jsonl", "1"),
    ]


@pytest.mark.filterwarnings("default")
def test_encode_fails_if_the_store_does_not_keep_all(run, folder, passages):
    """C-07: a cap that is too small is an error here, not a warning in passing."""
    code, out, err = run("encode", passages, "--store", "store", "--model", folder, "--max-bytes", 20_000)
    assert code == 1 and out == ""
    warning, error = err.splitlines()
    assert warning.startswith("jfuse: warning: ") and "did not take a chunk" in warning
    assert re.search(r"did not keep \d of 3 chunks; free space or raise --max-bytes", error)


def test_inspect_a_store_and_a_chunk(run, as_json, store, model):
    found = as_json("inspect", store)
    opened = ChunkStore.open(store, model)
    assert [chunk["id"] for chunk in found["chunks"]] == opened.ids()
    assert found["num_bytes"] == opened.num_bytes and found["num_chunks"] == len(opened)
    assert list(found["fingerprints"]) == [opened.fingerprint.digest]
    one = as_json("inspect", store, opened.ids()[0][:10])
    assert one["fingerprint"]["weights_id"] == model.weights_id and one["layers"] == 2
    code, out, _ = run("inspect", store)
    assert code == 0 and all(id[:12] in out for id in opened.ids())
    code, out, _ = run("inspect", store, opened.ids()[0][:10])
    assert code == 0 and model.weights_id in out


# answer and generate


def test_answer_by_recomputing_all_is_full_prefill(as_json, store, folder, model):
    """The request's ids are prefix, chunks in the order named, query; the answer is that of the dense reference."""
    ids = [ChunkStore.open(store, model).ids()[i] for i in (2, 0)]
    found = as_json(
        *("answer", "Which river?", "--store", store, "--model", folder, "--selector", "recompute_all"),
        *("--chunks", ids[0][:12], ids[1], "--max-new-tokens", 3, "--instruction", "Read."),
    )
    assert found["chunks"] == ids
    prefix, question = chat_request(model.tokenizer, "Which river?", "Read.")
    assert model.tokenizer.decode(prefix) == "Read.\n\n"
    assert model.tokenizer.decode(question.tokens) == "Which river?\nAnswer:"
    assert model.tokenizer.decode(question.tokens[question.scoring]) == "Which river?"
    whole = np.concatenate([prefix, *ChunkStore.open(store, model).tokens(ids), question.tokens])
    expected = greedy(Reference(model.config, model.params), whole, 3)
    stop = next((at for at, token in enumerate(expected) if token in model.tokenizer.stop_ids), 3)
    assert found["tokens"] == expected[:stop]
    assert found["report"]["realised_ratio"] == 1.0
    assert found["report"]["hits"] == 2


def test_answer_over_stored_passages_with_a_report(run, store, folder, passages):
    """The report names the selector as it was asked for, settings included."""
    code, out, err = run(
        *("answer", "Which river?", "--store", store, "--passages", passages, "--chunk-tokens", 32, "--model", folder),
        *("--report", "--max-new-tokens", 2, "--selector", "qcfuse:anchor_ratio=0.2", "--layers", 1, "--ratio", 0.3),
    )
    assert (code, err) == (0, ""), err
    for part in ("qcfuse:anchor_ratio=0.2, ratio 0.3", "time to first token", "0 encoded now", "read before selecting"):
        assert part in out


def test_answer_reads_chunks_in_the_order_of_the_passages(as_json, run, store, folder, passages):
    """A store is ordered by content; reading all of it would shuffle the parts of a passage that was cut."""
    asked = ("answer", "Which river?", "--store", store, "--model", folder, "--selector", "reuse")
    size = ("--chunk-tokens", 32)
    chunks = as_json("encode", passages, "--store", store, "--model", folder, *size)["chunks"]
    in_order = [chunk["id"] for chunk in chunks]
    assert in_order != sorted(in_order)
    assert as_json(*asked, "--max-new-tokens", 1, "--passages", passages, *size)["chunks"] == in_order
    code, out, err = run(*asked)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "chunks in no order" in err and "--passages" in err and "--chunks" in err
    Path("one.txt").write_text("The Nile.")
    (only,) = as_json("encode", "one.txt", "--store", "one", "--model", folder)["chunks"]
    found = as_json("answer", "q", "--store", "one", "--model", folder, "--selector", "reuse", "--max-new-tokens", 1)
    assert found["chunks"] == [only["id"]]


def test_answer_over_files_encodes_what_is_missing(as_json, folder, passages):
    asked = ("answer", "Which river?", "--passages", passages, "--model", folder, "--selector", "reuse")
    found = as_json(*asked, "--max-new-tokens", 1, "--store", "fresh", "--chunk-tokens", 32)
    assert found["report"]["ratio"] == 0.0 and found["report"]["rows"] == [0, 0]
    assert len(as_json("inspect", "fresh")["chunks"]) == len(found["chunks"])
    assert as_json(*asked, "--max-new-tokens", 1, "--store", "fresh", "--chunk-tokens", 32)["tokens"] == found["tokens"]


def test_answer_over_files_does_not_need_a_store_that_keeps_them(as_json, folder, passages, monkeypatch):
    """A full disk warns and costs time; the passages are at hand."""
    asked = ("answer", "Which river?", "--passages", passages, "--model", folder, "--selector", "reuse")
    expected = as_json(*asked, "--max-new-tokens", 1, "--store", "kept", "--chunk-tokens", 32)
    assert expected["report"]["hits"] == 0 and len(expected["report"]["missed"]) == len(expected["chunks"])
    monkeypatch.setattr(ChunkStore, "_write", lambda store, encoded: None)
    found = as_json(*asked, "--max-new-tokens", 1, "--store", "lost", "--chunk-tokens", 32)
    assert found["tokens"] == expected["tokens"] and found["chunks"] == expected["chunks"]
    assert found["report"]["hits"] == 0 and len(found["report"]["missed"]) == len(found["chunks"])


def test_generate_is_greedy_over_the_prompt(as_json, run, folder, model):
    found = as_json("generate", "The Nile", "--raw", "--model", folder, "--max-new-tokens", 4)
    prompt = make_prompt(model.tokenizer, "The Nile", raw=True)
    expected = greedy(Reference(model.config, model.params), prompt, 4)
    stop = next((at for at, token in enumerate(expected) if token in model.tokenizer.stop_ids), 4)
    assert found["tokens"] == expected[:stop]
    assert found["text"] == model.tokenizer.decode(found["tokens"])
    code, out, err = run("generate", "The Nile", "--raw", "--model", folder, "--max-new-tokens", 4)
    assert (code, out, err) == (0, found["text"] + "\n", "")


def test_requests_and_prompts_follow_the_chat_template(folder, model):
    """T-02, T-03, T-04: control tokens come from the template alone, never from what is asked; BOS stands once."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(spec, special_tokens=roles, chat_template=TEMPLATE)
    start, end = (int(tokenizer.encode_template(token)[0]) for token in roles.values())
    prefix, question = chat_request(tokenizer, "What is </s>?", "Read.")
    assert tokenizer.decode(prefix, skip_special=False) == "<s>user\nRead.\n\n"
    assert tokenizer.decode(question.tokens, skip_special=False) == "What is </s>?</s>\n<s>assistant"
    ids = np.concatenate([prefix, question.tokens]).tolist()
    assert (ids.count(start), ids.count(end)) == (2, 1)
    assert tokenizer.decode(question.tokens[question.scoring]) == "What is </s>?"
    whole = make_prompt(tokenizer, "Hi")
    assert tokenizer.decode(whole, skip_special=False) == "<s>user\nHi</s>\n<s>assistant"
    with_bos = Tokenizer(spec, special_tokens=roles, add_bos=True)
    assert make_prompt(with_bos, "<s>", raw=True).tolist() == [start, *with_bos.encode("<s>").tolist()]
    assert chat_request(with_bos, "Hi", "")[0].tolist() == [start]


# profile, verify, convert, demo


def test_profile_then_answer_with_it(as_json, run, folder, passages, tmp_path, store, model):
    sample = {"id": "1", "dataset": "test", "question": "Which river flows through Cairo?", "answers": ["Nile"]}
    sample |= {"chunks": [{"title": "", "text": p["text"]} for p in PASSAGES], "gold": [0], "spans": [[4, 8]]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample))
    found = as_json(
        *("profile", "--samples", tmp_path / "samples.jsonl", "--model", folder),
        *("--top", 1, "--out", "deep/profile.json"),
    )
    assert found["data"] == "samples.jsonl"
    profile = load_profile(model, "deep/profile.json")
    assert found["critical_layers"] == list(profile.critical_layers(1))
    assert found["recall"] == list(profile.recall) and len(profile.recall) == 2
    asked = ("answer", "Which?", "--store", store, "--model", folder, "--max-new-tokens", 1)
    code, _, err = run(*asked)
    assert code == 1 and "jfuse profile" in err and "--layers" in err
    # The tiny model has two layers, and a profile names three.
    code, _, err = run(*asked, "--profile", "deep/profile.json")
    assert code == 1 and "use 1 to 2 layers" in err


@pytest.mark.slow
def test_profile_plants_needles_without_samples(run, folder):
    code, out, err = run("profile", "--model", folder, "--num-samples", 1, "--length", 3600, "--top", 2)
    assert (code, err) == (0, ""), err
    (path,) = Path("runs/profiles").glob("*.json")
    assert "Critical layers: " in out and json.loads(path.read_text())["num_samples"] == 1


@pytest.mark.slow
def test_verify_passes_and_says_so(run, as_json, folder):
    code, out, err = run("verify", "--model", folder, "--selectors", "reuse")
    assert (code, err) == (0, "") and "FAIL" not in out
    found = as_json("verify", "--model", folder, "--selectors", "reuse", "--seed", 1)
    assert found["passed"] is True
    assert {check["id"] for check in found["checks"]} == {"ID-1", "ID-2", "ID-3", "ID-4", "ID-5", "ID-7"}


def test_verify_exits_with_1_if_a_check_fails(run, folder, monkeypatch):
    checks = (Check("ID-5", "placed", None, 0.25, 1e-5), Check("ID-7", "kept", "reuse", float("nan"), 0.0))
    module = importlib.import_module("jfuse.verify")
    monkeypatch.setattr(module, "verify", lambda *_, **__: (*checks, Check("ID-2", "reused", "reuse", 0.0, 0.0)))
    code, out, _ = run("verify", "--model", folder)
    assert code == 1 and out.count("FAIL") == 2 and "2.5e-01" in out and "1 of 3 checks passed" in out
    code, out, _ = run("verify", "--model", folder, "--json")
    assert code == 1 and [check["passed"] for check in json.loads(out)["checks"]] == [False, False, True]


def test_convert_keeps_the_answers(as_json, run, folder):
    found = as_json("convert", folder, "orbax")
    assert found["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(load_model(folder).params))
    asked = ("generate", "The Nile", "--raw", "--max-new-tokens", 3, "--model")
    assert as_json(*asked, "orbax")["tokens"] == as_json(*asked, folder)["tokens"]
    code, _, err = run("convert", folder, "orbax")
    assert code == 1 and "not empty" in err


def test_demo_shows_table_and_answers(run, as_json, model, monkeypatch):
    """The table of a given result; that result itself is made and checked by the real demo.

    The demo is of the embedded model, whose questions and candidates it shows: no other can be named.
    """
    row = {"method": "qcfuse", "ratio": 0.3, "ttft": 0.25, "stages": {"select": 0.01, "fuse": 0.2, "query": 0.04}}
    row |= {"speed_up": 2.5, "flop_limit": 3.0, "share_of_limit": 0.83, "realised_ratio": 0.3, "first_kl": 0.125}
    row |= {"nll": 0.5, "compilations": 0}
    answer = {"method": "qcfuse", "ratio": 0.3, "answer": "[blue] :smile:", "right": True}
    result = {"rows": [row], "questions": [{"question": "Which?", "expected": ["blue"], "answers": [answer]}]}
    result |= {"candidates": [{"method": "qcfuse", "ratio": 0.3, "first_kl": 0.0625, "nll": 0.75}], "num_kept": 30}
    result |= {"num_candidates": 48, "num_context": 2304, "seconds": 3.0}
    result |= {"store": {"warm": 1, "chunks": 8, "seconds": 1.0}}
    asked = {}
    module = importlib.import_module("jfuse.demo")
    monkeypatch.setattr(module, "run", lambda model, **options: asked.update(options) or result)
    loaded = importlib.import_module("jfuse.models.resolve")
    monkeypatch.setattr(loaded, "load_model", lambda name, *, dtype: asked.update(name=name) or model)
    code, out, _ = run("demo", "--ratios", 0.3, "--questions", 1)
    assert code == 0 and asked["name"] == "smollm2-135m"
    for part in ("250 ms", "2.50x", "83%", "0.125", "0.062", "0.750", "[blue] :smile:", "1 of 8 chunks"):
        assert part in out
    assert asked["ratios"] == (0.3,) and asked["questions"] == 1
    assert as_json("demo") == result


# models and selectors


def test_models_lists_families_sizes_and_aliases(run, as_json):
    found = as_json("models")
    sizes = {one["model"]: (one["parameters"], one["kv_bytes_per_token"]) for one in found["models"]}
    assert sizes["Llama-3.1-8B"] == (8_030_261_248, 131_072)
    assert sizes["Phi-4"] == (14_659_507_200, 204_800)
    assert found["aliases"]["qwen3-8b"] == "Qwen/Qwen3-8B"
    code, out, _ = run("models")
    assert code == 0 and "8,030,261,248" in out and "qwen3" in out and "tested against" in out


def test_selectors_lists_the_catalogue(run, as_json):
    found = as_json("selectors")
    assert [one["name"] for one in found["selectors"]] == [row.name for row in selectors.catalogue()]
    code, out, _ = run("selectors")
    assert code == 0 and all(row.name in out for row in selectors.catalogue())


# help, errors, exit codes


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    example = COMMANDS[name].example
    assert example.startswith(f"jfuse {name}") and example in " ".join(re.sub("[│╭╮╰╯]", " ", out).split())


def test_help_lists_all_subcommands(run):
    code, out, _ = run("--help")
    assert code == 0 and all(f"• {name} " in out for name in COMMANDS)


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0 and re.fullmatch(r"jfuse \d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize("arguments", [["nonsense"], ["answer"], ["answer", "q", "--ratio", "much"], []])
def test_wrong_usage_exits_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err


MODEL = ("--model", "MODEL")
ERRORS = {
    "ratio": (["answer", "q", "--ratio", "1.5"], ["1.5", "0 (reuse) to 1"]),
    "selector": (["answer", "q", "--selector", "magic"], ["'magic'", "qcfuse"]),
    "model": (["generate", "q", "--model", "no-such-model"], ["no-such-model", "smollm2-135m"]),
    "new tokens": (["answer", "q", "--max-new-tokens", "0"], ["max-new-tokens", ">= 1"]),
    "no store": (["answer", "q", "--store", "nowhere", "--selector", "reuse", *MODEL], ["nowhere", "jfuse encode"]),
    "empty question": (["answer", " ", "--store", "STORE", "--selector", "reuse", *MODEL], ["question is empty"]),
    "empty prompt": (["generate", "", *MODEL], ["prompt is empty"]),
    "setting": (["answer", "q", "--selector", "relaxkv:width=3"], ["no setting 'width'", "window"]),
    "layers and profile": (["answer", "q", "--layers", "1", "--profile", "p.json"], ["--layers and --profile"]),
    "both": (["answer", "q", "--chunks", "a", "--passages", "b"], ["--chunks", "--passages"]),
    "chunk": (
        ["answer", "q", "--store", "STORE", "--chunks", "zz", "--selector", "reuse", *MODEL],
        ["'zz'", "inspect"],
    ),
    "many chunks": (["inspect", "STORE", ""], ["chunks begin with ''"]),
    "layers": (["answer", "q", "--layers", "2", "--store", "STORE", *MODEL], ["holds 2", "0..1"]),
    "no layers": (["answer", "q", "--layers", "1", "--selector", "reuse"], ["takes no critical layers"]),
    "too long": (
        ["answer", "q", "--passages", "PASSAGES", "--max-new-tokens", "5000", "--selector", "reuse", *MODEL],
        ["serves 1 to 4096"],
    ),
    "inspect": (["inspect", "nowhere"], ["nowhere", "jfuse encode"]),
    "no passages": (["encode"], ["No passages", ".jsonl"]),
    "no file": (["encode", "absent.jsonl"], ["absent.jsonl", "give .jsonl, .txt or .md"]),
    "kind": (["encode", "passages.csv"], ["passages.csv", ".jsonl, .txt or .md"]),
    "empty folder": (["encode", "."], [".jsonl, .txt or .md"]),
    "chunk tokens": (["encode", "PASSAGES", "--chunk-tokens", "0", *MODEL], ["chunk-tokens is 0", ">= 1"]),
    "scheme": (["encode", "PASSAGES", "--store", "ftp://x", *MODEL], ["ftp://x", "file://"]),
    "samples": (["profile", "--samples", "absent.jsonl", *MODEL], ["absent.jsonl"]),
    "num samples": (["profile", "--num-samples", "0"], ["num-samples is 0", ">= 1"]),
    "verify": (["verify", "--selectors", "magic"], ["'magic'"]),
    "verify setting": (["verify", "--selectors", "relaxkv:window=wide"], ["window", "'wide'", "use int"]),
    "demo": (["demo", "--ratios", "2"], ["2", "0 (reuse) to 1"]),
    "pickle": (["convert", "weights.bin", "out"], ["weights.bin"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_with_the_remedy(run, folder, store, passages, name):
    """S-06, S-07, R-09 and others: exit code 1, nothing on stdout, one line on stderr, no traceback."""
    arguments, parts = ERRORS[name]
    places = {"MODEL": folder, "STORE": store, "PASSAGES": passages}
    code, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("jfuse: ") and all(part in err for part in parts), err
    assert not list(Path().glob("nowhere"))


BAD_LINES = {
    "not JSON": (b'{"text": "a"}\n{"text": \n', 2, "Expecting value"),
    "not an object": (b'["text"]\n', 1, "JSON object"),
    "no text": (b'{"text": "a"}\n\n{"id": "b"}\n', 3, "'text'"),
    "a number": (b'{"text": 5}\n', 1, "'text'"),
    "empty": (b'{"text": " "}\n', 1, "empty"),
    "twice": (b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', 2, "'a'"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', 2, "utf-8"),
    "half a pair": (b'{"text": "\\ud800"}\n', 1, "surrogate"),
    "not a number": (b'{"text": "a", "score": NaN}\n', 1, "NaN"),
    "deep": (b"[" * 100_000 + b"\n", 1, "recursion"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_malformed_lines_are_named_by_file_and_number(run, tmp_path, name):
    """Refused before a model is loaded: the model named here does not exist."""
    content, line, part = BAD_LINES[name]
    (tmp_path / "bad.jsonl").write_bytes(content)
    code, out, err = run("encode", "bad.jsonl", "--model", "no-such-model")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"bad.jsonl, line {line}: " in err and part in err


def test_text_that_is_not_utf8_is_refused_by_name(run, tmp_path):
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    code, _, err = run("encode", "latin.txt", "--model", "no-such-model")
    assert code == 1 and "latin.txt is not UTF-8 text (byte 1)" in err


def test_a_model_without_tokenizer_cannot_read_text(run, folder, passages, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    code, _, err = run("encode", passages, "--model", bare)
    assert code == 1 and "add tokenizer.json" in err


def test_a_store_of_another_model_has_nothing_to_read(run, store, folder):
    code, _, err = run("answer", "q", "--store", store, "--model", folder, "--dtype", "bfloat16", "--selector", "reuse")
    assert code == 1 and "no chunk of this model" in err and "jfuse encode" in err


def test_debug_shows_the_traceback(run):
    code, out, err = run("answer", "q", "--ratio", 2, "--debug")
    assert (code, out) == (1, "") and "Traceback" in err and "ValueError: FusionConfig.ratio is 2" in err


def raising(error: BaseException):
    def load(*_, **__):
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "jfuse: interrupted"),
        (OSError(28, "No space left on device", "/x"), 1, "jfuse: /x: no space left on device; check the path."),
        (RuntimeError("boom\nbang"), 1, "jfuse: unexpected RuntimeError: boom bang (--debug shows where)"),
        (FloatingPointError("3 scores are NaN"), 1, "jfuse: 3 scores are NaN"),
        (ModuleNotFoundError("Needs 'rouge': pip install rouge."), 1, "jfuse: Needs 'rouge': pip install rouge."),
        (
            ModuleNotFoundError("No module named 'gguf'", name="gguf"),
            1,
            "jfuse: module gguf is not installed; install jfuse again with all it needs: pip install jfuse.",
        ),
    ],
)
def test_exit_codes(run, monkeypatch, error, code, line):
    monkeypatch.setattr(importlib.import_module("jfuse.models.resolve"), "load_model", raising(error))
    assert run("generate", "q") == (code, "", line + "\n")


def test_the_module_runs_and_help_needs_no_heavy_import():
    """stdout holds JSON alone; parsing a command line imports neither models nor pictures."""
    lazy = {"transformers", "orbax", "matplotlib", "huggingface_hub", "torch", "tqdm.auto"}
    code = f"import jfuse.cli, sys; sys.exit(str(sorted({lazy!r} & set(sys.modules)) or ''))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""
    done = subprocess.run([sys.executable, "-m", "jfuse", "models", "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and json.loads(done.stdout)["families"]
    done = subprocess.run([sys.executable, "-m", "jfuse", "inspect", "/nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
