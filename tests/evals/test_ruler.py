"""Needle tasks: what is planted, where, how much, and that it is the same everywhere."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from jfuse.evals.data import Passage
from jfuse.evals.ruler import NOISE, TASKS, needle_sample, tracking_sample, wiki_haystack

NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


def planted(sample):
    """Every needle in the chunks, as (chunk, key, value)."""
    return [(index, *match) for index, chunk in enumerate(sample.chunks) for match in NEEDLE.findall(chunk)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_what_is_asked_is_what_was_planted(task, seed):
    sample = needle_sample(task, seed, length=600, num_chunks=6)
    needles = planted(sample)
    keys, values = [key for _, key, _ in needles], [value for _, _, value in needles]
    assert len(needles) == len(set(values)) == (1 if task == "single" else 4)
    assert len(set(keys)) == {"single": 1, "mk": 4, "mq": 4, "mv": 1}[task]
    asked = re.search(r"for (.*) mentioned", sample.question)
    asked_keys = re.split(r", and |, ", asked[1])
    assert len(asked_keys) == (4 if task == "mq" else 1)
    by_key = {key: [value for _, other, value in needles if other == key] for key in asked_keys}
    assert list(sample.answers) == [value for key in asked_keys for value in by_key[key]]
    assert sample.answer_prefix == sample.question.replace("What are all the", "The").replace(
        "What is the", "The"
    ).removesuffix("?") + (" are" if len(sample.answers) > 1 else " is")
    assert (sample.task, sample.scoring, sample.reference) == (task, "all", ", ".join(sample.answers))
    assert sample.id == f"{task}-600-{seed}"


@pytest.mark.parametrize("task", TASKS)
def test_spans_are_the_values_and_nothing_else(task):
    for seed in range(10):
        sample = needle_sample(task, seed, length=600, num_chunks=6)
        found = [sample.chunks[span.chunk][span.start : span.end] for span in sample.spans]
        assert sorted(found) == sorted(sample.answers)
        assert sum(chunk.count(value) for chunk in sample.chunks for value in sample.answers) == len(sample.answers)
        assert sample.gold == tuple(sorted({span.chunk for span in sample.spans}))
        assert len(sample.gold) == len(sample.answers)  # six chunks are enough for one needle each


def test_more_needles_than_chunks_are_spread_evenly():
    sample = needle_sample("mq", 0, length=600, num_chunks=3, num_needles=8)
    counts = [sum(index == chunk for index, _, _ in planted(sample)) for chunk in range(3)]
    assert sorted(counts) == [2, 3, 3]


def test_needles_stand_at_all_depths_and_in_all_chunks():
    samples = [needle_sample("single", seed, length=400, num_chunks=4) for seed in range(80)]
    depths = [span.start / len(sample.chunks[span.chunk]) for sample in samples for span in sample.spans]
    assert min(depths) < 0.15 and max(depths) > 0.9
    assert {span.chunk for sample in samples for span in sample.spans} == {0, 1, 2, 3}


def test_chunks_are_whole_sentences_of_different_passages():
    sample = needle_sample("mk", 3, length=800, num_chunks=5)
    opening = {tuple(passage.text.split()[:5]): passage for passage in wiki_haystack()}
    starts = []
    for chunk in sample.chunks:
        paragraphs = [NEEDLE.sub("", paragraph).split() for paragraph in chunk.split("\n\n")]
        for words in filter(None, paragraphs):  # a needle before the first sentence is a paragraph of its own
            passage = opening[tuple(words[:5])]
            assert passage.text.split()[: len(words)] == words and words[-1].rstrip("\"')]")[-1] in ".!?"
            starts.append(passage.id)
    assert len(starts) == len(set(starts)) >= 5


@pytest.mark.parametrize("length", [300, 1000, 2111])
def test_length_is_kept_in_words_and_in_tokens(length):
    for seed in range(3):
        words = needle_sample("mv", seed, length=length, num_chunks=4)
        assert length - 80 < sum(len(chunk.split()) for chunk in words.chunks) <= length
        tokens = needle_sample("mv", seed, length=3 * length, num_chunks=4, encode=lambda text: text.encode()[::2])
        assert 3 * length - 400 < sum(-(-len(chunk.encode()) // 2) for chunk in tokens.chunks) <= 3 * length


def test_a_number_of_the_haystack_is_not_planted():
    """The value drawn first gives way if the haystack holds it, even inside a longer number."""

    def mill(number):
        text = f"The mill has number {number}. It stands by the river. People like it."
        return [Passage(f"p{index}", "", text) for index in range(9)]

    settings = {"task": "single", "seed": 0, "length": 50, "num_chunks": 1}
    drawn = needle_sample(**settings, haystack=mill("five")).answers[0]
    sample = needle_sample(**settings, haystack=mill(f"9{drawn}"))
    assert sample.answers[0] != drawn
    assert sample.chunks[0].count(sample.answers[0]) == 1


def test_tasks_and_seeds_differ():
    samples = [needle_sample(task, seed, length=300, num_chunks=2) for task in TASKS for seed in range(20)]
    assert len({sample.chunks for sample in samples}) == len(samples)
    assert len({sample.answers for sample in samples}) == len(samples)


DIGEST = """
import hashlib, json
from jfuse.evals.ruler import TASKS, needle_sample
samples = [needle_sample(task, seed, length=700, num_chunks=5) for task in TASKS for seed in (0, 7)]
content = [[s.id, s.chunks, s.question, s.answers, s.spans, s.gold] for s in samples]
print(hashlib.sha256(json.dumps(content).encode()).hexdigest())
"""


def test_same_in_every_process():
    """The digest stands here, so that another Python version or a change of the generator shows."""
    digests = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        process = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        digests.append(process.stdout.strip())
    samples = [needle_sample(task, seed, length=700, num_chunks=5) for task in TASKS for seed in (0, 7)]
    content = [[s.id, s.chunks, s.question, s.answers, s.spans, s.gold] for s in samples]
    here = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    assert digests == [here, here] == ["13fe338124aa385b19d99a68a77a8d56c32f0dbdd624a174339271bfe9c94270"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "qa"}, "task is 'qa'; use one of single, mk, mq, mv"),
        ({"length": 0}, "length is 0; use an integer >= 1"),
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_needles": 0}, "num_needles is 0"),
        ({"num_needles": 5000}, "keys for at most 826"),
        ({"length": 40}, "room for 10 tokens or words"),
        ({"length": 3000, "haystack": wiki_haystack()[:20]}, "too few passages"),
        ({"haystack": []}, "too few passages"),
        ({"haystack": "straw"}, "haystack is 'straw'; use essay, noise, needle, or a list"),
    ],
)
def test_what_cannot_be_made_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        needle_sample(**{"task": "mq", "seed": 0, "length": 400, "num_chunks": 4, **change})


def test_a_passage_too_long_for_a_chunk_is_passed_over():
    """A chunk goes on to the next passage when not even the first sentence of one fits beside its needles."""
    long = Passage("a", "", "word " * 300 + "end.")
    short = Passage("b", "", "A short sentence here. Another one there.")
    sample = needle_sample("single", 0, length=60, num_chunks=1, haystack=[long, short] * 3)
    assert "short sentence" in sample.chunks[0] and "word word" not in sample.chunks[0]
    with pytest.raises(ValueError, match="room for 60 tokens"):
        needle_sample("single", 0, length=60, num_chunks=1, haystack=[long] * 40)


# Other haystacks.


@pytest.mark.parametrize("task", TASKS)
def test_noise_haystack_is_noise_and_needles(task):
    sample = needle_sample(task, 1, length=900, num_chunks=3, haystack="noise")
    rest = " ".join(NEEDLE.sub("", chunk) for chunk in sample.chunks)
    sentences = {sentence.strip() for sentence in re.split(r"(?<=\.)\s+", rest) if sentence.strip()}
    assert sentences == {sentence.strip() + "." for sentence in NOISE.split(".") if sentence}
    assert sample.id == f"{task}-noise-900-1"
    assert 3 * 270 < sum(len(chunk.split()) for chunk in sample.chunks) <= 900


@pytest.mark.parametrize("task", TASKS)
def test_needle_haystack_asks_for_few_of_many(task):
    sample = needle_sample(task, 2, length=900, num_chunks=3, haystack="needle")
    needles = planted(sample)
    assert len(needles) > 50 and not re.search(r"[a-z]", NEEDLE.sub("", "".join(sample.chunks)))
    values, pairs = [value for _, _, value in needles], {(key, value) for _, key, value in needles}
    assert len(set(values)) == len(pairs) == len(needles)  # no value twice, so every answer is the only right one
    asked = re.split(r", and |, ", re.search(r"for (.*) mentioned", sample.question)[1])
    assert sorted(value for key, value in pairs if key in asked) == sorted(sample.answers)


# Variable tracking.

ASSIGNMENT = re.compile(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))\.")


def resolved(sample):
    """What every variable holds, following the assignments in reading order."""
    values = {}
    for name, source, number in ASSIGNMENT.findall("\n".join(sample.chunks)):
        values[name] = number or values[source]  # a KeyError is an assignment out of order
    return values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("haystack", ["noise", "essay"])
def test_tracking_answers_are_the_variables_that_hold_the_number(seed, haystack):
    sample = tracking_sample(seed, length=700, num_chunks=3, num_chains=2, num_hops=3, haystack=haystack)
    asked = re.search(r"assigned the value (\d{5}) in the text", sample.question)[1]
    values = resolved(sample)
    assert len(values) == 8 and len(set(values.values())) == 2
    assert [name for name, value in values.items() if value == asked] == list(sample.answers)
    assert f"4 variables are assigned the value {asked}" in sample.answer_prefix
    named = [sample.chunks[span.chunk][span.start : span.end] for span in sample.spans]
    assert named == list(sample.answers)  # spans in reading order, on the variable's own assignment
    for span in sample.spans:
        assert sample.chunks[span.chunk][span.end :].startswith(" = ")
    assert (sample.task, sample.rule) == ("vt", "match_all")
    assert sum(len(chunk.split()) for chunk in sample.chunks) <= 700


def test_tracking_has_a_worked_example_with_other_names():
    sample = tracking_sample(0, length=300, num_chunks=2)
    chain = re.findall(r"VAR ([A-Z]{3}) = ", sample.example)
    assert len(chain) == 5 and sample.example.rstrip().endswith("they are: " + ", ".join(chain))
    assert not any(answer in sample.example for answer in sample.answers)
    assert tracking_sample(0, length=300, num_chunks=2) == sample != tracking_sample(1, length=300, num_chunks=2)


@pytest.mark.parametrize("change", [{"num_hops": 0}, {"num_chains": 0}, {"length": 20}, {"num_chunks": 0}])
def test_tracking_refuses_what_cannot_be_made(change):
    with pytest.raises(ValueError, match="is 0; use an integer|room for"):
        tracking_sample(**{"seed": 0, "length": 300, "num_chunks": 2, **change})
