"""`verify` passes on sound models of every family and fails on each kind of broken one."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.models.rope import angles
from jfuse.models.tiny import tiny_model
from jfuse.types import PAD_POSITION, LayerKV
from jfuse.verify import IDENTITIES, Check, verify
from tests import tiny
from tests.reference import Reference

# `jfuse.fuse` and the like name the functions; these are the modules that hold them.
fusing, op, placing, serving, verifying = (
    importlib.import_module(f"jfuse.{name}")
    for name in ("fuse", "pallas.selective_attention", "stitch", "pipeline", "verify")
)
NAMES = ("qcfuse", "random", "reuse", "recompute_all")


@pytest.fixture(scope="module")
def model():
    return tiny_model(jax.random.key(5), num_layers=3, vocab_size=120)


def failed(checks) -> set[tuple[str, str | None]]:
    return {(check.id, check.selector) for check in checks if not check.passed}


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_sound_models_pass(name):
    """Need 1: one call tries every identity of a model."""
    checks = verify(tiny.build_model(name))
    assert not failed(checks)
    assert {check.id for check in checks} == set(IDENTITIES)
    assert all(np.isfinite(check.error) for check in checks)


def test_every_selector_meets_the_identities_that_concern_it(model):
    """`reuse` knows no ratio 1 and `recompute_all` no ratio 0; everything else is tried with each."""
    tried = {(check.id, check.selector) for check in verify(model)}
    expected = {(id, name) for id in ("ID-1", "ID-2", "ID-3", "ID-7") for name in NAMES}
    expected -= {("ID-1", "reuse"), ("ID-2", "recompute_all")}
    assert tried == expected | {("ID-1", None), ("ID-4", None), ("ID-5", None)}


def test_it_runs_in_float32_whatever_the_weights(model):
    """N-01: bfloat16 weights are cast, so float noise stays below the tolerances."""
    narrow = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params))
    assert not failed(verify(narrow, selectors=[selectors.recompute_all()]))
    assert narrow.dtype == jnp.bfloat16


def test_chosen_selectors_and_seeds(model):
    relaxed = [selectors.by_name(name, layers=(1,)) for name in ("relaxkv", "cacheblend", "qcfuse_layerwise")]
    checks = verify(model, selectors=relaxed, seed=3)
    assert not failed(checks)
    assert {check.selector for check in checks} - {None} == {selector.name for selector in relaxed}


def test_chunks_placed_one_position_late(model, monkeypatch):
    """A wrong re-placement shows at layer 0 and in the single chunk; recomputing everything hides it."""
    monkeypatch.setattr(placing, "_angles", lambda rope, positions: angles(rope, positions + 1))
    found = failed(verify(model))
    assert {("ID-5", None), ("ID-3", "reuse"), ("ID-3", "qcfuse"), ("ID-4", None)} <= found
    assert ("ID-1", "recompute_all") not in found


@pytest.fixture
def nothing_compiled():
    """What is compiled while a function is replaced must not outlive the test."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_keys_rotated_the_other_way_by_fusion(model, monkeypatch, nothing_compiled):
    """The keys and queries of recomputed rows turn backwards: whatever was recomputed is wrong."""
    rotate = fusing.rotate
    monkeypatch.setattr(fusing, "rotate", lambda x, cos, sin: rotate(x, cos, -sin))
    found = failed(verify(model))
    assert {("ID-1", "recompute_all"), ("ID-1", "qcfuse"), ("ID-4", None)} <= found
    assert ("ID-2", "reuse") not in found and ("ID-5", None) not in found


@pytest.mark.slow
def test_an_attention_that_is_wrong_everywhere(monkeypatch):
    """Prefill, fusion and query agree with each other, yet not with whole score matrices."""
    fresh = tiny_model(jax.random.key(5), num_layers=3, vocab_size=112)
    blocked = op._blocked

    def forgets_the_first_key(q, k, v, row_positions, key_positions, visible, window):
        late = jnp.where(key_positions == 0, PAD_POSITION, key_positions)
        return blocked(q, k, v, row_positions, late, visible, window)

    monkeypatch.setattr(op, "_blocked", forgets_the_first_key)
    checks = verify(fresh, selectors=[selectors.recompute_all()])
    assert ("ID-1", None) in failed(checks)


def test_a_fusion_that_touches_an_unselected_row(model, monkeypatch):
    """One stray write at ratio 0.3 fails ID-7, and at ratio 0 ID-2; at ratio 1 there is no stray row left."""
    fuse_layers = serving.fuse_layers

    def stray(model, context, selection, work, begun, **options):
        rows = np.flatnonzero(~np.asarray(selection.recompute[0]) & (np.asarray(context.segments) >= 0))[:1]
        for kv in fuse_layers(model, context, selection, work, begun, **options):
            yield LayerKV(kv.k.at[rows].add(1e-7), kv.v)

    monkeypatch.setattr(serving, "fuse_layers", stray)
    found = failed(verify(model))
    assert {("ID-7", name) for name in NAMES[:3]} | {("ID-2", name) for name in NAMES[:3]} <= found
    assert not any(id in ("ID-1", "ID-4", "ID-5") for id, _ in found)


def test_a_fusion_that_does_nothing(model, monkeypatch):
    monkeypatch.setattr(serving, "fuse_layers", lambda model, context, *_, **__: iter(context.kv))
    monkeypatch.setattr(verifying, "fuse", lambda model, context, *_, **__: context)
    found = failed(verify(model))
    assert {("ID-1", "qcfuse"), ("ID-1", "random"), ("ID-1", "recompute_all"), ("ID-4", None)} <= found


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_fail_and_do_not_raise(model, value):
    """Scores that are not finite stop a selection; here they are a failed check like any other."""
    params = dict(model.params) | {"final_norm": {"scale": model.params["final_norm"]["scale"].at[0].set(value)}}
    blocks = dict(params["blocks"]) | {"o": {"kernel": params["blocks"]["o"]["kernel"].at[0, 0, 0].set(value)}}
    checks = verify(dataclasses.replace(model, params=params | {"blocks": blocks}))
    assert {("ID-1", None), ("ID-1", "qcfuse"), ("ID-3", "reuse")} <= failed(checks)
    json.dumps([check.as_dict() for check in checks], allow_nan=False)


def test_the_yardstick_equals_the_reference(model):
    """The dense pass that full prefill is held against, itself held against float64 NumPy."""
    tokens = np.random.default_rng(0).integers(0, 120, 40).astype(np.int32)
    kv, logits = verifying.dense_prefill(model, tokens)
    expected = Reference(model.config, model.params).run(tokens)
    for l, layer in enumerate(kv):
        np.testing.assert_allclose(layer.k, expected.k[l], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(layer.v, expected.v[l], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits, expected.logits[-1], rtol=1e-4, atol=1e-4)


def test_a_full_prefill_that_is_wrong_everywhere(model, monkeypatch):
    """Every way to the cache agrees with every other, yet not with whole score matrices."""
    dense = verifying.dense_prefill
    monkeypatch.setattr(verifying, "dense_prefill", lambda model, tokens: dense(model, np.roll(tokens, 1)))
    assert failed(verify(model, selectors=[])) == {("ID-1", None)}


def test_models_with_few_positions(model):
    """The request shrinks with the model; one that cannot hold any is refused with both numbers."""
    for positions in (100, 160, 294, 8192):
        lengths = verifying.request_lengths(positions)
        assert min(lengths) >= 1 and sum(lengths) <= min(positions - 64, 230)
    small = dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=40))
    with pytest.raises(ValueError, match="serves 1 to 40"):
        verify(small)


def test_a_check_passes_up_to_its_tolerance():
    assert Check("ID-1", "", None, 1e-5, 1e-5).passed
    assert not Check("ID-1", "", None, 1.1e-5, 1e-5).passed
    assert not Check("ID-1", "", None, float("nan"), 1e-5).passed
    assert Check("ID-1", "", None, float("nan"), 1e-5).as_dict()["error"] is None
