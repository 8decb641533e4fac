"""Selectors by a text with settings: what is read is what the function would be given, and errors say what is wrong."""

import pytest

from jfuse import selectors
from jfuse.selectors.parse import needs_layers, parse_selector


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("relaxkv", selectors.relaxkv()),
        ("relaxkv:window=32", selectors.relaxkv(window=32)),
        ("relaxkv: window = 32 , scoring=question", selectors.relaxkv(window=32, scoring="question")),
        ("relaxkv:scoring='question'", selectors.relaxkv(scoring="question")),
        ("cacheblend_paper:schedule=(0.5,0.3)", selectors.cacheblend("paper", schedule=(0.5, 0.3))),
        (
            "cacheblend_paper:schedule=(0.5, 0.3),check_layer=2",
            selectors.cacheblend("paper", check_layer=2, schedule=(0.5, 0.3)),
        ),
        ("cacheblend:preset=lmcache", selectors.cacheblend("lmcache")),
        ("epic:k=None,exempt_first=False", selectors.epic(None, exempt_first=False)),
        ("epic_16:k=8", selectors.epic(8)),
        ("qcfuse:anchor_ratio=1", selectors.qcfuse((1,), anchor_ratio=1)),
        ("qcfuse:denominator=prefix+context", selectors.qcfuse((1,), denominator="prefix+context")),
    ],
)
def test_a_text_gives_what_the_call_gives(text, made):
    assert parse_selector(text, layers=(1,)) == made._replace(name=text if ":" in text else made.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qcfuze:window=1", "There is no selector 'qcfuze'"),
        ("relaxkv:width=3", "Selector 'relaxkv' has no setting 'width'; use some of window, scoring"),
        ("reuse:k=3", "Selector 'reuse' has no setting 'k'; it has none"),
        ("qcfuse:layers=(1,)", "has no setting 'layers'"),
        ("relaxkv:window=abc", "window of selector 'relaxkv' is 'abc'; use int"),
        ("relaxkv:window=True", "window of selector 'relaxkv' is True; use int"),
        ("relaxkv:window=-1", "window"),
        ("relaxkv:scoring=both", "scoring of selector 'relaxkv' is 'both'; use one of question, query"),
        ("cacheblend_paper:schedule=0.5", r"is 0.5; use tuple\[float, ...\]"),
        ("cacheblend_paper:schedule=[0.5]", r"is \[0.5\]; use tuple"),
        ("epic:k=few", r"k of selector 'epic' is 'few'; use int \| None"),
        ("relaxkv:window", "cannot be read; write selector:setting=value"),
        ("relaxkv:window=1,window=2", "names a setting twice"),
        ("relaxkv:window=1)(window=2", "cannot be read"),
        ("relaxkv:window=(1", "cannot be read"),
        ("relaxkv:**{'window': 1}", "cannot be read"),
        ("relaxkv:window=\0", "cannot be read"),
        ("relaxkv:window=print(1)", r"is 'print\(1\)'; use int"),  # read, and never run
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_selector(text, layers=(1,))


def test_who_needs_layers():
    assert needs_layers("qcfuse") and needs_layers("qcfuse_demo:tokens=query")
    assert not needs_layers("relaxkv:window=32") and not needs_layers("nobody")
    with pytest.raises(ValueError, match="'qcfuse' needs critical layers"):
        parse_selector("qcfuse:anchor_ratio=0.2")
