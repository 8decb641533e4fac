"""Scorers against golden cases: every expected value is worked out by hand from the benchmarks' published rules."""

import sys
import types
from fractions import Fraction

import pytest

from jfuse.evals import scorers
from jfuse.evals.data import Sample


def sample(answers, **fields):
    defaults = {"id": "s", "task": "t", "instruction": "", "example": "", "chunks": ("c",), "question": "?"}
    return Sample(**{**defaults, "answer_prefix": "", "answers": tuple(answers), **fields})


# Pitfall 49. F1 = 2 * common / (words of prediction + words of reference), after lower-casing, without punctuation and
# articles: the count of common words and of all words stands in each line.
@pytest.mark.parametrize(
    ("prediction", "reference", "common", "total"),
    [
        ("Paris", "Paris", 1, 2),
        ("paris.", "Paris", 1, 2),
        ("The Seine", "Seine", 1, 2),  # "the" is no word
        ("A river called the Seine", "the Seine", 1, 4),  # river called seine | seine
        ("Barack Obama", "Barack Hussein Obama", 2, 5),
        ("the the the", "the", 0, 0),  # nothing is left: 0, not an error
        ("yes", "no", 0, 2),
        ("", "Paris", 0, 1),  # M-07
        ("\n\t ", "Paris", 0, 1),  # M-07
        ("New York City", "new-york city", 1, 5),  # a hyphen is dropped: newyork is one word
        ("one two two", "two two two", 2, 6),  # each word counts as often as in both
        ("It's", "its", 1, 2),
        ("U.S.A.", "USA", 1, 2),
        ("an apple a day", "apple day", 2, 4),
        ("theatre", "the atre", 0, 2),  # "the" goes only as a whole word: theatre | atre
        ("1,000", "1000", 1, 2),
        ("Paris\nBecause it is the capital", "Paris", 1, 6),  # M-01: no first-line rule here
        ("\N{LEFT DOUBLE QUOTATION MARK}Paris\N{RIGHT DOUBLE QUOTATION MARK}", "Paris", 0, 2),  # ASCII signs only go
        ("STRASSE", "stra\N{LATIN SMALL LETTER SHARP S}e", 0, 2),  # lower-cased, not case-folded
    ],
)
def test_longbench_f1(prediction, reference, common, total):
    expected = float(Fraction(2 * common, total)) if total else 0.0
    assert scorers.token_f1(prediction, reference) == pytest.approx(expected)
    assert scorers.score(sample([reference]), prediction) == pytest.approx(expected)


def test_the_best_reference_counts():
    assert scorers.score(sample(["Rome", "the city of Paris"]), "Paris") == pytest.approx(
        2 / 4
    )  # city of paris | paris


# M-01: what stands on the first line, leading breaks aside, for trec, triviaqa, samsum and lsht only.
@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("\nParis\nBecause it is", "Paris"),
        ("Paris", "Paris"),
        ("\n\n\nParis  ", "Paris  "),
        (" \nParis", " "),
        ("", ""),
    ],
)
def test_first_line(prediction, expected):
    assert scorers.first_line(prediction) == expected


@pytest.mark.parametrize(("metric", "expected"), [("f1_first_line", 1.0), ("f1", 2 / 4)])
def test_first_line_rule_is_the_metrics_own(metric, expected):
    assert scorers.score(sample(["Paris"], metric=metric), "\nParis\nBecause yes") == pytest.approx(expected)


# M-02: RULER's string match, case ignored; all tasks but QA want all references, QA wants one.
@pytest.mark.parametrize(
    ("prediction", "references", "found"),
    [
        ("1234567, 7654321.", ["1234567", "7654321"], 2),
        ("1234567 and 0000000", ["1234567", "7654321"], 1),
        ("nothing", ["1234567", "7654321"], 0),
        ("", ["1234567"], 0),  # M-07
        ("the value is ABCDE", ["abcde", "vwxyz"], 1),
        ("12345678", ["1234567"], 1),  # a part of a longer number counts: the official rule
        ("1234567", ["1234567", "1234567"], 2),  # a repeated reference counts twice
        ("new\nyork", ["new york"], 0),  # line breaks are no spaces
        ("new\tyork", ["new\nyork"], 1),  # control characters become line breaks
        ("\x00 Paris \x1f", ["paris"], 1),
    ],
)
def test_ruler_string_match(prediction, references, found):
    assert scorers.match_all(prediction, references) == pytest.approx(found / len(references))
    assert scorers.match_part(prediction, references) == float(found > 0)
    assert scorers.score(sample(references, scoring="all"), prediction) == pytest.approx(found / len(references))
    assert scorers.score(sample(references, metric="match_part"), prediction) == float(found > 0)


@pytest.mark.parametrize(("references", "error"), [("Paris", TypeError), ([], ValueError)])
def test_ruler_refuses_what_is_no_list_of_references(references, error):
    """M-02: a text is a list of letters, and would match nearly anything."""
    with pytest.raises(error, match="give"):
        scorers.match_all("P", references)


def test_clean():
    assert scorers.clean(" \x07a\x00b\r ") == "a\nb"


# LongBench retrieval and counting: share of the numbers in the prediction that are right.
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("Paragraph 12", "Paragraph 12", 1),
        ("12", "Paragraph 12", 1),
        ("Paragraph 12 or 13", "Paragraph 12", 1 / 2),
        ("Paragraph 12, Paragraph 12, Paragraph 3", "Paragraph 12", 2 / 3),
        ("Paragraph 012", "Paragraph 12", 0),  # compared as it is written
        ("the twelfth", "Paragraph 12", 0),
        ("", "Paragraph 12", 0),
        ("\u6bb5\u843d7", "\u6bb5\u843d7", 1),
        ("7 8", "\u6bb5\u843d7", 1 / 2),
    ],
)
def test_retrieval(prediction, reference, expected):
    assert scorers.score(sample([reference], metric="retrieval"), prediction) == pytest.approx(expected)


@pytest.mark.parametrize(("prediction", "expected"), [("17", 1), ("17 of 30", 1 / 2), ("1 7", 0), ("none", 0)])
def test_count(prediction, expected):
    assert scorers.score(sample(["17"], metric="count"), prediction) == pytest.approx(expected)


def test_retrieval_reference_must_name_a_paragraph():
    with pytest.raises(ValueError, match="names no paragraph"):
        scorers.retrieval("12", "twelve")


# Classification: 1/n of the n classes named; names inside the right one's name are left out.
CLASSES = ("Food", "Food product", "Animal", "City", "Country")


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("Animal", "Animal", 1),
        ("Animal\nFood", "Animal", 1),  # M-01: first line only
        ("Animal or City", "Animal", 1 / 2),
        ("Food product", "Food product", 1),  # names Food too, which is part of the right one
        ("Food product", "Food", 1 / 2),
        ("Rock", "Animal", 0),
        ("", "Animal", 0),
        ("animal", "Animal", 0),  # case counts
    ],
)
def test_classification(prediction, reference, expected):
    asked = sample([reference], metric="classification_first_line", classes=CLASSES)
    assert scorers.score(asked, prediction) == pytest.approx(expected)


def test_classification_passes_over_the_class_behind_one_left_out():
    """The official loop takes names out of the list that it walks: of two parts in a row, the second stays."""
    classes = ("New", "York", "New York")
    assert scorers.classification("New York", "New York", classes) == pytest.approx(1 / 2)


# LV-Eval: F1 of the first answer, 0 if less than 0.2 of the keywords are found; blacklisted words are never found.
@pytest.mark.parametrize(
    ("prediction", "answer", "keywords", "expected"),
    [
        ("red brick house", "red brick house", "brick house", 1),
        ("red barn", "red brick house", "brick house", 0),  # 0 of 2 keywords
        ("red brick", "red brick house", "brick house", 2 * 2 / 5),  # 1 of 2
        ("one", "one two three four five", "one two three four five", 2 / 6),  # 1 of 5 is just enough
        ("one", "one two three four five six", "one two three four five six", 0),  # 1 of 6 is not
        ("of", "king of spain", "king of spain", 0),  # "of" is blacklisted, but counts among the 3
        ("red barn", "red brick house", "", 2 * 1 / 5),  # no keywords: plain F1
        ("", "red brick house", "brick", 0),
    ],
)
def test_lveval_keyword_f1(prediction, answer, keywords, expected):
    asked = sample([answer, prediction or "x"], metric="keyword_f1", keywords=keywords)
    assert scorers.score(asked, prediction) == pytest.approx(expected)


# Rouge-L, F = 2PR/(P+R) over distinct words.
@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 1),
        ("the cat ran", "the cat sat", 2 / 3),
        ("sat cat the", "the cat sat", 1 / 3),  # order counts: a common subsequence of 1 in 3 and 3
        ("police killed the gunman", "police kill the gunman", 3 / 4),  # no stemming
        ("the gunman kill police", "police kill the gunman", 2 / 4),  # Lin (2004), section 3.1, sentence S3
        ("a b c d", "a b", 2 * 1 * (1 / 2) / (3 / 2)),
        ("", "the cat", 0),  # M-07
        ("...", "the cat", 0),
    ],
)
def test_rouge_l(prediction, reference, expected):
    pytest.importorskip("rouge")
    assert scorers.score(sample([reference], metric="rouge_l"), prediction) == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def jieba(monkeypatch):
    """A segmenter with jieba's door that cuts at bars and keeps them as words of punctuation do."""
    module = types.ModuleType("jieba")
    module.cut = lambda text, cut_all: iter(text.split("|"))
    monkeypatch.setitem(sys.modules, "jieba", module)


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "keywords", "expected"),
    [
        ("f1_zh", "北京|。", "北京", "", 1),  # full-width punctuation is no word
        ("f1_zh", "北京|大学", "北京|天津", "", 1 / 2),
        ("f1_zh", "", "北京", "", 0),
        ("f1_zh", "ABC", "abc", "", 1),
        ("keyword_f1_zh", "北京|大学", "北京|大学|在|西边", "北京|大学", 4 / 6),
        ("keyword_f1_zh", "北京", "北京|大学|在|西边", "", 0),  # its own keywords: 1 of 4 is less than 0.4
        ("keyword_f1_zh", "北京|在", "北京|大学|在|西边", "", 0),  # "在" is blacklisted: still 1 of 4
        ("keyword_f1_zh", "北京|大学", "北京|大学|在|西边", "", 4 / 6),  # 2 of 4
    ],
)
def test_chinese(jieba, metric, prediction, answer, keywords, expected):
    asked = sample([answer], metric=metric, keywords=keywords)
    assert scorers.score(asked, prediction) == pytest.approx(expected)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ModuleNotFoundError, match="pip install jieba"):
        scorers.token_f1_zh("北京", "北京")


@pytest.mark.parametrize("rule", scorers.METRICS)
def test_the_packages_of_a_rule_are_those_it_asks_for(monkeypatch, rule):
    """Both ways: what is said to be needed is needed, and nothing else is."""
    asked = set()

    def optional(name):
        asked.add(name)
        rouge = types.SimpleNamespace(get_scores=lambda *_: [{"rouge-l": {"f": 0.5}}])
        return types.SimpleNamespace(Rouge=lambda metrics: rouge, cut=lambda text, cut_all: text.split("|"))

    monkeypatch.setattr(scorers, "_optional", optional)
    scorers.score(sample(["Paragraph 1"], metric=rule, classes=("Paragraph 1",)), "Paragraph 1")
    assert asked == set(scorers.packages(rule))


def test_every_metric_name_has_a_rule():
    from typing import get_args

    from jfuse.evals.data import MetricName

    assert set(scorers.METRICS) == set(get_args(MetricName))
    with pytest.raises(ValueError, match="metric is 'bleu'; use one of f1"):
        sample(["a"], metric="bleu")
