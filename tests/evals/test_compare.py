"""The margin-aware comparator: near-ties are ties, real differences are not."""

import numpy as np
import pytest

from jfuse.evals.compare import BANDS, compare


def logits(*steps):
    """Rows of 50 spread-out logits, of which the given entries are set."""
    base = np.linspace(-1, 1, 50)
    rows = np.stack([base.copy() for _ in steps])
    for row, entries in zip(rows, steps, strict=True):
        for token, value in entries.items():
            row[token] = value
    return rows


def test_a_flip_between_nearly_tied_tokens_is_a_tie():
    """N-02: two first tokens apart by less than rounding."""
    ours, theirs = logits({3: 5.0, 7: 4.9999}), logits({3: 4.9999, 7: 5.0})
    assert compare(ours, theirs) == ("tie", 0, pytest.approx(1e-4), pytest.approx(1e-4))
    later = compare(np.concatenate([ours, ours]), np.concatenate([ours, theirs]))
    assert later.verdict == "tie" and later.step == 1


def test_a_flip_against_a_clear_preference_is_a_difference():
    """N-02, the other side: the margin is far above what rounding moves."""
    assert compare(logits({3: 5.0, 7: 4.5}), logits({3: 4.5, 7: 5.0})).verdict == "different"
    assert compare(logits({3: 5.0, 7: 4.5}), logits({3: 4.5, 7: 5.0}), band=BANDS["bfloat16"]).verdict == "different"


def test_a_flip_is_no_tie_when_another_logit_moved_far():
    """A corrupt run is not excused by a near-tie at the top."""
    assert compare(logits({3: 5.0, 7: 4.9999, 9: 1}), logits({3: 4.9999, 7: 5.0, 9: -4})).verdict == "different"


def test_equal_choices_with_small_drift_are_the_same():
    ours, theirs = logits({3: 5.0}, {4: 5.0}), logits({3: 5.0001}, {4: 4.9999})
    result = compare(ours, theirs)
    assert result.verdict == "same" and result.step is None and result.margin == float("inf")
    assert result.drift == pytest.approx(1e-4)


def test_equal_choices_with_a_large_drift_are_different():
    """The same answer by luck is no proof."""
    assert compare(logits({3: 5.0, 9: 0}), logits({3: 5.0, 9: 3})).verdict == "different"


def test_steps_after_a_flip_do_not_count():
    """They belong to another text."""
    ours = logits({3: 5.0, 7: 4.9999}, {1: 9.0})
    theirs = logits({3: 4.9999, 7: 5.0}, {2: -9.0})
    assert compare(ours, theirs).verdict == "tie"


def test_nan_is_different():
    broken = logits({3: 5.0})
    broken[0, 20] = np.nan
    assert compare(logits({3: 5.0}), broken).verdict == "different"


def test_bad_input_is_refused():
    with pytest.raises((ValueError, TypeError)):
        compare(logits({}), logits({}, {}))
    with pytest.raises(ValueError, match="band"):
        compare(logits({}), logits({}), band=0.0)
