"""Patterns, composition and added tokens on their own, against Hugging Face ``tokenizers``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import ADVERSARIAL, MULTILINGUAL, case_of, rows_of, small_model, trained
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from dagserve.tokenizer.document import BYTE_LEVEL_PATTERN
from dagserve.tokenizer.pattern import PatternError, compile_pattern, literal_pattern

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = (
    BYTE_LEVEL_PATTERN,
    QWEN,
    QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}]+(?i:'s|'t)?|\p{N}{2,}|\P{L}{3}x?",
    r"(a|ab)(c|bcd)(d*)",
    r"a{2,4}b|a+$|(?:ab)+(?=c)|[^\S\r\n]+|\x41\u0042|\d+\D",
    r"[一-龥぀-ヿ]+|(?:\p{Han}|\p{Hiragana})x|[\w]+ ",
    r"a(b|c(d|e)*)?f|x(?!y)|(?i:k|ab[cd])",
)


compiled = cache(compile_pattern)


def pieces(pattern: str, text: str) -> list[tuple[int, int]]:
    """The matches in a text, by the scanner."""
    scanner = compiled(pattern)
    found, at = [], 0
    while at < len(text):
        end = scanner.match(text, at)
        if end is not None:
            found.append((at, end))
        at = at + 1 if end is None else end
    return found


def expected_pieces(pattern: str, text: str) -> list[tuple[int, int]]:
    """The same by Hugging Face: with ``removed`` and ``invert`` only the matches stay."""
    splitter = pre.Split(Regex(pattern), behavior="removed", invert=True)
    return [span for _, span in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scanners_match_as_the_regex_engine_does(pattern: str) -> None:
    source = random.Random(pattern)
    letters = "aabbccddeefxykK\u212aſsS'tTABé 12٣\n\r\t 漢ひ\u3000\u0301!.-"
    texts = ["".join(source.choice(letters) for _ in range(source.randint(1, 30))) for _ in range(800)]
    for text in [*MULTILINGUAL, *ADVERSARIAL, *texts]:
        assert pieces(pattern, text) == expected_pieces(pattern, text), repr(text)


ATOMS = st.sampled_from(["a", "b", r"\s", r"\S", "[ab]", "[^a]", r"\p{L}", "(?:ab|a)", "(?:b|ba|c)", " ", "(?i:s)"])
QUANTIFIERS = st.sampled_from(["", "", "?", "+", "*", "{2}", "{1,2}", "{0,3}"])
SEQUENCES = st.lists(st.tuples(ATOMS, QUANTIFIERS), min_size=1, max_size=4)
LOOKS = st.sampled_from(["", "", r"(?!\S)", "(?=a)", "(?!b)", "$"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(SEQUENCES, LOOKS), min_size=1, max_size=4), st.text("abcsſ \n", max_size=14))
def test_any_pattern_matches_as_the_regex_engine_does(branches: Any, text: str) -> None:
    pattern = "|".join("".join(a + q for a, q in sequence) + look for sequence, look in branches)
    try:
        found = pieces(pattern, text)
    except PatternError as error:
        empty = str(error) == "an empty match"
        assert empty
        return
    assert found == expected_pieces(pattern, text)


def test_literal_patterns_match_themselves() -> None:
    text = "".join(map(chr, range(1, 0xFF)))
    assert pieces(literal_pattern(text), text) == [(0, len(text))]


# Whole tokenizers of every kind of part


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(pattern: Mapping[str, str], behavior: str, *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def characters(tokens: str, merges: list[str], **model: Any) -> dict[str, Any]:
    vocab = {t: i for i, t in enumerate([*tokens, *(m.replace(" ", "") for m in merges)])}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": None, **model}}


def fallback(**model: Any) -> dict[str, Any]:
    tokens = [f"<0x{b:02X}>" for b in range(256)] + list("▁abcd?") + ["▁a", "ab", "▁ab", "cd", "abcd"]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = ["a b", "▁ a", "▁ ab", "c d", "ab cd"]
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "unk_token": None, **model}
    }


def metaspace(scheme: str, *, split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


PARTS: Mapping[str, Mapping[str, Any]] = {
    **{
        f"split {behavior} {'inverted' if invert else ''}": {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    split({"Regex": "a+|b"}, behavior, invert=invert),
                    {**BYTE_LEVEL, "use_regex": False},
                ],
            }
        }
        for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
        for invert in (False, True)
    },
    "string split": {"pre_tokenizer": split({"String": ".b"}, "MergedWithPrevious"), **characters("ab. ", ["a b"])},
    "digits together": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL],
        }
    },
    "prefix space": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
    "no pattern": {"pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}},
    "no pre-tokenizer": {"pre_tokenizer": None, **characters("ab c?", ["a b", "ab c"])},
    "unknown": {"pre_tokenizer": None, **characters("ab?", ["a b", "? ?"], unk_token="?")},
    "fused unknown": {"pre_tokenizer": None, **characters("ab?", ["a b", "? ?"], unk_token="?", fuse_unk=True)},
    "byte fallback": {"pre_tokenizer": None, **fallback()},
    "metaspace always": {"pre_tokenizer": metaspace("always"), **fallback()},
    "metaspace first": {"pre_tokenizer": metaspace("first"), **fallback()},
    "metaspace never": {"pre_tokenizer": metaspace("never", split=False), **fallback()},
    "prepend and replace": {
        "pre_tokenizer": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        **fallback(),
    },
    "replace by pattern": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"\s+|b(?=a)"}, "content": "ab"},
    },
    "nfc": {"normalizer": {"type": "NFC"}, "pre_tokenizer": None, **fallback()},
    "ignore merges": {
        "model": {"ignore_merges": True, "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}, "merges": ["a b"]}
    },
}


def document_of(part: Mapping[str, Any], added: list[dict[str, Any]] | None = None) -> bytes:
    document = json.loads(small_model({}))
    model = {**document["model"], **part.get("model", {})}
    if "model" not in part:
        alphabet = sorted(pre.ByteLevel.alphabet())
        model["vocab"] = {t: i for i, t in enumerate([*alphabet, "ab", "Ġa", "aa"])}
        model["merges"] = ["a b", "Ġ a", "a a"]
    return json.dumps({**document, **part, "model": model, "added_tokens": added or []}).encode()


FLAGS: tuple[Mapping[str, bool], ...] = (
    {},
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
    {"lstrip": True, "rstrip": True, "normalized": True},
)


def added_tokens(document: bytes, source: random.Random, *, normalized: bool) -> bytes:
    """The tokenizer with some added tokens of every kind."""
    tokenizer = Tokenizer.from_str(document.decode())
    for content in ("<m>", "<m>>", "a<", "b a", "é", "ab"):
        flags = source.choice(FLAGS)
        tokenizer.add_tokens([AddedToken(content, **{"normalized": normalized, **flags})])
    return str(tokenizer.to_str()).encode()


TEXTS = [
    "",
    " ",
    "a",
    "ab",
    "  ab cab ",
    "éa\u0301b\u0327\u0301",
    "x" * 70 + "ab" * 60,
    "▁a ▁ b",
    "日本 ab\nb",
    "a.b.b a..b",
]


def random_texts(source: random.Random, count: int) -> list[str]:
    letters = ["a", "b", "c", " ", "  ", "é", "e\u0301", "<m>", "<m>>", "▁", "?", ".", "b a", "_", "7", "\n", "日", "."]
    return ["".join(source.choice(letters) for _ in range(source.randint(1, 20))) for _ in range(count)]


@pytest.mark.parametrize("name", PARTS)
def test_each_part_equals_hugging_face(name: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, document_of(PARTS[name]))
    node, reference = case.node(special_tokens=0), case.reference(special_tokens=0)
    for text in [*TEXTS, *random_texts(random.Random(name), 150)]:
        expected = case.plain.encode(text, add_special_tokens=False).ids
        if expected:
            assert rows_of(node.run({"text": [text]})) == [expected], repr(text)
            assert rows_of(reference.run({"text": [text]})) == [expected], repr(text)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_added_tokens_where_all_is_open(name: str, normalized: bool, tmp_path: Path) -> None:
    source = random.Random(f"{name} {normalized}")
    for round_ in range(3):
        document = added_tokens(document_of(PARTS[name]), source, normalized=normalized)
        full = Tokenizer.from_str(document.decode())
        case = case_of(tmp_path / str(round_), document)
        node = case.node("<m>{text}b ", special_tokens=0, allow_added_tokens=["text"])
        for text in [*TEXTS, *random_texts(source, 80)]:
            expected = full.encode(f"<m>{text}b ", add_special_tokens=False).ids
            assert rows_of(node.run({"text": [text]})) == [expected], repr(text)


@pytest.mark.parametrize("name", [n for n in PARTS if not PARTS[n].get("normalizer")])
def test_closed_fields_never_become_added_tokens(name: str, tmp_path: Path) -> None:
    """Part of the row is open: native code and the readable form agree, and only open text makes added tokens."""
    source = random.Random(name)
    for normalized in (False, True):
        case = case_of(
            tmp_path / str(normalized), added_tokens(document_of(PARTS[name]), source, normalized=normalized)
        )
        template = "<m> {scalar}<m{text}> ab<m>>{text} a<"
        options = {"special_tokens": 0, "allow_added_tokens": ["scalar"]}
        node, reference = case.node(template, **options), case.reference(template, **options)
        for text in random_texts(source, 80):
            inputs = {"text": [text, ""], "scalar": source.choice(["", "<m>", " ab <m>> "])}
            assert rows_of(node.run(inputs)) == rows_of(reference.run(inputs)), inputs
        (closed,) = rows_of(case.node(special_tokens=0).run({"text": ["<m><m>>a<b aéab"]}))
        assert closed == case.plain.encode("<m><m>>a<b aéab", add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=12))
def test_nfc_equals_hugging_face(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    document = document_of({"normalizer": {"type": "NFC"}, "pre_tokenizer": None, **fallback()})
    case = case_of(tmp_path_factory.getbasetemp() / "nfc", document)
    expected = case.plain.encode(f"a{text}", add_special_tokens=False).ids
    assert rows_of(case.node("a{text}").run({"text": [text]})) == [expected]


def test_marks_in_any_order_and_number() -> None:
    """Canonical ordering, long runs included, by the composed text itself."""
    assert norm.NFC().normalize_str("a\u0301\u0323") == "\u1ea1\u0301"


@pytest.mark.parametrize("length", [1, 7, 300, 5000])
def test_long_runs_of_marks(length: int, tmp_path: Path) -> None:
    case = case_of(tmp_path, document_of(PARTS["nfc"]))
    source = random.Random(length)
    text = "a" + "".join(source.choice("\u0301\u0323\u0327\u0334\u0345\u05b0\u0300") for _ in range(length))
    assert rows_of(case.node().run({"text": [text]})) == [case.plain.encode(text).ids]


def test_a_trained_tokenizer_with_prefix_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(trained(digits=False).decode())
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))],
    )
    case = case_of(tmp_path, str(tokenizer.to_str()).encode())
    for text in MULTILINGUAL:
        expected = case.plain.encode(text, add_special_tokens=False).ids
        first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
        for node in (case.node(), case.reference()):
            assert rows_of(node.run({"text": [text]})) == [[first, *expected, last]]
        assert rows_of(case.node(special_tokens=0).run({"text": [text]})) == [expected]
