"""Readers of evaluation files, and answer spans as token positions."""

import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from jfuse.evals.data import Passage, Sample, Span, read_passages, read_samples, shipped
from jfuse.evals.spans import span_tokens, split_chunks

QUESTION = {
    "id": "q1",
    "dataset": "squad",
    "question": "Which river crosses Paris?",
    "answers": ["the Seine", "Seine"],
    "chunks": [
        {"title": "Rome", "text": "The Tiber crosses Rome."},
        {"title": "Paris", "text": "Here flows the Seine."},
    ],
    "gold": [1],
    "answer_start": 11,
    "answer_text": "the Seine",
    "spans": [[11, 20], [15, 20]],
}
NEEDLES = {
    "id": "n1",
    "task": "mv",
    "instruction": "Remember the numbers.",
    "example": "An example.\n\n",
    "context": "Hills. The number is 123. More hills. The number is 456.",
    "question": "Which numbers?",
    "answer_prefix": "The numbers are",
    "answers": ["123", "456"],
    "answer_spans": [[21, 24], [52, 55]],
}


def write(path, *lines):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def texts(sample):
    return [sample.chunks[span.chunk][span.start : span.end] for span in sample.spans]


def test_question_row(tmp_path):
    (sample,) = read_samples(write(tmp_path / "q.jsonl", QUESTION))
    assert sample.chunks == ("Rome\nThe Tiber crosses Rome.", "Paris\nHere flows the Seine.")
    assert texts(sample) == ["the Seine", "Seine"]
    assert (sample.task, sample.gold, sample.scoring) == ("squad", (1,), "any")
    assert sample.query == "Question: Which river crosses Paris? Answer:"
    assert sample.reference == "the Seine"


def test_a_question_may_have_the_least_fields(tmp_path):
    """A user's own file: question, answers and passages as texts."""
    row = {"question": "Which river?", "answers": ["Seine"], "chunks": ["The Tiber crosses Rome.", "Here flows it."]}
    first, second = read_samples(write(tmp_path / "mine.jsonl", row, {**row, "metric": "match_part"}))
    assert (first.id, first.task, first.rule) == ("1", "mine", "f1")
    assert (second.id, second.rule, second.chunks) == ("2", "match_part", tuple(row["chunks"]))


def test_needle_row(tmp_path):
    (sample,) = read_samples(write(tmp_path / "n.jsonl", NEEDLES))
    assert texts(sample) == ["123", "456"]
    assert sample.prefix == "An example.\n\nRemember the numbers."
    assert sample.query == "Which numbers? The numbers are"
    assert (sample.reference, sample.scoring) == ("123, 456", "all")


def test_unlabelled_question_has_no_spans(tmp_path):
    row = {name: QUESTION[name] for name in ("id", "dataset", "question", "answers", "chunks")}
    (sample,) = read_samples(write(tmp_path / "q.jsonl", {**row, "gold": None}))
    assert sample.spans == () and sample.gold == ()
    assert span_tokens(sample, [[(0, 4)], [(0, 5)]]).tolist() == []


def test_lines_end_at_line_feeds_only_and_blank_lines_are_skipped(tmp_path):
    row = {"id": "a", "text": "One\u2028line\u0085still."}
    raw = json.dumps(row, ensure_ascii=False).encode()
    path = write(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + raw, b"", {"text": "Two."})
    assert read_passages(path) == [Passage("a", "", "One\u2028line\u0085still."), Passage("3", "", "Two.")]


def test_limit_reads_no_further(tmp_path):
    path = write(tmp_path / "q.jsonl", QUESTION, b"{broken")
    assert len(read_samples(path, limit=1)) == 1
    with pytest.raises(ValueError, match="line 2"):
        read_samples(path)


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "q2", ', "Expecting"),
        (b"\xff\xfe", "utf-8"),
        (b"[1, 2]", "a JSON object is expected, not list"),
        (b'{"id": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "recursion"),
        ({"id": "q2"}, "neither 'chunks'"),
        (without(QUESTION, "question"), "'question' is missing"),
        ({**QUESTION, "question": " "}, "'question' is empty"),
        ({**QUESTION, "question": 7}, "'question' is 7, of type int; use str"),
        ({**QUESTION, "answers": []}, "answers is empty"),
        ({**QUESTION, "answers": ["x", None]}, "'answers' holds None"),
        ({**QUESTION, "chunks": []}, "gold"),
        ({**QUESTION, "chunks": [QUESTION["chunks"][0], "text"]}, "'chunks' holds 'text'"),
        ({**QUESTION, "chunks": ["text", 7]}, "'chunks' holds 7"),
        ({**QUESTION, "metric": "bleu"}, "metric is 'bleu'; use one of f1"),
        ({**QUESTION, "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({**QUESTION, "chunks": [{"title": "T", "text": ""}, QUESTION["chunks"][1]]}, "'text' is empty"),
        ({**QUESTION, "gold": [2]}, "'gold' is \\[2\\]; use chunk indices from 0 to 1"),
        ({**QUESTION, "gold": None}, "does not name the chunk"),
        ({**QUESTION, "spans": [[11, 99]]}, "span \\[11, 99\\) is not inside"),
        ({**QUESTION, "spans": [[20, 11]]}, "span \\[20, 11\\) is not inside"),
        ({**QUESTION, "spans": [[1, True]]}, "use pairs"),
        ({**QUESTION, "answer_start": 12}, "does not stand at character 12"),
        ({**QUESTION, "id": "first"}, "already that of line 1"),
        (json.dumps({**QUESTION, "question": "\ud800"}).encode(), "surrogate"),
        ({**NEEDLES, "answer_spans": [[21, 124]]}, "not inside its chunk"),
    ],
    ids=lambda value: None if isinstance(value, str) else "row",
)
def test_malformed_line_is_refused_by_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", {**QUESTION, "id": "first"}, line)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(path))}, line 2: .*{message}"):
        read_samples(path)


def test_passages_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="line 1: field 'text' is missing"):
        read_passages(write(tmp_path / "p.jsonl", {"id": "a"}))
    with pytest.raises(ValueError, match="line 1: field 'text' is empty"):
        read_passages(write(tmp_path / "p.jsonl", {"id": "a", "text": "\n"}))


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": ()},
        {"chunks": ("", "b")},
        {"answers": ()},
        {"question": ""},
        {"gold": (2,)},
        {"gold": (-1,)},
        {"spans": (Span(0, 0, 99),)},
        {"spans": (Span(0, 2, 2),)},
    ],
)
def test_sample_refuses_what_cannot_be_asked(change):
    fields = {"id": "s", "task": "t", "instruction": "", "example": "", "chunks": ("one", "two"), "question": "?"}
    with pytest.raises(ValueError):
        Sample(**{**fields, "answer_prefix": "", "answers": ("a",), **change})


# Span to token positions: methods of recall (pitfall 47).


def spanned(chunks, spans):
    return Sample("s", "t", "Prefix.", "", tuple(chunks), "?", "", ("a",), tuple(Span(*span) for span in spans))


def test_span_tokens_takes_tokens_cut_by_an_edge_and_counts_none_twice():
    # characters:            0123456789      tokens: 0-3, 3-6, 6-9, 9-10
    sample = spanned(["abcdefghij"] * 2, [(1, 4, 7), (1, 5, 6), (0, 9, 10)])
    offsets = [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert span_tokens(sample, [offsets, offsets]).tolist() == [3, 5, 6]


def test_span_tokens_leaves_out_neighbours_that_only_touch_and_tokens_without_characters():
    sample = spanned(["abcdefghij"], [(0, 3, 6)])
    assert span_tokens(sample, [[(0, 0), (0, 3), (3, 6), (6, 9), (4, 4)]]).tolist() == [2]


def test_span_tokens_takes_every_byte_token_of_a_character():
    sample = spanned(["a\N{SNOWMAN}b"], [(0, 1, 2)])
    assert span_tokens(sample, [[(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]]).tolist() == [1, 2, 3]


def test_span_tokens_wants_offsets_of_every_chunk():
    with pytest.raises(ValueError, match="given for 1 chunks, but s has 2"):
        span_tokens(spanned(["ab", "cd"], []), [[(0, 2)]])


@pytest.fixture(scope="module")
def byte_bpe():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    corpus = [passage.text for passage in read_passages(shipped("wiki.jsonl"), limit=50)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def test_span_tokens_equals_a_scan_over_characters(byte_bpe):
    """The tokens found are those of which some character lies in some span, character by character."""
    for sample in read_samples(shipped("squad.jsonl"), limit=20):
        encodings = [byte_bpe.encode(chunk) for chunk in sample.chunks]
        labelled = {(span.chunk, at) for span in sample.spans for at in range(span.start, span.end)}
        expected, position = [], 0
        for index, encoding in enumerate(encodings):
            for start, end in encoding.offsets:
                if any((index, at) in labelled for at in range(start, end)):
                    expected.append(position)
                position += 1
        found = span_tokens(sample, [encoding.offsets for encoding in encodings])
        np.testing.assert_array_equal(found, expected)
        assert len(found) > 0


# Smaller chunks.


def test_split_chunks_keeps_every_labelled_character():
    sample = spanned(["abcdefghij", "klmno"], [(0, 2, 7), (1, 0, 2)])
    split = split_chunks(sample, lambda text: [text[i : i + 4] for i in range(0, len(text), 4)])
    assert split.chunks == ("abcd", "efgh", "ij", "klmn", "o")
    assert split.spans == (Span(0, 2, 4), Span(1, 0, 3), Span(3, 0, 2))
    assert split.gold == (0, 1, 3)
    assert "".join(texts(split)) == "".join(texts(sample))


def test_split_chunks_refuses_a_cut_that_changes_the_text():
    with pytest.raises(ValueError, match="do not join"):
        split_chunks(spanned(["a b"], []), str.split)


# What comes with jfuse.


def test_shipped_questions_are_labelled():
    squad, hotpot = read_samples(shipped("squad.jsonl")), read_samples(shipped("hotpotqa.jsonl"))
    assert len(squad) >= 60 and len(hotpot) >= 60
    for sample in squad:
        assert sample.spans and set(texts(sample)) & set(sample.answers), sample.id
    for sample in hotpot:
        assert len(sample.gold) == 2, sample.id
    passages = read_passages(shipped("wiki.jsonl"))
    assert len(passages) >= 300 and all(passage.title for passage in passages)


def test_shipped_data_has_its_licence_beside_it():
    for name in ("LICENSE", "ATTRIBUTION.md"):
        page = shipped(name).read_text()
        assert all(file.name in page for file in shipped(name).parent.glob("*.json*"))
    with pytest.raises(FileNotFoundError, match="reinstall"):
        shipped("nothing.jsonl")
