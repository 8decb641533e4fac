"""Tokenizers against `transformers`; doubled BOS, spelled control tokens, half characters, hostile files."""

import json
import random

import numpy as np
import pytest
import transformers

from jfuse.models.tokenizer import Tokenizer, check_ids
from jfuse.models.tokenizer_files import read_tokenizer, write_tokenizer

TEXTS = [
    "The river Amstel flows through Amsterdam.",
    " starts with a space, ends with one ",
    "emoji 👩‍👩‍👧 🇳🇱, CJK 世界你好, combining e\u0301 n\u0303, Ω≈ç, \u200d zero width",
    "tabs\tand\n\nlines \r\n  and   runs of spaces",
    "numbers 1234567 3.14 x=5",
    "a genuine \ufffd character",
]
SPELLED = "He wrote <unk> </s> and <|eot|><s> then <think>no</think> at the end <|start|>."


@pytest.fixture(params=["byte_level", "sentencepiece"])
def folder(request, tokenizer_folder, sentencepiece_folder):
    return tokenizer_folder if request.param == "byte_level" else sentencepiece_folder


def decoded(folder, text):
    """SentencePiece cannot tell whether a text began with a space."""
    return text.removeprefix(" ") if folder.name == "sentencepiece" else text


def control_ids(folder) -> set[int]:
    return {token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}


def test_plain_text_gets_the_ids_of_transformers(folder):
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer = read_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == reference.encode(text, add_special_tokens=False)
        assert ids.tolist() == tokenizer.encode_template(text).tolist()
    assert tokenizer.encode("").tolist() == []


def test_rendered_template_gets_the_ids_of_transformers(tokenizer_folder):
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    tokenizer = read_tokenizer(tokenizer_folder)
    head, tail = tokenizer.chat_parts("Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which river?"}]
    settings = {"add_generation_prompt": True, "enable_thinking": False}
    assert reference.apply_chat_template(messages, tokenize=False, **settings) == head + "Which river?" + tail
    ours = [*tokenizer.encode_template(head), *tokenizer.encode("Which river?"), *tokenizer.encode_template(tail)]
    assert ours == reference.apply_chat_template(messages, return_dict=False, **settings)


def test_one_bos_at_position_0_of_the_whole_request(folder):
    """T-02, pitfall 45: none in the chunks, one in the head."""
    tokenizer = read_tokenizer(folder)
    chunks = [tokenizer.encode(text) for text in TEXTS[:3]]
    head, tail = (tokenizer.encode_template(part) for part in tokenizer.chat_parts(None))
    request = np.concatenate([head, *chunks, tokenizer.encode("Which river?"), tail])
    assert tokenizer.bos_id is not None and tokenizer.bos_policy == f"first:{tokenizer.bos_id}"
    assert np.flatnonzero(request == tokenizer.bos_id).tolist() == [0]


@pytest.mark.parametrize("template_bos", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_bos_is_neither_doubled_nor_lost(tokenizer_folder, template_bos):
    """T-03: whether the template writes BOS or not."""
    template = (tokenizer_folder / "chat_template.jinja").read_text().replace("{{ bos_token }}", template_bos)
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    tokenizer = read_tokenizer(tokenizer_folder)
    first, second = tokenizer.encode_template(tokenizer.chat_parts(None).head)[:2]
    assert first == tokenizer.bos_id != second


def test_a_bos_inside_the_prompt_is_refused(tokenizer_folder):
    """T-02."""
    template = (tokenizer_folder / "chat_template.jinja").read_text() + "<s>"
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="writes the BOS token '<s>' inside"):
        read_tokenizer(tokenizer_folder).chat_parts(None)


@pytest.mark.parametrize("adds", [True, False])
def test_bos_policy_is_that_of_transformers(tokenizer_folder, tmp_path, adds):
    """T-02: the post-processor decides, in the original and in the files that jfuse writes."""
    spec = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    if not adds:
        (tokenizer_folder / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": None}))
    tokenizer = read_tokenizer(tokenizer_folder)
    write_tokenizer(tokenizer, tmp_path)
    assert (tokenizer.bos_id is not None) == adds
    for folder in (tokenizer_folder, tmp_path):
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        assert reference.encode("river") == [*([tokenizer.bos_id] if adds else []), *tokenizer.encode("river")]


def test_spelled_control_tokens_are_text(folder):
    """T-04: special ones, and added ones that are not special (<think>)."""
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(SPELLED)
    assert control_ids(folder).isdisjoint(ids.tolist())
    assert tokenizer.stop_ids.isdisjoint(ids.tolist())
    assert tokenizer.decode(ids) == SPELLED
    assert not control_ids(folder).isdisjoint(tokenizer.encode_template(SPELLED).tolist())


def test_merges_that_spell_a_control_token_are_not_followed(sentencepiece_folder):
    """T-04: a vocabulary whose merges reach `</s>`, as one derived from SentencePiece scores may."""
    path = sentencepiece_folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["model"]["vocab"] |= {"</": 900, "s>": 901, "/": 902, "<": 903, ">": 904} | {"s": spec["model"]["vocab"]["s"]}
    spec["model"]["merges"] = [["<", "/"], ["s", ">"], ["</", "s>"], *spec["model"]["merges"]]
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "</s>"]
    path.write_text(json.dumps(spec))
    control = spec["model"]["vocab"]["</s>"]
    assert control in read_tokenizer(sentencepiece_folder).encode("x</s>").tolist()  # not control: merged like any word
    spec["added_tokens"].append(
        {"id": control, "content": "</s>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    )
    path.write_text(json.dumps(spec))
    tokenizer = read_tokenizer(sentencepiece_folder)
    assert control not in tokenizer.encode("x</s>").tolist()
    assert tokenizer.decode(tokenizer.encode("x</s>")) == "x</s>"


def test_ids_cut_anywhere_decode_to_the_source_text(folder):
    """T-01, T-09, T-10: chunks are runs of ids, cut inside words and characters; joined they are the whole."""
    tokenizer = read_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        cuts = sorted(random.Random(0).sample(range(len(ids)), 3))
        chunks = np.split(ids, cuts)
        assert sum(map(len, chunks)) == len(ids)
        assert tokenizer.decode(np.concatenate(chunks)) == decoded(folder, text)


def test_streamed_pieces_are_whole_characters_and_join_to_the_whole(folder):
    """T-09: every prefix of the stream decodes to text without replacement characters."""
    tokenizer = read_tokenizer(folder)
    for text in TEXTS[:-1]:
        ids, text = tokenizer.encode(text).tolist(), decoded(folder, text)
        assert "".join(tokenizer.stream(iter(ids))) == text == tokenizer.decode(ids)
        for end in range(len(ids)):
            assert "\ufffd" not in tokenizer.decode(ids[:end])
            assert text.startswith(tokenizer.decode(ids[:end]))
    assert "\ufffd" in tokenizer.decode(tokenizer.encode(TEXTS[-1]))


def test_offsets_are_the_characters_of_each_token(tokenizer_folder):
    tokenizer, text = read_tokenizer(tokenizer_folder), "The river </s> Amstel."
    pieces = [text[start:end] for start, end in tokenizer.offsets(text)]
    assert pieces == [tokenizer.decode([i]) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text


def test_decoding_is_that_of_tokenizers(byte_level, tokenizer_folder):
    """Any ids at all, invalid UTF-8 included, apart from a last character that is not finished."""
    tokenizer = read_tokenizer(tokenizer_folder)
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(byte_level.get_vocab_size()) for _ in range(12)] + [byte_level.token_to_id("a")]
        assert tokenizer.decode(ids, skip_special=False) == byte_level.decode(ids, skip_special_tokens=False)


def test_special_and_stop_tokens_are_left_out_of_answers(tokenizer_folder):
    tokenizer = read_tokenizer(tokenizer_folder)
    ids = tokenizer.encode_template("<think>yes</think>river<|eot|></s>")
    assert tokenizer.decode(ids) == "<think>yes</think>river"
    assert tokenizer.decode(ids, skip_special=False).endswith("<|eot|></s>")
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""  # a padded vocabulary's id
    with pytest.raises(ValueError, match="Cannot decode id -1"):
        tokenizer.decode([-1])


def test_stop_ids_are_the_configs_list_and_the_tokenizers_eos(tokenizer_folder, byte_level):
    """W-06."""
    named = {byte_level.token_to_id(token) for token in ("<|eot|>", "<|start|>", "</s>")}
    assert read_tokenizer(tokenizer_folder).stop_ids == named
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "</s>", "lstrip": False}  # the older spelling
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer(tokenizer_folder).stop_ids == named
    (tokenizer_folder / "generation_config.json").unlink()
    (tokenizer_folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_tokenizer(tokenizer_folder).stop_ids == {7, byte_level.token_to_id("</s>")}
    (tokenizer_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 100_000]}))
    with pytest.raises(ValueError, match="stop_ids holds id 100000"):
        read_tokenizer(tokenizer_folder)


def test_thinking_reaches_the_template(tokenizer_folder):
    """Pitfall 46: the assistant header is in the tail, and thinking mode is fixed by the caller."""
    tokenizer = read_tokenizer(tokenizer_folder)
    assert tokenizer.chat_parts(None).tail.endswith("<think>\n\n</think>\n\n")
    assert tokenizer.chat_parts(None, thinking=True).tail.endswith("<|end_header|>\n\n")


def test_a_base_model_has_only_its_bos(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").unlink()
    tokenizer = read_tokenizer(tokenizer_folder)
    assert tokenizer.chat_parts(None) == ("<s>", "")
    assert tokenizer.chat_parts("Passages:") == ("<s>Passages:\n\n", "")


def test_the_date_in_a_template_is_fixed(tokenizer_folder):
    template = "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
    (tokenizer_folder / "chat_template.jinja").write_text(template + "{{ date_string }}:{{ messages[0].content }}")
    assert read_tokenizer(tokenizer_folder).chat_parts(None).head == "<s>26 Jul 2024:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[-1].content }}", "cannot be rendered.*unsafe"),
        ("{{ messages.append(1) }}{{ messages[-1].content }}", "cannot be rendered.*unsafe"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "no system.*system=None",
        ),
        ("{% if", "cannot be rendered"),
        ("nothing of the user", "writes the user's content 0 times"),
        ("{{ messages[-1].content * 2 }}", "writes the user's content 2 times"),
    ],
)
def test_hostile_and_damaged_templates(tokenizer_folder, template, message):
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tokenizer_folder).chat_parts("system")


def test_identity_changes_with_any_merge_and_with_nothing_else(tokenizer_folder):
    """T-11."""
    path = tokenizer_folder / "tokenizer.json"
    before, spec = read_tokenizer(tokenizer_folder), json.loads(path.read_text())
    path.write_text(json.dumps(spec, indent=7))
    (tokenizer_folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert read_tokenizer(tokenizer_folder).identity == before.identity
    merges = spec["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    path.write_text(json.dumps(spec))
    assert read_tokenizer(tokenizer_folder).identity != before.identity


def test_written_files_read_as_an_equal_tokenizer(folder, tmp_path):
    before = read_tokenizer(folder)
    write_tokenizer(before, tmp_path)
    after = read_tokenizer(tmp_path)
    assert after == before and hash(after) == hash(before)
    assert (after.bos_id, after.stop_ids, after.chat_parts("x")) == (
        before.bos_id,
        before.stop_ids,
        before.chat_parts("x"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec["model"].update(type="Unigram"), "'Unigram'; jfuse supports BPE"),
        (lambda spec: spec.update(model=None), "model is None"),
        (lambda spec: spec["model"].update(vocab=[["a", 0.0]]), "no vocabulary"),
        (lambda spec: spec["model"]["merges"].append(["zz", "zzz"]), "damaged"),
        (lambda spec: spec["added_tokens"].append({"id": "x"}), "added token"),
        (
            lambda spec: spec.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
            "decoder is WordPiece",
        ),
    ],
)
def test_damaged_tokenizer_json(tokenizer_folder, change, message):
    path = tokenizer_folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tokenizer_folder)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"a": 1}'])
def test_files_that_are_no_tokenizer(tokenizer_folder, content):
    (tokenizer_folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer"):
        read_tokenizer(tokenizer_folder)
    with pytest.raises(ValueError, match="holds no tokenizer.json"):
        read_tokenizer(tokenizer_folder.parent)


def test_truncation_in_the_file_is_not_obeyed(byte_level, tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(spec))
    assert len(read_tokenizer(tokenizer_folder).encode("river " * 50)) >= 50


def test_special_tokens_must_be_in_the_vocabulary(tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<none>"}))
    with pytest.raises(ValueError, match="bos_token is '<none>', which is not in its vocabulary"):
        read_tokenizer(tokenizer_folder)


def test_added_tokens_of_older_configs(tokenizer_folder, byte_level):
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    new = byte_level.get_vocab_size()
    entry = {"content": "<|late|>", "special": True, "normalized": False} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip"), False
    )
    (tokenizer_folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"added_tokens_decoder": {str(new): entry}})
    )
    tokenizer = read_tokenizer(tokenizer_folder)
    assert tokenizer.encode_template("<|late|>").tolist() == [new]
    assert new not in tokenizer.encode("<|late|>").tolist()
    assert tokenizer.vocab_size == new + 1


def test_words_without_a_decoder():
    spec = {"model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "river": 2, "<unk>": 3}, "unk_token": "<unk>"}}
    spec |= {
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
    }
    tokenizer = Tokenizer(spec)
    assert tokenizer.encode("a <s> river").tolist() == [1, 3, 2]
    assert tokenizer.decode([1, 2]) == "a river"


def test_lone_surrogates_are_refused(tokenizer_folder):
    with pytest.raises(ValueError, match="not valid Unicode at character 3"):
        read_tokenizer(tokenizer_folder).encode("abc\ud800")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "query is empty"),
        ([1, 128], "query holds id 128 at index 1, but the vocabulary has ids 0..127"),
        ([-1], "query holds id -1"),
        ([1.5], "integer token ids"),
        ([[1, 2]], "one row"),
        ([2**40], "query holds id"),
    ],
)
def test_ids_outside_the_vocabulary(ids, message):
    with pytest.raises(ValueError, match=message):
        check_ids(ids, 128, "query")


def test_ids_inside_the_vocabulary():
    assert check_ids(np.array([0, 127], np.int64), 128, "query").dtype == np.int32
    assert check_ids([], 128, "chunk", allow_empty=True).shape == (0,)
