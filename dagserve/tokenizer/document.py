"""What a ``tokenizer.json`` says, read into :class:`TokenizerSpec`; what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagserve.errors import CheckpointError
from dagserve.tokenizer.pattern import literal_pattern

BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's expression, which the ``ByteLevel`` pre-tokenizer brings with it."""

BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
"""What a split does with its matches, in the order of the native ``Behavior``."""


@dataclass(frozen=True)
class Split:
    """Cuts text at the matches of ``pattern``; ``invert`` swaps matches and what lies between them."""

    pattern: str
    behavior: str = "Isolated"
    invert: bool = False


@dataclass(frozen=True)
class Replace:
    """Puts ``content`` in the place of every match of ``pattern``."""

    pattern: str
    content: str


@dataclass(frozen=True)
class Prefix:
    """Puts ``text`` before what does not begin with ``unless``; only at the very start of the input if
    ``first_only``."""

    text: str
    unless: str
    first_only: bool = False


class Nfc:
    """Unicode's canonical composition."""


Normalizer = Nfc | Replace | Prefix


@dataclass(frozen=True)
class AddedToken:
    """A token found in text before byte-pair encoding.

    ``normalized`` ones are found in normalized text, where the others leave some. ``lstrip`` and ``rstrip`` take the
    spaces beside it along; ``single_word`` ones are none beside a letter, digit or underscore.
    """

    content: str
    id: int
    normalized: bool = False
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerSpec:
    """What a supported ``tokenizer.json`` says.

    Attributes:
        normalizers: applied in turn to what the raw added tokens leave.
        transforms: applied in turn to what all added tokens leave.
        splits: the pre-tokenizer, each step cutting what the one before made.
        byte_level: whether ``vocab`` and ``merges`` are written in the byte-level alphabet.
        vocab: id of each token.
        merges: pairs of tokens in rank order.
        unknown: id for characters (bytes if byte level) without a token, None where they are dropped.
        fuse_unknown: whether a run of such characters is one token.
        byte_fallback: whether characters without a token become tokens of their bytes.
        ignore_merges: whether a piece that is a token stays whole whatever the merges say.
        before, after: ids that the post-processor puts around the tokens of a text.
        decoder: the ``decoder`` part as it is.
    """

    normalizers: tuple[Normalizer, ...]
    transforms: tuple[Replace | Prefix, ...]
    splits: tuple[Split, ...]
    byte_level: bool
    vocab: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    unknown: int | None
    fuse_unknown: bool
    byte_fallback: bool
    ignore_merges: bool
    added: tuple[AddedToken, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    decoder: Mapping[str, Any] | None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max((*self.vocab.values(), *(token.id for token in self.added)), default=-1)

    @property
    def normalized_tokens(self) -> tuple[str, ...]:
        """Added tokens that are looked for in text after a normalizer changed it."""
        return tuple(t.content for t in self.added if t.normalized and self.normalizers)


def parse_tokenizer(tokenizer_json: bytes) -> TokenizerSpec:
    """Reads a ``tokenizer.json``.

    Raises:
        CheckpointError: it is not one, or uses a feature that is not supported; the message names it.
    """
    try:
        document = json.loads(tokenizer_json)
        _refuse_other_parts(document)
        return _spec(document, document["model"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {type(error).__name__}: {error}") from error


def unsupported(what: str) -> CheckpointError:
    """The error for a feature that the native tokenizer does not have."""
    return CheckpointError(f"tokenizer.json is not supported: it has {what}; BPE without it is")


def _spec(document: Mapping[str, Any], model: Mapping[str, Any]) -> TokenizerSpec:
    transforms, splits, byte_level = _pre_tokenizer(document.get("pre_tokenizer"))
    vocab: dict[str, int] = model["vocab"]
    _refuse_model_features(model, byte_level=byte_level)
    before, after = _special_tokens(document.get("post_processor"))
    unknown = model.get("unk_token")
    return TokenizerSpec(
        normalizers=_normalizers(document.get("normalizer")),
        transforms=transforms,
        splits=splits,
        byte_level=byte_level,
        vocab=vocab,
        merges=_merges(model["merges"], vocab),
        unknown=vocab.get(unknown) if unknown is not None else None,
        fuse_unknown=bool(model.get("fuse_unk", False)),
        byte_fallback=bool(model.get("byte_fallback", False)),
        ignore_merges=bool(model.get("ignore_merges", False)),
        added=_added_tokens(document.get("added_tokens") or [], vocab),
        before=before,
        after=after,
        decoder=document.get("decoder"),
    )


def _merges(merges: Sequence[str | Sequence[str]], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = [_pair(merge) for merge in merges if not (isinstance(merge, str) and merge.startswith("#version"))]
    for left, right in pairs:
        for token in (left, right, left + right):
            if token not in vocab:
                raise CheckpointError(f"tokenizer.json: merges make or use {token!r}, which is not in the vocabulary")
    return pairs


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if len(pair) != 2 or not all(pair):
        raise CheckpointError(f"tokenizer.json: merge {merge!r} is not a pair of tokens")
    return pair[0], pair[1]


# --- text before byte-pair encoding


def _pattern(pattern: Mapping[str, str]) -> str:
    return pattern["Regex"] if "Regex" in pattern else literal_pattern(pattern["String"])


def _normalizers(part: Mapping[str, Any] | None) -> tuple[Normalizer, ...]:
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return tuple(step for each in part["normalizers"] for step in _normalizers(each))
    if part["type"] == "NFC":
        return (Nfc(),)
    if part["type"] == "Replace":
        return (Replace(_pattern(part["pattern"]), part["content"]),)
    if part["type"] == "Prepend":
        return (Prefix(part["prepend"], unless=""),)
    raise unsupported(f"normalizer {part['type']}")


def _flat(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part["pretokenizers"] for step in _flat(each)]


def _pre_tokenizer(
    part: Mapping[str, Any] | None,
) -> tuple[tuple[Replace | Prefix, ...], tuple[Split, ...], bool]:
    steps = _flat(part)
    kinds = [step["type"] for step in steps]
    transforms: list[Replace | Prefix] = []
    splits: list[Split] = []
    for i, step in enumerate(steps):
        if step["type"] == "Split":
            splits.append(_split(step))
        elif step["type"] == "Digits":
            individual = step.get("individual_digits", False)
            splits.append(Split(r"\p{numeric}", "Isolated" if individual else "Contiguous"))
        elif step["type"] == "ByteLevel":
            if i + 1 < len(steps):
                raise unsupported(f"pre_tokenizer ByteLevel before {kinds[i + 1]}")
            if step.get("add_prefix_space", True):
                transforms.append(Prefix(" ", unless=" "))
            if step.get("use_regex", True):
                splits.append(Split(BYTE_LEVEL_PATTERN))
        elif step["type"] == "Metaspace":
            transforms += _metaspace(step)
            if step.get("split", True):
                splits.append(Split(literal_pattern(step["replacement"]), "MergedWithNext"))
        else:
            raise unsupported(f"pre_tokenizer {step['type']}")
        if transforms and i > 0:
            raise unsupported(f"pre_tokenizer {step['type']} that changes text after {kinds[i - 1]}")
    return tuple(transforms), tuple(splits), "ByteLevel" in kinds


def _split(step: Mapping[str, Any]) -> Split:
    if step["behavior"] not in BEHAVIORS:
        raise unsupported(f"pre_tokenizer Split with behavior {step['behavior']}")
    return Split(_pattern(step["pattern"]), step["behavior"], bool(step.get("invert", False)))


def _metaspace(step: Mapping[str, Any]) -> list[Replace | Prefix]:
    sign = step["replacement"]
    scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
    if scheme not in ("always", "first", "never"):
        raise unsupported(f"pre_tokenizer Metaspace with prepend_scheme {scheme}")
    prefix = [] if scheme == "never" else [Prefix(sign, unless=sign, first_only=scheme == "first")]
    return [Replace(" ", sign), *prefix]


# --- the rest


def _refuse_other_parts(document: Mapping[str, Any]) -> None:
    for part in ("truncation", "padding"):
        if document.get(part) is not None:
            raise unsupported(f"{part} set")
    known = {"version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"}
    if other := sorted(document.keys() - known - {"truncation", "padding"}):
        raise unsupported(f"unknown part {other[0]!r}")


def _special_tokens(processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if processor is None or processor["type"] == "ByteLevel":
        return (), ()
    if processor["type"] == "Sequence":
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        for step in processor["processors"]:
            left, right = _special_tokens(step)
            before, after = left + before, after + right
        return before, after
    if processor["type"] == "TemplateProcessing":
        return _around(processor)
    raise unsupported(f"post_processor {processor['type']}")


def _around(processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pieces = processor["single"]
    places = [i for i, piece in enumerate(pieces) if "Sequence" in piece]
    if len(places) != 1:
        raise unsupported(f"post_processor TemplateProcessing with {len(places)} texts in `single`")
    ids = [
        tuple(i for piece in some for i in processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
        for some in (pieces[: places[0]], pieces[places[0] + 1 :])
    ]
    return ids[0], ids[1]


def _refuse_model_features(model: Mapping[str, Any], *, byte_level: bool) -> None:
    if model.get("type", "BPE") != "BPE":
        raise unsupported(f"model {model['type']}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise unsupported(f"model.{option} {model[option]!r}")
    known = {"type", "vocab", "merges", "unk_token", "fuse_unk", "dropout", "byte_fallback", "ignore_merges"}
    if other := sorted(model.keys() - known - {"continuing_subword_prefix", "end_of_word_suffix"}):
        raise unsupported(f"model.{other[0]}")
    vocab = model["vocab"]
    if len(set(vocab.values())) != len(vocab):
        raise unsupported("two tokens with one id in model.vocab")
    if model.get("unk_token") is not None and model["unk_token"] not in vocab:
        raise unsupported(f"model.unk_token {model['unk_token']!r}, which is not in the vocabulary")
    if model.get("byte_fallback"):
        _refuse_fallback(vocab, byte_level=byte_level)


def _refuse_fallback(vocab: Mapping[str, int], *, byte_level: bool) -> None:
    if byte_level:
        raise unsupported("model.byte_fallback beside ByteLevel")
    for byte in range(256):
        if fallback_token(byte) not in vocab and not (byte < 0x80 and chr(byte) in vocab):
            raise unsupported(f"model.byte_fallback without {fallback_token(byte)}")


def fallback_token(byte: int) -> str:
    """The token of a byte where a tokenizer falls back to bytes.

    >>> fallback_token(0xE2)
    '<0xE2>'
    """
    return f"<0x{byte:02X}>"


def _added_tokens(entries: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]) -> tuple[AddedToken, ...]:
    tokens: list[AddedToken] = []
    following = len(vocab)  # the id that Hugging Face gives to the next token that the vocabulary lacks
    for entry in entries:
        content, index = entry["content"], entry["id"]
        if not content:
            raise unsupported("an added token without text")
        if index != vocab.get(content, following):
            raise unsupported(f"added token {content!r} with id {index}, which would become another")
        following += content not in vocab
        special = bool(entry.get("special", False))
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
        normalized = bool(entry.get("normalized", not special))
        tokens.append(AddedToken(content, index, normalized=normalized, special=special, **flags))
    return tuple(tokens)
