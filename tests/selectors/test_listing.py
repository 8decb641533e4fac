"""The catalogue: built by name, described from the code."""

import pytest

from jfuse import selectors
from jfuse.config import View
from jfuse.selectors.base import Selector
from jfuse.selectors.listing import NAMED, Row, loaded_first
from jfuse.selectors.made_once import made_once


def test_rows_describe_the_selectors_they_name():
    """Every column comes from the selector; some that are easy to check by hand."""
    rows = {row.name: row for row in selectors.catalogue()}
    assert list(rows) == list(NAMED) and all(all(row) for row in rows.values())
    assert rows["qcfuse"] == Row(
        "qcfuse",
        "anchors",
        "critical",
        "anchors down to the deepest layer, keys of the critical layers",
        "0.5",
        "floor(ratio * N), at least 1",
        "2606.05875, sections 3.2-3.4",
    )
    assert rows["prophetkv"].loaded_first == "keys and values of all layers"
    assert rows["epic"].loaded_first == rows["random"].loaded_first == "nothing"
    assert rows["cacheblend_lmcache"].loaded_first == "keys of layer 1"
    assert rows["a3"].loaded_first == "keys and values of layers 0 to 1"
    assert rows["fusionrag"].loaded_first == "keys of the last layer"
    assert rows["relaxkv"].rounding == "round half even(ratio * N), at least 1"
    assert {name for name, row in rows.items() if row.ratio == "-"} == {"reuse", "recompute_all", "epic_16"}
    assert loaded_first(View(), "none") == "nothing"


def test_names_in_reports_are_names_in_the_catalogue():
    """A report's selector name finds the selector again."""
    for name in NAMED:
        assert selectors.by_name(name, layers=(1,)).name == name


def test_left_out_methods_are_named_with_a_reason():
    """Three methods of the papers are not offered, and the catalogue says why."""
    assert set(selectors.LEFT_OUT) == {"KVShare", "KVLink", "Cache-Craft"} and all(selectors.LEFT_OUT.values())


def test_building_by_name():
    """Layers go where they are needed; settings override what a name stands for; mistakes are named."""
    assert selectors.by_name("qcfuse", layers=(3, 1)).view.layers == (3, 1)
    assert selectors.by_name("qcfuse_demo", layers=(3, 1)).view.layers == (3,)
    assert selectors.by_name("relaxkv", layers=(3,)).view.layers is None
    assert selectors.by_name("epic_16", k=4).name == "epic_4"
    assert selectors.by_name("relaxkv", window=32) is selectors.relaxkv(window=32)
    with pytest.raises(ValueError, match="no selector 'qcfus'; choose one of reuse"):
        selectors.by_name("qcfus")
    for name in ("qcfuse", "qcfuse_demo", "qcfuse_relaxkv"):
        with pytest.raises(ValueError, match="critical layers"):
            selectors.by_name(name)


def test_equal_arguments_give_one_object():
    """However they are spelled: a static argument of jit must not change by spelling."""
    assert selectors.qcfuse((1, 2)) is selectors.qcfuse(layers=(1, 2), denominator="all")
    assert selectors.relaxkv_g() is selectors.relaxkv_g(window=0)
    assert selectors.qcfuse((1, 2)) is not selectors.qcfuse((2, 1))
    made = []

    @made_once
    def build(a: tuple, b: int = 2) -> Selector:
        made.append((a, b))
        return selectors.reuse()

    build([1, 2])
    build((1, 2), b=2)
    build(b=2, a=(1, 2))
    assert made == [((1, 2), 2)] and build.__name__ == "build"
