"""How a prediction is scored: the rules of LongBench, RULER and LV-Eval, by name.

In go a prediction, its references and, where the rule wants them, keywords or class names; out comes a score from 0 to
1. Benchmarks print the mean times 100. `VERSION` names this state of the rules and belongs in every result.

    f1, f1_first_line     LongBench: overlap of words, best reference (Bai et al., 2023, section 3)
    match_all, match_part RULER: share of the references found, or whether one is (Hsieh et al., 2024, appendix B)
    keyword_f1            LV-Eval: F1, but 0 if too few keywords are found (Yuan et al., 2024, section 3.4)
    rouge_l               longest common subsequence, by the `rouge` package that LongBench uses
"""

import importlib
import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jfuse.evals import blacklist
from jfuse.evals.data import Sample

VERSION = "1"

Scorer = Callable[[str, str], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONTROL = re.compile(r"[\x00-\x1f]")
_FULL_WIDTH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _FULL_WIDTH)


def score(sample: Sample, prediction: str) -> float:
    """The prediction's score under the sample's own rule, from 0 to 1. An empty prediction scores 0."""
    return METRICS[sample.rule](prediction, sample)


def packages(rule: str) -> tuple[str, ...]:
    """The packages beyond jfuse's own that a rule of `METRICS` needs.

    >>> packages("rouge_l_zh"), packages("f1")
    (('rouge', 'jieba'), ())
    """
    needed = {"rouge": "rouge" in rule, "jieba": "_zh" in rule}
    return tuple(name for name, is_needed in needed.items() if is_needed)


def check_packages(rule: str) -> None:
    """Refuses a rule whose package is missing, so that this is known before anything is answered.

    Raises:
        ModuleNotFoundError: names the package and how to install it.
    """
    for name in packages(rule):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(
                f"Answers are to be scored by {rule!r}, which needs the package {name!r}: pip install {name}, "
                "or ask for no answers (new_tokens 0)."
            )


# LongBench.


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles.

    >>> words("The Eiffel-Tower, in Paris!")
    ['eiffeltower', 'in', 'paris']
    """
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def first_line(prediction: str) -> str:
    """What stands before the first line break, leading ones aside.

    LongBench applies it to trec, triviaqa, samsum and lsht only: there the examples in the prompt end at line breaks,
    and models go on with examples of their own.
    """
    return prediction.lstrip("\n").split("\n")[0]


def overlap_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it occurs in both."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def token_f1(prediction: str, reference: str) -> float:
    """LongBench's F1 of `words`."""
    return overlap_f1(words(prediction), words(reference))


def token_f1_zh(prediction: str, reference: str) -> float:
    """LongBench's F1 for Chinese, whose words are found by jieba."""
    return overlap_f1(words_zh(prediction), words_zh(reference))


def words_zh(text: str) -> list[str]:
    """Words of Chinese text without punctuation and white space."""
    return [word for word in _bare_zh(_cut(text)) if word]


def numbers_right(prediction: str, wanted: str) -> float:
    """Share of the numbers in the prediction that are the wanted one, as it is written."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the numbers in the prediction that name the reference's paragraph, such as "Paragraph 7" or "段落7".

    Raises:
        ValueError: a reference that names no paragraph.
    """
    found = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if found is None:
        raise ValueError(f"The reference {reference!r:.60} names no paragraph; use 'Paragraph 7' or '段落7'.")
    return numbers_right(prediction, found[1])


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 if the reference is the only class that the prediction names, 1/n if it is one of n, else 0.

    A class whose name is part of the reference's name does not count, with the official code's own exception: after
    one was left out, the class right behind it is not looked at.
    """
    named = [name for name in classes if name in prediction]
    kept, index = list(named), 0
    while index < len(kept):
        if kept[index] in reference and kept[index] != reference:
            kept.remove(kept[index])
        index += 1
    return 1.0 / len(kept) if reference in kept else 0.0


# RULER.


def clean(prediction: str) -> str:
    """The prediction with control characters as line breaks and without white space around it."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def match_all(prediction: str, references: Iterable[str]) -> float:
    """Share of the references that occur in the prediction, whatever the case: RULER's rule for all tasks but QA."""
    found = [reference.lower() in clean(prediction).lower() for reference in _listed(references)]
    return sum(found) / len(found)


def match_part(prediction: str, references: Iterable[str]) -> float:
    """1 if a reference occurs in the prediction, whatever the case: RULER's rule for QA."""
    return float(match_all(prediction, references) > 0)


def _listed(references: Iterable[str]) -> list[str]:
    if isinstance(references, str):
        raise TypeError(f"references is the text {references!r:.60}; give a list of texts.")
    listed = list(references)
    if not listed:
        raise ValueError("references is empty; give at least one text.")
    return listed


# LV-Eval.


def keyword_f1(prediction: str, reference: str, keywords: str = "") -> float:
    """F1 of `words`, but 0 if less than 0.2 of the answer's keywords are found. Blacklisted words are never found."""
    given = words(prediction)
    if keywords and _recall(given, words(keywords), blacklist.ENGLISH) < 0.2:
        return 0.0
    return overlap_f1(given, words(reference))


def keyword_f1_zh(prediction: str, reference: str, keywords: str = "") -> float:
    """The same for Chinese, where 0.4 of the keywords are wanted; the reference is its own keywords if it has none."""
    given = words_zh(prediction)
    if _recall(given, words_zh(keywords or reference), blacklist.CHINESE) < 0.4:
        return 0.0
    return overlap_f1(given, words_zh(reference))


def _recall(prediction: Sequence[str], keywords: Sequence[str], ignored: frozenset[str]) -> float:
    common = Counter(prediction) & Counter(keywords)
    found = sum(count for word, count in common.items() if word not in ignored)
    return found / len(keywords) if keywords else 0.0


# Rouge-L.


def rouge_l(prediction: str, reference: str) -> float:
    """Rouge-L's F, as LongBench computes it: sentences end at full stops, 0 if one of the texts has no words.

    Raises:
        ModuleNotFoundError: the package `rouge` is not installed.
    """
    rouge = _optional("rouge")
    if not prediction.strip(" .") or not reference.strip(" ."):
        return 0.0
    return float(rouge.Rouge(metrics=["rouge-l"]).get_scores(prediction, reference)[0]["rouge-l"]["f"])


def rouge_l_zh(prediction: str, reference: str) -> float:
    """Rouge-L for Chinese, on jieba's words."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)))


def rouge_l_zh_keywords(prediction: str, reference: str) -> float:
    """LV-Eval's Rouge-L for Chinese: punctuation and blacklisted words are left out first."""
    texts = (_bare_zh(_cut(" ".join(_cut(text)))) for text in (prediction, reference))
    return rouge_l(*(" ".join(word for word in text if word not in blacklist.CHINESE) for text in texts))


def _cut(text: str) -> list[str]:
    return list(_optional("jieba").cut(text, cut_all=False))


def _bare_zh(cut: Iterable[str]) -> list[str]:
    return ["".join(word.lower().translate(_NO_CHINESE_PUNCTUATION).split()) for word in cut]


def _optional(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"This metric needs the package {name!r}: pip install {name}.") from error


# By name.


def _best(scorer: Scorer, *, line: bool = False) -> Callable[[str, Sample], float]:
    """The best score over the sample's answers."""

    def scored(prediction: str, sample: Sample) -> float:
        shown = first_line(prediction) if line else prediction
        return max(scorer(shown, answer) for answer in sample.answers)

    return scored


def _classified(prediction: str, sample: Sample) -> float:
    return max(classification(first_line(prediction), answer, sample.classes) for answer in sample.answers)


METRICS: dict[str, Callable[[str, Sample], float]] = {
    "f1": _best(token_f1),
    "f1_first_line": _best(token_f1, line=True),
    "f1_zh": _best(token_f1_zh),
    "match_all": lambda prediction, sample: match_all(prediction, sample.answers),
    "match_part": lambda prediction, sample: match_part(prediction, sample.answers),
    "retrieval": _best(retrieval),
    "count": _best(numbers_right),
    "classification_first_line": _classified,
    # LV-Eval looks at the first answer only.
    "f1_first_answer": lambda prediction, sample: token_f1(prediction, sample.answers[0]),
    "f1_zh_first_answer": lambda prediction, sample: token_f1_zh(prediction, sample.answers[0]),
    "keyword_f1": lambda prediction, sample: keyword_f1(prediction, sample.answers[0], sample.keywords),
    "keyword_f1_zh": lambda prediction, sample: keyword_f1_zh(prediction, sample.answers[0], sample.keywords),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _best(rouge_l, line=True),
    "rouge_l_zh": _best(rouge_l_zh),
    "rouge_l_zh_keywords": lambda prediction, sample: rouge_l_zh_keywords(prediction, sample.answers[0]),
}
