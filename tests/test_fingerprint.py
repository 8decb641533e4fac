"""What a fingerprint holds, and that every field of it decides (pitfall 58, need 5)."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import jfuse.fingerprint as fingerprint_module
from jfuse.fingerprint import FORMAT_VERSION, Fingerprint, canonical_json, chunk_id, differing
from jfuse.models.config import ModelConfig
from jfuse.models.rope import Rope

CONFIG = ModelConfig(
    family="llama",
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=4,
    mlp_width=32,
    vocab_size=100,
    norm_eps=1e-5,
    max_positions=256,
    rope=Rope("default", (1.0, 0.1)),
)
RULE = SimpleNamespace(name="kvzip", instruction=(5, 6, 7), num_sinks=4)

# If a change makes this address differ, every stored cache becomes unreachable: raise FORMAT_VERSION with it.
KNOWN = Fingerprint("w", "c", "r", "t", "first:1", "kvzip", (7, 8), 4, "bfloat16", "layout", 1)
KNOWN_ID = "a0eb085234c8eb8be086c8426ef977c244122f3fe5973b933e43d77654101bbb"


def model(*, dtype=np.float32, tokenizer="tokens-1", bos="none", weights="w1", **config):
    return SimpleNamespace(
        config=dataclasses.replace(CONFIG, **config),
        weights_id=weights,
        tokenizer=None if tokenizer is None else SimpleNamespace(identity=tokenizer, bos_policy=bos),
        params={"embed": {"table": np.zeros((2, 2), dtype)}},
    )


def fingerprint(rule=RULE, **changes):
    return Fingerprint.of(model(**changes), anchor_rule=rule)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("weights_id", fingerprint(weights="w2")),
        ("config", fingerprint(norm_eps=1e-6)),
        ("config", fingerprint(qk_norm=True)),
        ("rope", fingerprint(rope=Rope("llama3", (1.0, 0.05)))),
        ("rope", fingerprint(rope=Rope("default", (1.0, 0.1), attention_factor=1.2))),
        ("tokenizer", fingerprint(tokenizer="tokens-2")),
        ("bos_policy", fingerprint(bos="bos dropped")),
        ("anchor_rule", fingerprint(SimpleNamespace(name="sink", instruction=(5, 6, 7), num_sinks=4))),
        ("anchor_instruction", fingerprint(SimpleNamespace(name="kvzip", instruction=(5, 6), num_sinks=4))),
        ("anchor_sinks", fingerprint(SimpleNamespace(name="kvzip", instruction=(5, 6, 7), num_sinks=0))),
        ("kv_dtype", fingerprint(dtype=np.float16)),
        ("kv_layout", dataclasses.replace(fingerprint(), kv_layout="rotated keys")),
        ("format_version", dataclasses.replace(fingerprint(), format_version=FORMAT_VERSION + 1)),
    ],
)
def test_every_field_changes_the_address_and_is_named(field, changed):
    """Pitfall 58, C-01, C-02: one flipped field means another address, and the difference names that field alone."""
    assert differing(fingerprint(), changed) == (field,)
    assert changed.digest != fingerprint().digest
    assert chunk_id(changed, [1, 2]) != chunk_id(fingerprint(), [1, 2])


def test_equal_models_have_equal_fingerprints():
    assert fingerprint() == fingerprint()
    assert differing(fingerprint(), fingerprint()) == ()
    assert fingerprint(norm_eps=np.float64(1e-5)) == fingerprint()


def test_tokens_decide_the_address_and_their_container_does_not():
    base = fingerprint()
    ids = {chunk_id(base, tokens) for tokens in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int64))}
    assert ids == {chunk_id(base, np.array([1, 2, 3], ">i4"))}
    assert len({chunk_id(base, tokens) for tokens in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0])}) == 4


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1.5], [-1], [2**31], ["a"], None])
def test_bad_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens"):
        chunk_id(fingerprint(), tokens)


def test_model_digest_ignores_what_is_not_the_model():
    """A profile may serve the same model in another dtype, with another anchor rule or tokenizer object."""
    base = fingerprint().model_digest
    same = (fingerprint(dtype=np.float16), fingerprint(None), fingerprint(tokenizer=None))
    other = (fingerprint(weights="w2"), fingerprint(norm_eps=1e-6), fingerprint(rope=Rope("linear", (0.5, 0.05))))
    assert {one.model_digest for one in same} == {base}
    assert base not in {one.model_digest for one in other}


def test_a_profile_of_another_model_is_refused_and_both_are_named():
    """S-10."""
    mine, theirs = fingerprint(), fingerprint(weights="w2")
    mine.require_model(mine.model_digest)
    with pytest.raises(ValueError, match="critical-layer profile") as error:
        mine.require_model(theirs.model_digest)
    assert mine.model_digest in str(error.value) and theirs.model_digest in str(error.value)


def test_a_model_without_identity_is_refused():
    """Need 5: an empty weights_id would make all models one."""
    with pytest.raises(ValueError, match="weights_id is empty"):
        fingerprint(weights="")


def test_json_round_trip_is_strict():
    base = fingerprint()
    assert Fingerprint.from_json(base.to_json()) == base
    fields = json.loads(base.to_json())
    for bad in ({**fields, "extra": 1}, {**fields, "weights_id": 3}, {**fields, "format_version": True}, [], "x"):
        with pytest.raises(ValueError, match="not a fingerprint"):
            Fingerprint.from_json(json.dumps(bad))
    with pytest.raises(ValueError, match="anchor_instruction"):
        Fingerprint.from_json(json.dumps({**fields, "anchor_instruction": ["1"]}))


def test_nothing_but_numbers_and_strings_goes_into_a_digest():
    with pytest.raises(TypeError, match="cannot hold"):
        canonical_json({"family": object()})
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint(norm_eps=float("nan"))


def test_the_address_is_the_same_in_every_process():
    """C-08: a literal from another process, and two processes with different hash seeds."""
    program = f"""
import runpy
module = runpy.run_path({fingerprint_module.__file__!r})
print(module["chunk_id"](module["Fingerprint"].from_json({KNOWN.to_json()!r}), [3, 1, 2]))
"""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.stdout.strip() == KNOWN_ID, run.stderr
    assert chunk_id(KNOWN, [3, 1, 2]) == KNOWN_ID
