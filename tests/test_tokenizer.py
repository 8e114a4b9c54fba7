"""The native tokenizer and its Python reference against Hugging Face ``tokenizers``."""

from __future__ import annotations

import importlib.util
import json
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagserve._native import CpuNode
from dagserve.checkpoint.gguf_tokenizer import tokenizer_json_from_gguf
from dagserve.errors import CheckpointError, InvalidRequest
from dagserve.nodes.tokenize import Tokenize, template_segments
from dagserve.tokenizer import encode_label, parse_tokenizer, write_tables

ROOT = Path(__file__).parent.parent
TEXT_BYTES = 1 << 18
TOKENS = 1 << 18

MULTILINGUAL = (
    "The quick brown fox doesn't jump; it's the dog who'd rather we'll've slept.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Ça coûte 12,50 € — déjà vu!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. 2024 год",
    "敏捷的棕色狐狸跳过了懒狗。价格：１２３４元　全角空格",
    "いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ 東京都、三〇年",
    "다람쥐 헌 쳇바퀴에 타고파. 12시 30분",
    "الثعلب البني السريع ١٢٣ يقفز فوق الكلب الكسول، نعم؟",
    "देवनागरी १२३४ क्षत्रिय हिन्दी में पाठ।",
    "ไทยไม่มีช่องว่าง ๑๒๓ ภาษา",
    "👩‍👩‍👧‍👦 🇨🇿 👍🏽 e\u0301\u0327 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
)
ADVERSARIAL = (
    "'s't're've'm'll'd 'S'T'RE ' 's ''s 'l 'v 'r 're'",
    " ' s  's\t's\n's",
    "  two  spaces   three\t\ttabs \n\n newlines \r\n  end  ",
    " \u00a0\u2003\u3000\u2028\u2029\u0085\u200b\ufeff \u1680x\u180ey\u202f1\u205f",
    "1234567890 ½ ² Ⅷ ⑨ ٣ 〇 四 𝟘 𐄇",
    "a1b22 c 3 d4e   5\n6 7  8",
    "\x00\x01\x11 \x7f\u0080\u009f\u00ad\ufffd\uffff\U0010ffff",
    "<|im_start|>user<|im_end|><|endoftext|>",
    "foo_bar(baz)[0]->qux!=NULL && x<<=2;//!?...",
    "'" * 200 + " " * 300 + "!" * 300 + "\n" * 100 + "0" * 300,
)


@dataclass(frozen=True)
class Case:
    """One tokenizer: its JSON, its folder with both files, and Hugging Face's without added tokens."""

    folder: Path
    document: bytes
    plain: Any

    def node(self, template: str = "{text}", **options: Any) -> Any:
        fields = dict.fromkeys(s["field"] for s in template_segments(template) if "field" in s)
        rank = {name: [] if name == "scalar" else [1 << 13] for name in fields}
        return CpuNode(
            "tokenize",
            {"tables": "tokenizer.bin", "max_length": TOKENS, "template": template_segments(template), **options},
            [(name, "text", rank[name], TEXT_BYTES) for name in fields],
            [
                ("tokens", "i64", [TOKENS], 8 * TOKENS),
                ("cu_seqlens", "i32", [(1 << 13) + 1], 4 * (1 << 13) + 4),
                *([("truncated", "i32", [1 << 13], 4 << 13)] if "truncate_fields" in options else []),
            ],
            str(self.folder),
        )

    def reference(self, template: str = "{text}", **options: Any) -> Tokenize:
        config = {
            "tokenizer": "tokenizer.json",
            "max_length": TOKENS,
            "template": template_segments(template),
            **options,
        }
        return Tokenize(config, self.folder)


def case_of(folder: Path, document: bytes) -> Case:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(document)
    write_tables(document, folder / "tokenizer.bin")
    plain = tokenizers.Tokenizer.from_str(json.dumps(json.loads(document) | {"added_tokens": []}))
    return Case(folder, document, plain)


def trained(digits: bool, vocab_size: int = 700) -> bytes:
    """A byte-level BPE trained on this file's own strings, with added tokens of both kinds."""
    pre = tokenizers.pre_tokenizers
    byte_level = pre.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level]) if digits else byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (ROOT / "docs" / "architecture.md").read_text()
    tokenizer.train_from_iterator([*MULTILINGUAL * 3, *ADVERSARIAL, text], trainer)
    tokenizer.add_tokens(["<s>>", "ro", "row", "s>ro"])
    return str(tokenizer.to_str()).encode()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> bytes:
    reader = gguf.GGUFReader(demo_model)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    return tokenizer_json_from_gguf(fields)


@pytest.fixture(scope="session")
def gpt2_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("gpt2"), trained(digits=False))


@pytest.fixture(scope="session")
def digits_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("digits"), trained(digits=True))


@pytest.fixture(scope="session")
def demo_case(tmp_path_factory: pytest.TempPathFactory, demo_tokenizer: bytes) -> Case:
    return case_of(tmp_path_factory.mktemp("demo"), demo_tokenizer)


@pytest.fixture(params=["gpt2", "digits", pytest.param("demo", marks=pytest.mark.model)])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(f"{request.param}_case")
    return found


def rows_of(outputs: Mapping[str, Any]) -> list[list[int]]:
    assert outputs["tokens"].dtype == np.int64
    assert outputs["cu_seqlens"].dtype == np.int32
    bounds = outputs["cu_seqlens"].tolist()
    tokens = outputs["tokens"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(tokens)
    return [tokens[a:b] for a, b in pairwise(bounds)]


def assert_same(case: Case, texts: Sequence[str]) -> None:
    """Native rows are Hugging Face's; rows are made non-empty by a letter before each text."""
    node = case.node("x{text}")
    for group in groups(texts):
        native = rows_of(node.run({"text": group}))
        expected = [e.ids for e in case.plain.encode_batch([f"x{t}" for t in group], add_special_tokens=False)]
        for text, ours, theirs in zip(group, native, expected, strict=True):
            assert ours == theirs, repr(text)


def groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in batches that fit the node's bound of bytes."""
    group: list[str] = []
    size = 0
    for text in texts:
        bytes_ = len(text.encode())
        if size + bytes_ > TEXT_BYTES:
            yield group
            group, size = [], 0
        group.append(text)
        size += bytes_
    yield group


# Agreement with Hugging Face


@pytest.mark.parametrize("text", [*MULTILINGUAL, *ADVERSARIAL])
def test_text_equals_hugging_face(case: Case, text: str) -> None:
    assert_same(case, [text, text * 3, text[::-1], unicodedata.normalize("NFD", text)])


CODE_POINTS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def sprinkled(chars: Sequence[str], context: str) -> list[str]:
    return ["x".join(context.format(c) for c in chars[i : i + 500]) for i in range(0, len(chars), 500)]


def test_every_code_point(digits_case: Case, gpt2_case: Case) -> None:
    texts = sprinkled(CODE_POINTS, "{}")
    assert_same(digits_case, texts)
    assert_same(gpt2_case, texts)


@pytest.mark.parametrize("context", ["a{}a", " {} ", "1{}'s", "  {}\n", "!{}!"])
def test_code_points_in_context(case: Case, context: str) -> None:
    """Beside letters, digits, spaces and marks: all of the first 0x3100 code points, and some of the rest."""
    assert_same(case, sprinkled(CODE_POINTS[:0x3100] + CODE_POINTS[0x3100::7], context))


@pytest.mark.parametrize("piece", ["a", " ", "!", "ab", "é", "漢", "\n", "'", "7", "\x11", "😀", "Ab1 "])
@pytest.mark.parametrize("length", [1, 47, 48, 49, 63, 64, 65, 1000, 8192])
def test_long_runs(case: Case, piece: str, length: int) -> None:
    assert_same(case, [piece * length, f" {piece * length} ", f"{piece * length}b"])


def test_64_kib_of_one_letter(case: Case) -> None:
    assert_same(case, ["a" * 65536])


LIKELY = st.text(
    st.sampled_from("aAsStTreveml'd' \n\t\u00a0\u3000019½é漢😀!.-\x00\x11ab<|>") | st.characters(codec="utf-8")
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LIKELY, min_size=1, max_size=5))
def test_random_text_equals_hugging_face(case: Case, texts: list[str]) -> None:
    assert_same(case, texts)


def test_threads_share_a_node(digits_case: Case) -> None:
    node = digits_case.node("x{text}")
    texts = [f"{i} {text}" for i in range(40) for text in (*MULTILINGUAL, *ADVERSARIAL)]
    expected = [e.ids for e in digits_case.plain.encode_batch([f"x{t}" for t in texts])]

    def rows(offset: int) -> bool:
        return rows_of(node.run({"text": texts[offset:]})) == expected[offset:]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(rows, range(64)))


# Bytes without a token


def small_model(model: Mapping[str, Any], pre_tokenizer: Mapping[str, Any] | None = None) -> bytes:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {"a": 0, "b": 1, "ab": 2, "?": 3, "a?": 4, "??": 5}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer or byte_level,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b", "a ?", "? ?"], **model},
    }
    return json.dumps(document).encode()


@pytest.mark.parametrize("options", [{}, {"unk_token": "?"}, {"unk_token": "?", "fuse_unk": True}])
@pytest.mark.parametrize("text", ["a", "azb", "azzb", "zz", "abzzzab", "z?z", "azab?zz", "é", "az" * 40, "z" * 100])
def test_bytes_without_a_token(tmp_path: Path, options: Mapping[str, Any], text: str) -> None:
    case = case_of(tmp_path, small_model(options))
    native = rows_of(case.node("a {text}").run({"text": [text]}))
    assert native == [case.plain.encode(f"a {text}").ids]
    assert native == rows_of(case.reference("a {text}").run({"text": [text]}))


def test_the_last_of_two_equal_merges_counts(tmp_path: Path) -> None:
    case = case_of(tmp_path, small_model({"merges": ["a b", "a ?", "? ?", "a b"]}))
    for text in ("ab", "aab?", "a?b", "??ab"):
        assert rows_of(case.node().run({"text": [text]})) == [case.plain.encode(text).ids]


# Templates


TEMPLATES = (
    "{text}",
    "Query: {scalar}\n\nReview: {text}\nSentiment:",
    "<s>{scalar}</s>{text}</s>",
    "{text}row{text}<s>>",
    "<s>row s>row {text} <s>> ab</s",
    "<s{text}>{{row}}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_native_equals_reference(digits_case: Case, template: str) -> None:
    inputs = {"text": [*MULTILINGUAL, *ADVERSARIAL, "<s>", "w"], "scalar": "wh</s>at's row 1  "}
    native = digits_case.node(template).run(inputs)
    reference = digits_case.reference(template).run(inputs)
    assert rows_of(native) == rows_of(reference)


def test_tokens_cross_the_borders_of_segments(digits_case: Case) -> None:
    """A row is one text: a merge may join the template's end with the input's start."""
    expected = digits_case.plain.encode("The quick").ids
    assert rows_of(digits_case.node("Th{text}ck").run({"text": ["e qui"]})) == [expected]


def test_added_tokens_come_from_the_template_only(digits_case: Case) -> None:
    special = digits_case.plain.token_to_id("<s>")
    (row,) = rows_of(digits_case.node("<s>{text}").run({"text": ["<s> row"]}))
    assert row[0] == special
    assert row[1:] == digits_case.plain.encode("<s> row").ids
    assert special not in row[1:]


def test_special_tokens_are_found_before_normalized_ones(digits_case: Case) -> None:
    """``s>ro`` starts first, but ``<s>`` and ``</s>`` are special and found first; then longest of those left."""
    full = tokenizers.Tokenizer.from_str(digits_case.document.decode())
    literal = "</s>row</s>ro<s>>row s>row"
    expected = full.encode(literal, add_special_tokens=False).ids
    assert rows_of(digits_case.node(f"{literal}{{text}}").run({"text": [""]})) == [expected]


def test_a_batch_equals_its_rows(digits_case: Case) -> None:
    node, texts = digits_case.node("{scalar}: {text}"), [*MULTILINGUAL, *ADVERSARIAL]
    batch = rows_of(node.run({"scalar": "q", "text": texts}))
    assert batch == [rows_of(node.run({"scalar": "q", "text": [t]}))[0] for t in texts]


def test_text_may_be_bytes(digits_case: Case) -> None:
    node = digits_case.node()
    assert rows_of(node.run({"text": ["é1".encode()]})) == rows_of(node.run({"text": ["é1"]}))


def test_scalars_alone_are_one_row(digits_case: Case) -> None:
    native = digits_case.node("{scalar}").run({"scalar": "one row"})
    assert rows_of(native) == rows_of(digits_case.reference("{scalar}").run({"scalar": "one row"}))


# Mistakes of a request


MISTAKES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "no rows": ("{text}", {"text": []}, "[tokenize] text is empty; give at least one text"),
    "rows": ("{text}{b}", {"text": ["a", "b"], "b": ["c"]}, "[tokenize] text has 2 texts but b has 1; give as many"),
    "missing": ("{scalar}{text}", {"text": ["a"], "scalar": None}, "[tokenize] scalar is missing; give it"),
    "no tokens": ("{text}", {"text": ["a", ""]}, "[tokenize] text[1] has no tokens with the template; send some text"),
    "no tokens, scalar": (
        "{scalar}",
        {"scalar": ""},
        "[tokenize] scalar has no tokens with the template; send some text",
    ),
    "length": (
        "q{text}",
        {"text": ["a", "1" * 20]},
        "[tokenize] text[1] has 21 tokens with the template, over max_length 20; shorten it",
    ),
    "total": (
        "{text}",
        {"text": ["1" * 20] * 3},
        "[tokenize] the request has 60 tokens with the template, over the bound of 50; send fewer or shorter texts",
    ),
}
INVALID_UTF8 = (b"\x80", b"ab\xc3", b"\xc0\x80", b"a\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82")
EDGE_BYTES = bytes.fromhex("00 41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 f7 f8 ff")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(digits_case: Case, name: str) -> None:
    template, inputs, message = MISTAKES[name]
    ports = [(n, "text", [] if isinstance(v, str) or v is None else [8], 100) for n, v in inputs.items()]
    config = {"tables": "tokenizer.bin", "max_length": 20, "template": template_segments(template)}
    outputs = [("tokens", "i64", [50], 400), ("cu_seqlens", "i32", [9], 36)]
    node = CpuNode("tokenize", config, ports, outputs, str(digits_case.folder))
    with pytest.raises(InvalidRequest) as native:
        node.run(inputs)
    with pytest.raises(InvalidRequest) as reference:
        digits_case.reference(template, max_length=20, max_tokens=50).run(inputs)
    assert str(native.value) == message
    assert str(reference.value) == message


@pytest.mark.parametrize("wrong", INVALID_UTF8)
def test_invalid_utf8_names_the_byte(digits_case: Case, wrong: bytes) -> None:
    with pytest.raises(UnicodeDecodeError) as python:
        wrong.decode()
    for template, inputs, place in (
        ("{text}", {"text": ["ok", wrong]}, "text[1]"),
        ("{scalar}{text}", {"text": ["ok"], "scalar": wrong}, "scalar"),
    ):
        message = f"[tokenize] {place} is not valid UTF-8 at byte {python.value.start}; send UTF-8 text"
        for run in (digits_case.node(template).run, digits_case.reference(template).run):
            with pytest.raises(InvalidRequest) as error:
                run(inputs)
            assert str(error.value) == message


def invalid_at(text: bytes) -> str:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"[tokenize] text[0] is not valid UTF-8 at byte {error.start}; send UTF-8 text"
    return ""


def refusal(node: Any, text: bytes) -> str:
    try:
        node.run({"text": [text]})
    except InvalidRequest as error:
        return str(error)
    return ""


def test_utf8_is_what_python_decodes(digits_case: Case) -> None:
    """All pairs of edge bytes, continued by right and wrong bytes, cut and uncut."""
    config = {"tables": "tokenizer.bin", "max_length": 20, "template": [{"literal": "x"}, {"field": "text"}]}
    outputs = [("tokens", "i64", [50], 400), ("cu_seqlens", "i32", [9], 36)]
    node = CpuNode("tokenize", config, [("text", "text", [8], 100)], outputs, str(digits_case.folder))
    ends = (b"", b"\x80", b"\xbf\x80", b"A\x80", b"\x80\xc2")
    for text in (bytes(pair) + end for pair in product(EDGE_BYTES, EDGE_BYTES) for end in ends):
        assert refusal(node, text) == invalid_at(text), text


def test_a_lone_surrogate_is_not_utf8(digits_case: Case) -> None:
    for run in (digits_case.node().run, digits_case.reference().run):
        with pytest.raises(InvalidRequest, match=r"text\[0\] is not valid UTF-8 at byte 1"):
            run({"text": ["a\ud800"]})


# What is refused at compile


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}


def pattern(regex: str) -> dict[str, Any]:
    return {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": regex}}}


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "truncation": ({"truncation": {"max_length": 5}}, "truncation set"),
    "padding": ({"padding": {"pad_id": 0}}, "padding set"),
    "normalizer": ({"normalizer": {"type": "NFKC"}}, "normalizer NFKC"),
    "normalizer in a sequence": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        "normalizer Lowercase",
    ),
    "pre-tokenizer": ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer Whitespace"),
    "late prefix": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "ByteLevel"}]}},
        "pre_tokenizer ByteLevel that changes text after Split",
    ),
    "after bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, SPLIT]}},
        "pre_tokenizer ByteLevel before Split",
    ),
    "behavior": ({"pre_tokenizer": {**SPLIT, "behavior": "Torn"}}, "Split with behavior Torn"),
    "lookbehind": (pattern(r"(?<=a)b"), "a pattern with the group (?<=: (?<=a)b"),
    "possessive": (pattern(r"\s++"), "a pattern with possessive repetition"),
    "lazy": (pattern(r"a+?"), "a pattern with lazy repetition"),
    "back-reference": (pattern(r"(a)\1"), r"a pattern with \1"),
    "word boundary": (pattern(r"\ba"), r"a pattern with \b"),
    "wide look ahead": (pattern(r"a(?!bc)"), "a look ahead of more than one character"),
    "empty match": (pattern(r"a*"), "a pattern with an empty match"),
    "wide folding": (pattern(r"(?i:ss)"), "'ss' where case is ignored"),
    "property": (pattern(r"\p{Klingon}"), r"the property \p{Klingon}"),
    "nested class": (pattern(r"[a-z&&[^b]]"), "'&&' inside [...]"),
    "post-processor": (
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}},
        "TemplateProcessing with 0 texts",
    ),
    "bert": ({"post_processor": {"type": "BertProcessing"}}, "post_processor BertProcessing"),
    "unknown part": ({"magic": 1}, "unknown part 'magic'"),
    "word piece": ({"model": {"type": "WordPiece", "vocab": {}}}, "model WordPiece"),
    "byte_fallback": ({"model": {"byte_fallback": True}}, "model.byte_fallback beside ByteLevel"),
    "few bytes": (
        {"model": {"byte_fallback": True}, "pre_tokenizer": None},
        "model.byte_fallback without <0x00>",
    ),
    "empty added token": ({"added_tokens": [{"id": 6, "content": ""}]}, "an added token without text"),
    "dropout": ({"model": {"dropout": 0.1}}, "model.dropout 0.1"),
    "prefix": ({"model": {"continuing_subword_prefix": "##"}}, "model.continuing_subword_prefix '##'"),
    "suffix": ({"model": {"end_of_word_suffix": "</w>"}}, "model.end_of_word_suffix '</w>'"),
    "unknown option": ({"model": {"shiny": 1}}, "model.shiny"),
    "unknown token": ({"model": {"unk_token": "nope"}}, "model.unk_token 'nope'"),
    "ids": ({"model": {"vocab": {"a": 0, "b": 0}, "merges": []}}, "two tokens with one id"),
    "merge": ({"model": {"merges": ["a z"]}}, "'z', which is not in the vocabulary"),
    "merge form": ({"model": {"merges": ["ab"]}}, "merge 'ab' is not a pair"),
    "added id": ({"added_tokens": [{"id": 9, "content": "<m>"}]}, "added token '<m>' with id 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_features_are_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    document = json.loads(small_model({}))
    model = {**document["model"], **change.get("model", {})}
    with pytest.raises(CheckpointError) as error:
        write_tables(json.dumps({**document, **change, "model": model}).encode(), tmp_path / "t.bin")
    assert message in str(error.value)
    assert not (tmp_path / "t.bin").exists()


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"{}", b'{"model": 3}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_refused(document: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        parse_tokenizer(document)


def test_harmless_parts_are_accepted(tmp_path: Path) -> None:
    document = json.loads(small_model({"unk_token": None, "dropout": None, "end_of_word_suffix": ""}))
    document["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}]}
    assert write_tables(json.dumps(document).encode(), tmp_path / "t.bin").vocab_size == 6


def test_vocab_size_counts_added_tokens(digits_case: Case, tmp_path: Path) -> None:
    size = tokenizers.Tokenizer.from_str(digits_case.document.decode()).get_vocab_size(with_added_tokens=True)
    assert write_tables(digits_case.document, tmp_path / "t.bin").vocab_size == size


def test_labels_are_one_token(digits_case: Case) -> None:
    assert encode_label(digits_case.document, "a") == digits_case.plain.token_to_id("a")
    with pytest.raises(CheckpointError, match=r"label 'zqzq' is 4 tokens, \['z', 'q', 'z', 'q'\]"):
        encode_label(digits_case.document, "zqzq")
    with pytest.raises(CheckpointError, match="label '' is 0 tokens"):
        encode_label(digits_case.document, "")
    with pytest.raises(CheckpointError, match="label '<s>' is"):
        encode_label(digits_case.document, "<s>")


# Files


def damaged(tables: bytes) -> Iterator[tuple[str, bytes]]:
    yield "are cut short", b""
    yield "are cut short", tables[:40]
    yield "are cut short", tables[:-1]
    yield "are cut short", tables + b"\0"
    yield "are not a file of tokenizer tables", b"X" + tables[1:]
    yield "have version 9", tables[:8] + struct.pack("<I", 9) + tables[12:]
    for position in (12, 24, 40, 64, len(tables) // 2, len(tables) - 1):
        changed = bytearray(tables)
        changed[position] ^= 1
        yield "are damaged", bytes(changed)


def test_damaged_tables_are_refused(digits_case: Case, tmp_path: Path) -> None:
    for message, content in damaged((digits_case.folder / "tokenizer.bin").read_bytes()):
        (tmp_path / "tokenizer.bin").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Case(tmp_path, b"", None).node()


def test_absent_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot open .*tokenizer\.bin: No such file"):
        Case(tmp_path, b"", None).node()


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unicode_tables_are_those_of_the_installed_tokenizers() -> None:
    generate: Callable[[], str] = load(ROOT / "tools" / "generate_unicode.py").generate
    stored = (ROOT / "dagserve" / "tokenizer" / "unicode.txt").read_text()
    assert generate().splitlines()[1:] == stored.splitlines()[1:]


# GGUF


def gguf_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<s>", "a", "b", "ab"],
        "token_type": [3, 1, 1, 1],
        "merges": ["a b"],
    }
    return {f"tokenizer.ggml.{k}": v for k, v in {**fields, **changes}.items() if v is not None}


@pytest.mark.parametrize(("pre", "splits"), [("smollm", 2), ("gpt-2", 1)])
def test_gguf_tokenizer(pre: str, splits: int) -> None:
    bpe = parse_tokenizer(tokenizer_json_from_gguf(gguf_fields(pre=pre)))
    assert (len(bpe.splits), bpe.vocab_size, bpe.merges) == (splits, 4, [("a", "b")])
    assert [(t.content, t.id, t.normalized) for t in bpe.added] == [("<s>", 0, False)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre 'qwen2' is not supported: use one of gpt-2, smollm"),
        ({"add_bos_token": True}, "add_bos_token is not supported"),
        ({"merges": None}, "lacks the field tokenizer.ggml.merges"),
        ({"token_type": [1]}, "has 1 entries for 4 tokens"),
        ({"tokens": ["a", "a", "b", "ab"]}, "1 tokens that stand in it twice"),
        ({"merges": ["ab"]}, "has 'ab', which is not two tokens"),
    ],
)
def test_gguf_mistakes_are_named(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        tokenizer_json_from_gguf(gguf_fields(**changes))
    assert message in str(error.value)
