"""Truncated fields and parts encoded on their own, against Hugging Face ``tokenizers`` and brute force."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import ADVERSARIAL, BYTE_LEVEL, MULTILINGUAL, Case, case_of, rows_of, small_model, trained
from test_tokenizer_parts import PARTS, document_of, fallback

from dagserve.errors import InvalidRequest
from dagserve.nodes.tokenize import Tokenize
from dagserve.tokenizer.vocabulary import byte_alphabet

TEXTS = [*MULTILINGUAL, *ADVERSARIAL, "", "a", "日", "👩‍👩‍👧‍👦" * 9]
SIDES = ["left", "right", "middle"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("truncation"), trained(digits=True))


def options(side: str, most: int, **more: Any) -> dict[str, Any]:
    return {"truncate_fields": ["text"], "truncate_sides": [side], "truncate_tokens": [most], **more}


def token_bytes(case: Case, index: int) -> bytes:
    alphabet = {c: byte for byte, c in enumerate(byte_alphabet())}
    return bytes(alphabet[c] for c in case.plain.id_to_token(index))


def is_text(case: Case, ids: list[int]) -> bool:
    try:
        b"".join(token_bytes(case, i) for i in ids).decode()
    except UnicodeDecodeError:
        return False
    return True


def longest(case: Case, ids: list[int], most: int, *, from_end: bool) -> list[int]:
    """The longest beginning, or end, of at most so many tokens that is whole characters."""
    for count in range(most, -1, -1):
        kept = ids[len(ids) - count :] if from_end else ids[:count]
        if is_text(case, kept):
            return kept
    raise AssertionError


def expected_ids(case: Case, text: str, side: str, most: int) -> list[int]:
    ids: list[int] = case.plain.encode(text, add_special_tokens=False).ids
    if len(ids) <= most:
        return ids
    head = {"left": 0, "right": most, "middle": (most + 1) // 2}[side]
    return longest(case, ids, head, from_end=False) + longest(case, ids, most - head, from_end=True)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("side", SIDES)
def test_fields_are_cut_between_characters(side: str, most: int, case: Case) -> None:
    literal = case.plain.encode("Q: ", add_special_tokens=False).ids
    apart = case.node("Q: {text}", **options(side, most, joint=0))
    together = case.node("Q: {text}", **options(side, most))
    got, joined = apart.run({"text": TEXTS}), together.run({"text": TEXTS})
    for i, text in enumerate(TEXTS):
        kept = expected_ids(case, text, side, most)
        assert rows_of(got)[i] == literal + kept, repr(text)
        left = b"".join(token_bytes(case, t) for t in kept).decode()
        assert rows_of(joined)[i] == case.plain.encode(f"Q: {left}", add_special_tokens=False).ids
        lost = len(case.plain.encode(text, add_special_tokens=False).ids) - len(kept)
        assert got["truncated"][i] == joined["truncated"][i] == lost


@pytest.mark.parametrize("joint", [0, 1])
def test_too_many_tokens_may_be_an_error(joint: int, case: Case) -> None:
    for make in (case.node, case.reference):
        node = make("x{text}", **options("error", 3, joint=joint))
        assert rows_of(node.run({"text": ["a", "a b"]}))
        with pytest.raises(InvalidRequest, match=r"text\[1\] has \d+ tokens, over its 3; shorten it"):
            node.run({"text": ["a", "zqzqzq"]})


@pytest.mark.parametrize("joint", [0, 1])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["split Isolated ", "byte fallback", "metaspace first", "prepend and replace", "nfc"])
def test_native_equals_reference(name: str, side: str, joint: int, tmp_path: Path) -> None:
    part = dict(PARTS[name])
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    part["decoder"] = {"type": "Sequence", "decoders": [*steps, strip]} if "model" in part else BYTE_LEVEL
    case = case_of(tmp_path, document_of(part))
    source = random.Random(f"{name}{side}{joint}")
    template = "ab {scalar}: {text}a"
    for most in (1, 2, 5):
        made: Mapping[str, Any] = {
            "truncate_fields": ["text", "scalar"],
            "truncate_sides": [side, "middle"],
            "truncate_tokens": [most, 2],
            "joint": joint,
            "allow_added_tokens": ["scalar"],
        }
        node, reference = case.node(template, **made), case.reference(template, **made)
        for _ in range(40):
            words = ["a", "b", "ab", " ", "日", "é", "👍", "cd", "▁", "x"]
            texts = ["".join(source.choices(words, k=source.randint(0, 12))) for _ in range(3)]
            inputs = {"text": texts, "scalar": source.choice(texts)}
            ours, readable = node.run(inputs), reference.run(inputs)
            assert rows_of(ours) == rows_of(readable), inputs
            assert ours["truncated"].tolist() == readable["truncated"].tolist()


def test_bytes_without_a_token_are_gone_from_what_is_left(tmp_path: Path) -> None:
    document = small_model({"unk_token": "?"})
    case = case_of(tmp_path, json.dumps(json.loads(document) | {"decoder": BYTE_LEVEL}).encode())
    for joint in (0, 1):
        made = options("right", 4, joint=joint)
        for text in ("abzab", "zzzzzzz", "ab" * 9, "日日日"):
            ours = rows_of(case.node("a{text}", **made).run({"text": [text]}))
            assert ours == rows_of(case.reference("a{text}", **made).run({"text": [text]}))


def test_a_tokenizer_that_cannot_decode_is_refused(tmp_path: Path) -> None:
    case = case_of(tmp_path, document_of({"pre_tokenizer": None, **fallback()}))
    with pytest.raises(ValueError, match="cannot become text"):
        case.node("{text}", **options("left", 3))
    with pytest.raises(ValueError, match=r"truncate names 'item', which is no field of the template: use text"):
        Tokenize.interface({"template": "{text}", "truncate": {"item": {}}, "allow_added_tokens": []}, {})
