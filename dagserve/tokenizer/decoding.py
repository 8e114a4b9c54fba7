"""Tokens to text, as the ``decoder`` part of a ``tokenizer.json`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagserve.errors import CheckpointError
from dagserve.tokenizer.document import TokenizerSpec, fallback_token
from dagserve.tokenizer.vocabulary import byte_alphabet

SPECIAL, BYTE, UNKNOWN = 1, 2, 4
"""Flags of a token: left out of text; one byte of a character; stands for what has no token."""


@dataclass(frozen=True)
class Decoding:
    """What each token adds to a text.

    Attributes:
        texts: by id; empty where there is no token.
        flags: by id.
        byte_level: bytes of all tokens are joined, and what is not UTF-8 becomes U+FFFD, one for each maximal part;
            else only runs of :data:`BYTE` tokens are joined, and one that is not UTF-8 becomes one U+FFFD for each
            byte.
        strip: how many spaces are taken from the start of a text.
    """

    texts: Sequence[bytes]
    flags: Sequence[int]
    byte_level: bool
    strip: int

    def begins_inside(self, index: int) -> bool:
        """Whether a token's text begins inside a character."""
        return 0x80 <= (self.texts[index] or b"\0")[0] < 0xC0

    def text(self, ids: Sequence[int], *, special: bool = False, unknown: bool = True) -> str:
        """The text of tokens, with or without special and unknown ones: the readable form of the native code.

        An id that the tokenizer does not know has no text: models may have more rows than their tokenizer has tokens.
        """
        hidden = (0 if special else SPECIAL) | (0 if unknown else UNKNOWN)
        shown = [i for i in ids if i < len(self.flags) and not self.flags[i] & hidden]
        if self.byte_level:
            return b"".join(self.texts[i] for i in shown).decode(errors="replace")
        text, run = "", b""
        for i in (*shown, None):
            if i is not None and self.flags[i] & BYTE:
                run += self.texts[i]
                continue
            text, run = text + _joined(run), b""
            text += "" if i is None else self.texts[i].decode()
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(self.strip, spaces) :]


def _joined(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def decoding(spec: TokenizerSpec) -> Decoding:
    """How the tokenizer's tokens become text.

    Raises:
        CheckpointError: its decoder is not supported; the message names it.
    """
    steps = _flat(spec.decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _decoding(spec, byte_level=True, replaced={}, strip=0)
    texts = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    replaced = {step["pattern"]["String"]: step["content"] for step in texts}
    plain = ["Replace", "ByteFallback", "Fuse"]
    if kinds not in (plain, [*plain, "Strip"]) or len(replaced) != 1:
        raise CheckpointError(f"tokenizer.json is not supported where tokens become text: decoder {' + '.join(kinds)}")
    strip: Mapping[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
    if strip["content"] != " " or strip["stop"]:
        raise CheckpointError(f"tokenizer.json is not supported where tokens become text: decoder {strip}")
    return _decoding(spec, byte_level=False, replaced=replaced, strip=strip["start"])


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return [{"type": "none"}]
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part["decoders"] for step in _flat(each)]


def _decoding(spec: TokenizerSpec, *, byte_level: bool, replaced: Mapping[str, str], strip: int) -> Decoding:
    texts, flags = [b""] * spec.vocab_size, [0] * spec.vocab_size
    alphabet = {c: byte for byte, c in enumerate(byte_alphabet())}
    contents = {i: t for t, i in spec.vocab.items()} | {t.id: t.content for t in spec.added}
    for index, token in contents.items():
        if byte_level:
            known = all(c in alphabet for c in token)
            texts[index] = bytes(alphabet[c] for c in token) if known else token.encode()
        else:
            for old, new in replaced.items():
                token = token.replace(old, new)
            texts[index] = token.encode()
    if not byte_level:
        for byte in range(256):
            name = fallback_token(byte)
            if name in spec.vocab:
                texts[spec.vocab[name]], flags[spec.vocab[name]] = bytes([byte]), BYTE
    for added in spec.added:
        flags[added.id] |= SPECIAL if added.special else 0
    if spec.unknown is not None:
        flags[spec.unknown] |= UNKNOWN
    return Decoding(texts, flags, byte_level, strip)
