"""Real vocabularies against Hugging Face ``tokenizers``: ids of random, adversarial and multilingual text.

``DAGSERVE_FUZZ`` is how many strings each gets [2000].
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from test_tokenizer import ADVERSARIAL, MULTILINGUAL, Case, case_of, rows_of
from tokenizers import AddedToken, Tokenizer

from demo.assets import Unreachable
from demo.vocabularies import SHA512, vocabulary

STRINGS = int(os.environ.get("DAGSERVE_FUZZ", "2000"))
NAMES = [*SHA512, "semantic"]

POOLS = (
    "abcdefghijklmnopqrstuvwxyzABCXYZ     '",
    "0123456789.,- ",
    " \t\n\r\u00a0\u3000\u2028",
    "'sStTrRvVlLdDmMe\u017f\u212a ",
    "的一是不了人我在有他这中大来上国敏捷棕色狐狸",
    "ひらがなカタカナ漢字ー。、",
    "가나다라마바사아",
    "éèüñçßøåÅΩ",
    "\u0301\u0300\u0323\u0327\u0308\u0345\u05b0\u0f71\u0f72\u1161\u11a8\u1100\uac00\u0344\u212b\u2126\u0958\ufb2c\U0001d160",
    "مرحبا بالعالم١٢٣",
    "हिन्दी १२३ क्षत्रिय",
    "ไทยภาษา๑๒",
    "👍🏽👩\u200d🇨🇿🎉",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "▁<0x0A><s></s>",
    "\x00\x01\x7f\u0080\u0085\u00ad\ufffd\uffff\U0010ffff\u200b\ufeff",
)


def with_semantic_ids() -> bytes:
    """Qwen3's tokenizer with 10,000 tokens such as ``<a_123>`` added."""
    tokenizer = Tokenizer.from_str(vocabulary("qwen3").decode())
    tokens = [f"<{level}_{i}>" for level in "abcd" for i in range(2500)]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in tokens])
    return str(tokenizer.to_str()).encode()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def find(name: str) -> Case:
        try:
            document = with_semantic_ids() if name == "semantic" else vocabulary(name)
        except Unreachable as error:
            pytest.skip(str(error))
        return case_of(tmp_path_factory.mktemp(name), document)

    return find


def strings(source: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        kind = source.random()
        if kind < 0.5:
            pools = source.sample(POOLS, source.randint(1, 4))
            yield "".join(source.choice(source.choice(pools)) for _ in range(source.randint(1, 60)))
        elif kind < 0.75:
            yield "".join(chr(_code_point(source)) for _ in range(source.randint(1, 25)))
        elif kind < 0.9:
            text = source.choice([*MULTILINGUAL, *ADVERSARIAL])
            begin = source.randrange(len(text))
            yield text[begin : begin + source.randint(1, 300)]
        else:
            runs = (source.choice(source.choice(POOLS[:6])) * source.randint(1, 6) for _ in range(20))
            yield "".join(runs)


def _code_point(source: random.Random) -> int:
    c = source.randrange(0x110000) if source.random() < 0.5 else source.randrange(0x3000)
    return 0x20 if 0xD800 <= c < 0xE000 else c


def differences(case: Case, texts: list[str], tokenizer: Any, **options: Any) -> list[str]:
    """The texts whose ids differ. Texts without a token are left out: they are an error by themselves."""
    expected = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    kept = [i for i, ids in enumerate(expected) if ids]
    rows = rows_of(case.node(special_tokens=0, **options).run({"text": [texts[i] for i in kept]}))
    return [texts[i] for i, row in zip(kept, rows, strict=True) if row != expected[i]]


@pytest.mark.parametrize("name", NAMES)
def test_random_text(name: str, cases: Any) -> None:
    source, case = random.Random(name), cases(name)
    for _ in range(0, STRINGS, 1000):
        assert differences(case, list(strings(source, 1000)), case.plain) == []


@pytest.mark.parametrize("name", NAMES)
def test_added_tokens_in_an_allowed_field(name: str, cases: Any) -> None:
    """All of the row is open: the ids are those of the whole tokenizer."""
    source, case = random.Random(name), cases(name)
    full = Tokenizer.from_str(case.document.decode())
    added = [t.content for t in full.get_added_tokens_decoder().values()]
    texts = [
        "".join(
            source.choice([*source.choice(added), source.choice(added), " ", "  ", "a", text[:4], text])
            for _ in range(8)
        )
        for text in strings(source, 600)
    ]
    assert differences(case, texts, full, allow_added_tokens=["text"]) == []


@pytest.mark.parametrize("name", ["qwen3", "llama2"])
def test_every_code_point_alone_and_beside_marks(name: str, cases: Any) -> None:
    case = cases(name)
    chars = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    marks = "\u0301\u0323\u0345\u3099\u1161\u11a8\u0338"
    assigned = [c for c in chars if ord(c) < 0x3400 or 0xA000 <= ord(c) < 0xAC10 or 0xF900 <= ord(c) < 0x10000]
    assigned += [c for c in chars if 0x10000 <= ord(c) < 0x1F000]
    texts = [*chars, *(c + source for c in assigned for source in (marks[ord(c) % 7] + marks[ord(c) % 5],))]
    texts += [marks[ord(c) % 3] + c for c in assigned]
    for begin in range(0, len(texts), 8000):
        assert differences(case, texts[begin : begin + 8000], case.plain) == []


@pytest.mark.parametrize("name", ["gemma", "llama2"])
def test_special_tokens_of_the_post_processor(name: str, cases: Any) -> None:
    case = cases(name)
    full = Tokenizer.from_str(case.document.decode())
    expected = [full.encode(text).ids for text in MULTILINGUAL]
    for node in (case.node(), case.reference()):
        assert rows_of(node.run({"text": list(MULTILINGUAL)})) == expected


def test_ten_thousand_added_tokens_load_at_once(cases: Any) -> None:
    """They are in the file as a trie; loading maps it."""
    case = cases("semantic")
    row = rows_of(case.node(allow_added_tokens=["text"]).run({"text": ["<a_12><b_7> item<d_2499>"]}))[0]
    full = Tokenizer.from_str(case.document.decode())
    assert row == full.encode("<a_12><b_7> item<d_2499>").ids
    assert full.token_to_id("<d_2499>") == row[-1]
    document = json.loads(case.document)
    assert len(document["added_tokens"]) > 10_000
