"""Readers of benchmark files: official prompts, located answers, errors by line; nothing opens a network (M-05)."""

import gzip
import json
import re
import socket

import pytest

from jfuse.evals.prompts import make_prompt
from jfuse.evals.readers import FORMATS, format_of, read_file
from jfuse.evals.readers.longbench import benchmark_tasks, read_longbench
from jfuse.evals.readers.ruler_file import read_ruler
from jfuse.evals.scorers import score
from jfuse.evals.settings import Task
from jfuse.evals.shorten import cut_middle
from jfuse.evals.tasks import GENERATED, SHIPPED, even_pieces, in_chunks, make_sample, read_task
from jfuse.evals.workload import EXAMPLE, draw
from tests.evals.small import bytes_tokenizer


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a reader opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)


def lines(path, *rows):
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def document(path, value):
    path.write_text(json.dumps(value))
    return path


def quoted(sample):
    return [sample.chunks[span.chunk][span.start : span.end] for span in sample.spans]


# LongBench.

MUSIQUE = {
    "input": "Who is it?",
    "context": "Passage 1:\nOne.\n\nPassage 2:\nTwo.",
    "answers": ["A", "B"],
    "dataset": "musique",
    "language": "en",
    "all_classes": None,
    "_id": "m1",
}


def test_longbench_prompt_is_the_official_one_to_the_letter(tmp_path):
    """M-03: real line breaks, and nothing but the template, the context and the question."""
    (sample,) = read_longbench(lines(tmp_path / "musique.jsonl", MUSIQUE))
    told = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
    assert sample.text == (
        f"{told}\n\nThe following are given passages.\nPassage 1:\nOne.\n\nPassage 2:\nTwo.\n\n{told}\n\n"
        "Question: Who is it?\nAnswer:"
    )
    assert (sample.id, sample.task, sample.rule, sample.max_new_tokens) == ("m1", "musique", "f1", 32)
    prompt = make_prompt(sample, bytes_tokenizer())
    tokens = [*prompt.prefix, *(t for chunk in prompt.chunks for t in chunk), *prompt.question.tokens]
    assert bytes_tokenizer().decode(tokens) == sample.text
    assert bytes_tokenizer().decode(prompt.question.tokens[prompt.question.scoring]) == "Who is it?"


@pytest.mark.parametrize("name", sorted(benchmark_tasks()))
def test_every_benchmark_task_fills_its_template(tmp_path, name):
    task = benchmark_tasks()[name]
    asked = "" if name == "passage_count" else "QQQ"
    row = {**MUSIQUE, "dataset": name, "input": asked, "context": "CCC", "answers": ["Paragraph 1"]}
    (sample,) = read_longbench(lines(tmp_path / f"{name}.jsonl", row))
    assert sample.text == task["prompt"].format(context="CCC", input=asked)
    assert sample.chunks == ("CCC",) and sample.max_new_tokens == task["max_new_tokens"]
    first_line = name in ("trec", "triviaqa", "samsum", "lsht")
    assert sample.rule.endswith("first_line") == first_line  # M-01: these four and no others


def test_lveval_file_with_its_length_in_the_name(tmp_path):
    row = {**MUSIQUE, "dataset": "hotpotwikiqa_mixup_16k", "answer_keywords": "Ann Lee", "answers": ["Ann B. Lee"]}
    (sample,) = read_longbench(lines(tmp_path / "hotpotwikiqa_mixup_16k.jsonl", row))
    assert (sample.task, sample.rule, sample.keywords) == ("hotpotwikiqa_mixup", "keyword_f1", "Ann Lee")
    assert score(sample, "Ann Lee") == pytest.approx(4 / 5)  # ann lee | ann b lee
    assert score(sample, "b") == 0


def test_classes_come_along(tmp_path):
    row = {**MUSIQUE, "dataset": "trec", "answers": ["Food"], "all_classes": ["Food", "City"]}
    (sample,) = read_longbench(lines(tmp_path / "trec.jsonl", row))
    assert score(sample, "Food or City\nFood") == 0.5


# RULER.

NIAH = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\nHills. One of the special magic numbers for a-b is: 1234567. More hills.\nWhat are all "
    "the special magic numbers for a-b mentioned in the provided text?"
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\nVAR AAA = 1\nQuestion: "
    "Find all variables that are assigned the value 1 in the text above. Answer: AAA\n\nMemorize and track the "
    "chain(s) of variable assignment hidden in the following text.\n\nGrass. VAR BBBBB = 12345\nSky.\n"
    "VAR CCCCC = VAR BBBBB\nQuestion: Find all variables that are assigned the value 12345 in the text above."
)
RULER_QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\nDocument 1:\nParis.\n\nDocument 2:\nRome.\n\nAnswer the question based on "
    "the given documents. Only give me the answer and do not output any other words.\n\nQuestion: Where?"
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n1. a 2. b\nQuestion: What are the 10 most common words in the above list?"
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. ab .... cd\nQuestion: Do not provide any explanation. What are they?"
)


@pytest.mark.parametrize(
    ("task", "prompt", "outputs", "context", "spans", "metric", "tokens"),
    [
        ("niah", NIAH, ["1234567"], "Hills. One", ["1234567"], "match_all", 128),
        ("vt", VT, ["BBBBB", "CCCCC"], "Grass. VAR BBBBB", ["BBBBB", "CCCCC"], "match_all", 30),
        ("qa", RULER_QA, ["Paris", "paris"], "Document 1:", [], "match_part", 32),
        ("cwe", CWE, ["a"], "1. a 2. b", [], "match_all", 120),
        ("fwe", FWE, ["ab"], "ab .... cd", [], "match_all", 50),
    ],
)
def test_ruler_prompt_is_taken_apart_and_joins_again(tmp_path, task, prompt, outputs, context, spans, metric, tokens):
    """M-02: QA wants one of its references, all else every one; M-03: the prompt stays what it was."""
    row = {"index": 7, "input": prompt, "outputs": outputs, "length": 99, "answer_prefix": " The answer is"}
    (sample,) = read_ruler(lines(tmp_path / "validation.jsonl", row))
    assert sample.text == prompt + " The answer is"
    assert (sample.id, sample.task, sample.rule, sample.max_new_tokens) == ("7", task, metric, tokens)
    assert sample.chunks[0].startswith(context) and "Question" not in sample.chunks[0]
    assert quoted(sample) == spans


def test_worked_example_of_variable_tracking_is_no_context(tmp_path):
    (sample,) = read_ruler(lines(tmp_path / "vt.jsonl", {"input": VT, "outputs": ["BBBBB"]}))
    assert "AAA" in sample.instruction and "AAA" not in sample.chunks[0]


# Located answers.


def squad_article(title, *paragraphs):
    return {"title": title, "paragraphs": list(paragraphs)}


def paragraph(context, *asked):
    qas = [
        {"id": id, "question": "Who?", "answers": [{"text": a, "answer_start": context.index(a)} for a in answers]}
        for id, answers in asked
    ]
    return {"context": context, "qas": qas}


FILLER = [squad_article(f"F_{i}", paragraph(f"Filler number {i} says nothing.")) for i in range(8)]


def test_squad_file(tmp_path):
    article = squad_article(
        "My_Title",
        paragraph("In 1905 Ann Lee left.", ("q1", ["Ann Lee", "Ann"]), ("q2", [])),  # q2 has no answer: left out
        paragraph("Of the same article.", ("q3", ["same"])),
    )
    samples = read_file(document(tmp_path / "dev.json", {"version": "v2.0", "data": [article, *FILLER]}))
    assert [sample.id for sample in samples] == ["q1", "q3"]
    first = samples[0]
    assert quoted(first) == ["Ann Lee", "Ann"] and first.answers == ("Ann Lee", "Ann") and first.rule == "f1"
    assert len(first.chunks) == 8 and first.chunks[first.gold[0]] == "My Title\nIn 1905 Ann Lee left."
    others = [chunk for index, chunk in enumerate(first.chunks) if index != first.gold[0]]
    assert len(set(others)) == 7 and all(chunk.split("\n")[1].startswith("Filler") for chunk in others)
    assert read_file(tmp_path / "dev.json") == samples
    assert len({sample.gold for sample in samples} | {(i,) for i in range(8)}) == 8


def test_no_other_passage_holds_an_answer(tmp_path):
    asked = squad_article("A", paragraph("It was Filler.", ("q", ["Filler"])))
    with pytest.raises(ValueError, match="q has 0 other passages without an answer, and num_chunks is 8"):
        read_file(document(tmp_path / "dev.json", {"data": [asked, *FILLER]}))


def test_squad_answer_that_does_not_stand_where_it_says(tmp_path):
    wrong = paragraph("In 1905 Ann Lee left.", ("q1", ["Ann Lee"]))
    wrong["qas"][0]["answers"][0]["answer_start"] = 3
    path = document(tmp_path / "dev.json", {"data": [squad_article("T", wrong)]})
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: question q1: 'Ann Lee' does not stand at"):
        read_file(path)


def test_newsqa_file(tmp_path):
    """Spans take white space along, which is no part of the answer; questions without an answer are left out."""
    text = "CNN -- Five men left on Monday.\n\n\n\nThe end."
    span = {"s": text.index("Five"), "e": text.index("left")}
    questions = [{"q": "Who left?", "consensus": span}, {"q": "Why?", "consensus": {"noAnswer": True}}]
    stories = [{"storyId": "./cnn/stories/abc.story", "text": text, "questions": questions}]
    stories += [{"storyId": f"f{i}", "text": f"Filler {i}.", "questions": []} for i in range(9)]
    samples = read_file(document(tmp_path / "news.json", {"data": stories}))
    assert samples[0].id == "abc.story-0" and quoted(samples[0]) == ["Five men"]


def test_natural_questions_file(tmp_path):
    words = "<Table> Page <P> The river Seine <b> flows </b> here . </P> other".split(" ")
    annotation = {
        "long_answer": {"start_token": 2, "end_token": 11},
        "short_answers": [{"start_token": 4, "end_token": 6}, {"start_token": 7, "end_token": 8}],
    }
    row = {
        "example_id": 55,
        "document_text": " ".join(words),
        "question_text": "what flows",
        "annotations": [annotation],
    }
    fillers = []
    for i in range(8):
        short = [{"start_token": 0, "end_token": 1}]
        note = {"long_answer": {"start_token": 0, "end_token": 2}, "short_answers": short}
        fillers.append({"example_id": i, "document_text": f"x{i} filler", "question_text": "?", "annotations": [note]})
    none = {
        "example_id": 99,
        "document_text": "a",
        "question_text": "?",
        "annotations": [{**annotation, "short_answers": []}],
    }
    samples = read_file(lines(tmp_path / "nq.jsonl.gz", row, none, *fillers), limit=1)
    assert [sample.id for sample in samples] == ["55"]
    assert quoted(samples[0]) == ["river Seine", "flows"]
    assert samples[0].chunks[samples[0].gold[0]] == "The river Seine flows here ."


def test_mrqa_file(tmp_path):
    """Its spans name the last character, not the one behind it."""
    rows = [{"header": {"dataset": "NewsQA"}}]
    for i in range(9):
        context = f"Passage {i} is about town{i}."
        start = context.index("town")
        answer = {"text": f"town{i}", "char_spans": [[start, start + 4]]}
        qas = [{"qid": f"q{i}", "question": "Which?", "answers": [f"town{i}"], "detected_answers": [answer]}]
        rows.append({"context": context, "qas": qas})
    samples = read_file(lines(tmp_path / "mrqa.jsonl.gz", *rows))
    assert [quoted(sample) for sample in samples] == [[f"town{i}"] for i in range(9)]


# Retrieved passages.


@pytest.mark.parametrize("name", ["musique_s.json", "nq-open.jsonl"])
def test_cacheblend_records(tmp_path, name):
    record = {
        "question": "Who?",
        "answers": ["Ann"],
        "ctxs": [{"title": "T", "text": "One.", "score": 1}, {"title": "", "text": "Ann.", "isgold": True}],
    }
    path = tmp_path / name
    document(path, [record]) if path.suffix == ".json" else lines(path, record)
    (sample,) = read_file(path)
    assert sample.chunks == ("T\nOne.", "Ann.") and sample.gold == (1,)
    assert (sample.id, sample.task) == ("1", name.split(".")[0])


# Formats and errors.


def test_formats_are_told_from_the_first_row(tmp_path):
    rows = {
        "longbench": MUSIQUE,
        "lveval": {**MUSIQUE, "answer_keywords": "x"},
        "ruler": {"input": NIAH, "outputs": ["1"]},
        "retrieved": {"question": "?", "answers": [], "ctxs": []},
        "nq": {"document_text": "", "annotations": []},
        "mrqa": {"header": {}},
        "jfuse": {"question": "?", "answers": [], "chunks": []},
    }
    for name, row in rows.items():
        assert format_of(lines(tmp_path / f"{name}.jsonl", row)) == name
    assert format_of(document(tmp_path / "a.json", {"data": [{"paragraphs": []}]})) == "squad"
    assert format_of(document(tmp_path / "b.json", {"data": [{"questions": []}]})) == "newsqa"
    assert {*rows, "squad", "newsqa"} == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", {"text": "x"}, "no known format: its first object has the fields text"),
        (
            "a.jsonl",
            {"question": "?", "answer": "x"},
            "question, answer\\. .* question, answers .*; the others are l",
        ),
        ("a.jsonl", ["x"], "its first object has no fields, but 'x'"),
        ("a.jsonl", None, "holds no row"),
        ("a.json", [], "holds no row"),
        ("a.parquet", {}, "is a Parquet file"),
        ("a.json", {"data": []}, "no known format"),
        ("a.json", [{"x": 1}], "no known format"),
    ],
)
def test_unknown_formats_are_refused(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=f"{re.escape(name)} .*{message}"):
        read_file(document(tmp_path / name, content))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**MUSIQUE, "_id": "m2", "dataset": "lcc"}, "dataset is 'lcc', which is not read \\(code"),
        ({**MUSIQUE, "_id": "m2", "dataset": "x"}, "dataset is 'x', which is not read; use narrativeqa"),
        ({**MUSIQUE, "_id": "m2", "answers": "A"}, "'answers' is 'A', of type str; use list"),
        ({**MUSIQUE, "_id": "m2", "context": 3}, "'context' is 3"),
        (MUSIQUE, "id 'm1' is already that of line 1"),
    ],
)
def test_errors_name_file_and_line(tmp_path, row, message):
    path = lines(tmp_path / "musique.jsonl", MUSIQUE, row)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, line 2: .*{message}"):
        read_file(path)


def test_questions_of_one_id_are_refused_in_documents_too(tmp_path):
    """Their rows could not be told apart."""
    record = {"id": "a", "question": "Who?", "answers": ["Ann"], "ctxs": [{"title": "", "text": "Ann did."}]}
    path = document(tmp_path / "records.json", [record, record])
    with pytest.raises(ValueError, match=r"records.json, question 2: id 'a' is there already"):
        read_file(path)


def test_a_prompt_without_template_is_refused(tmp_path):
    path = lines(tmp_path / "r.jsonl", {"input": "Hello", "outputs": ["x"]})
    with pytest.raises(ValueError, match="line 1: field 'input' follows no template of niah, vt"):
        read_file(path)


# Tasks by name, and chunks.


def test_every_generated_task_is_made_by_name():
    tokenizer = bytes_tokenizer()
    for name in GENERATED:
        sample = make_sample(name, 3, length=2000, num_chunks=2, encode=tokenizer.encode)
        assert sample == make_sample(name, 3, length=2000, num_chunks=2, encode=tokenizer.encode)
        assert sample.task == name and len(sample.chunks) == 2
        assert sum(len(tokenizer.encode(chunk)) for chunk in sample.chunks) <= 2000
    with pytest.raises(ValueError, match="no task 'qa' that is made on the spot; use one of single"):
        make_sample("qa", 0, length=100, num_chunks=1)
    with pytest.raises(ValueError, match="haystack is 'noise', which cannot be quoted"):
        make_sample("quote", 0, length=100, num_chunks=1, haystack="noise")


def test_a_haystack_may_be_a_file(tmp_path):
    rows = [{"text": f"My own sentence number {i} is here. It is short. Nobody wrote it before."} for i in range(20)]
    path = lines(tmp_path / "mine.jsonl", *rows)
    sample = make_sample("mk", 0, length=120, num_chunks=2, haystack=str(path))
    assert all("My own sentence" in chunk for chunk in sample.chunks)


def test_shipped_tasks_and_files_by_name(tmp_path):
    for name in SHIPPED:
        assert len(read_task(name, limit=3)) == 3
    assert read_task(str(lines(tmp_path / "musique.jsonl", MUSIQUE)))[0].id == "m1"
    with pytest.raises(ValueError, match="no task or file 'nothing'; use hotpotqa, squad, or the path"):
        read_task("nothing")


def test_contexts_in_one_piece_are_cut_and_join_again(tmp_path):
    row = {**MUSIQUE, "context": "".join(chr(97 + i % 26) for i in range(1100))}
    (sample,) = read_longbench(lines(tmp_path / "musique.jsonl", row))
    cut = in_chunks(sample, bytes_tokenizer())
    assert [len(chunk) for chunk in cut.chunks] == [366, 367, 367]  # at most 512 bytes each, and even
    assert cut.text == sample.text
    assert [len(chunk) for chunk in in_chunks(sample, bytes_tokenizer(), 300).chunks] == [275] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_even_pieces(size):
    text = "a\N{SNOWMAN}bc d\N{GREEK SMALL LETTER ALPHA}efgh ij"
    pieces = even_pieces(text, size=size, offsets=bytes_tokenizer().offsets)
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= size + 2  # a cut inside a character moves before it


# M-04: the middle is cut out, by token: the first half and the last half of the prompt stay.


def spelled(sample):
    return list(sample.text.encode())


def test_middle_cut_keeps_the_first_and_the_last_half_token_by_token(tmp_path):
    row = {**MUSIQUE, "context": "".join(chr(65 + i % 57) for i in range(900))}
    (sample,) = read_longbench(lines(tmp_path / "musique.jsonl", row))
    whole = spelled(sample)
    for longest in (len(whole) - 1, 800, 701):
        half = longest // 2
        assert spelled(cut_middle(sample, longest, bytes_tokenizer().offsets)) == whole[:half] + whole[-half:]
    assert cut_middle(sample, len(whole), bytes_tokenizer().offsets) == sample
    assert in_chunks(sample, bytes_tokenizer(), longest=700).text.encode() == bytes(whole[:350] + whole[-350:])


def test_middle_cut_over_several_chunks_moves_spans():
    sample = make_sample("mq", 0, length=3000, num_chunks=3, encode=bytes_tokenizer().encode)
    whole = spelled(sample)
    for longest in range(len(whole) - 2500, len(whole), 173):
        cut, half = cut_middle(sample, longest, bytes_tokenizer().offsets), longest // 2
        # Chunks of which nothing is left lose their blank line too.
        assert cut.text.encode().replace(b"\n\n", b"") == bytes(whole[:half] + whole[-half:]).replace(b"\n\n", b"")
        assert set(quoted(cut)) <= set(sample.answers)
        kept = {answer for answer in sample.answers if any(answer in chunk for chunk in cut.chunks)}
        assert set(quoted(cut)) == kept
        assert cut.gold == tuple(sorted({span.chunk for span in cut.spans}))


def test_middle_cut_refuses_to_cut_the_question():
    sample = make_sample("single", 0, length=600, num_chunks=1, encode=bytes_tokenizer().encode)
    with pytest.raises(ValueError, match="longest is 300, but sample single-600-0 has .* use more than"):
        cut_middle(sample, 300, bytes_tokenizer().offsets)


def test_prompts_of_benchmark_files_get_no_worked_example_and_may_be_cut(tmp_path):
    """M-03 and M-04 through the runner's own door; jfuse's questions do get an example."""
    row = {**MUSIQUE, "context": "".join(chr(65 + i % 57) for i in range(900))}
    path, tokenizer = str(lines(tmp_path / "musique.jsonl", row)), bytes_tokenizer()
    task = Task("musique", data=path, longest=800)
    (sample,) = draw(task, tokenizer, 1)
    prompt = make_prompt(sample, tokenizer)
    tokens = [*prompt.prefix, *(t for chunk in prompt.chunks for t in chunk), *prompt.question.tokens]
    whole = read_longbench(path)[0].text.encode()
    assert tokenizer.decode(tokens).encode() == whole[:400] + whole[-400:]
    (asked,) = draw(Task("squad"), tokenizer, 1)
    assert asked.text.startswith(EXAMPLE)
    assert asked.text.endswith(f"\n\n{asked.question}\nAnswer:")  # laid out as in the example
    assert "\n\n\n" not in asked.text
    with pytest.raises(ValueError, match="longest of task 'musique' is 0"):
        Task("musique", data=path, longest=0)
