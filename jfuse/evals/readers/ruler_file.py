"""Files that RULER's own scripts write (Hsieh et al., 2024): `index`, `input`, `outputs` and perhaps `answer_prefix`.

The prompt is taken apart at the words of its template, so that the context alone is cut into chunks; what is put
together again is the official prompt to the letter. Needles' values and variables are found again as answer spans.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jfuse.evals.data import Joints, Sample, Span
from jfuse.evals.rows import Row, items, read_rows, text


class _Template(NamedTuple):
    """How a task's prompt is made: what the text before the context ends with, and how the question begins."""

    task: str
    before: str
    after: str
    max_new_tokens: int
    metric: str = "match_all"
    span: str | None = None  # where an answer stands; {} is the answer


_TEMPLATES = (
    _Template(
        "niah",
        r"I will quiz you about the [a-z]+ afterwards\.\s",
        r"\sWhat (?:are all|is) the special magic",
        128,
        span=r" is: ({})\.",
    ),
    _Template(
        "vt", r"hidden in the following text\.\s+", r"\s+Question: Find all variables", 30, span=r"VAR ({})(?= = )"
    ),
    _Template("cwe", r"Memorize the ones that appear most often\.\s", r"\s+Question: What are the 10 most common", 120),
    _Template("fwe", r"the three most frequently appeared coded words\.\s", r"\s+Question: Do not provide", 50),
    _Template(
        "qa",
        r"The following are given documents\.\s+",
        r"\s+Answer the question based on the given documents\.",
        32,
        "match_part",
    ),
)


def read_ruler(path: str | Path, *, limit: int | None = None) -> list[Sample]:
    """Reads a file of RULER; what it asks is seen from the prompt.

    Raises:
        ValueError: a malformed line or an unknown prompt, with the file's name and the line's number.
    """
    path = Path(path)
    return list(itertools.islice(read_rows(path, lambda row, line: [_sample(row, line)]), limit))


def _sample(row: Row, line: int) -> Sample:
    prompt = text(row, "input")
    for template in _TEMPLATES:
        # The last of each: a worked example in front has the same words.
        if (head := _last(template.before, prompt)) and (tail := _last(template.after, prompt)):
            if head.end() < tail.start():
                break
    else:
        raise ValueError(f"field 'input' follows no template of {', '.join(t.task for t in _TEMPLATES)}.")
    context, answers = prompt[head.end() : tail.start()], tuple(items(row, "outputs", str))
    return Sample(
        id=str(row.get("index", line)),
        task=template.task,
        instruction=prompt[: head.end()],
        example="",
        chunks=(context,),
        question=prompt[tail.start() :],
        answer_prefix=text(row, "answer_prefix", ""),
        answers=answers,
        spans=tuple(_spans(context, answers, template.span)) if template.span else (),
        gold=(0,),
        scoring="any" if template.metric == "match_part" else "all",
        metric=template.metric,
        joints=Joints("", "", ""),
        max_new_tokens=template.max_new_tokens,
    )


def _last(pattern: str, prompt: str) -> re.Match[str] | None:
    return max(re.finditer(pattern, prompt), key=lambda match: match.start(), default=None)


def _spans(context: str, answers: tuple[str, ...], pattern: str) -> Iterator[Span]:
    for answer in answers:
        for match in re.finditer(pattern.format(re.escape(answer)), context):
            yield Span(0, *match.span(1))
