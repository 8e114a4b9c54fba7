"""Mutated manifests: nothing but ManifestError, and every diagnostic lies inside the file."""

import random
import warnings
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagserve.errors import ManifestError
from dagserve.manifest import load_manifest, print_manifest
from dagserve.manifest.builder import freeze
from dagserve.passes import check_manifest

TEXT = (Path(__file__).parent.parent / "manifests" / "relevance.yaml").read_text()
PIECES = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "-",
    "\n",
    "  ",
    "\t",
    '"',
    "'",
    "#",
    "|",
    ">",
    "*a",
    "&a ",
    "!!int ",
    "${model}",
    "${",
    "null",
    "0",
    "-1",
    "99999999999",
    "1e400",
    "true",
    "text",
    "i64[tokens]",
    "f32[batch+1]",
    "tokens",
    "tokenize",
    "tokenize.tokens",
    "score.scores",
    "query",
    "cpu",
    "aoti",
    "with",
    "inputs",
    "outputs",
    "\u2028",
    "\x85",
    "\U0001d11e",
    "\0",
    "%YAML 1.1\n",
    "---\n",
    "? ",
]
WORDS = sorted({word for line in TEXT.splitlines() for word in line.replace(",", " ").split()})

MUTATION = st.tuples(
    st.sampled_from(["insert", "delete", "replace", "swap", "line"]), st.integers(0, 10**6), st.integers(0, 10**6)
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutate(text: str, kind: str, place: int, choice: int) -> str:
    at = place % (len(text) + 1)
    piece = (PIECES + WORDS)[choice % (len(PIECES) + len(WORDS))]
    if kind == "insert":
        return text[:at] + piece + text[at:]
    if kind == "delete":
        return text[:at] + text[at + 1 + choice % 12 :]
    if kind == "replace":
        return text[:at] + piece + text[at + len(piece) :]
    lines = text.split("\n")
    first, second = place % len(lines), choice % len(lines)
    if kind == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first] = lines[second]
    return "\n".join(lines)


def check_text(path: Path, text: str) -> None:
    path.write_text(text, newline="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            check_manifest(path, environment={})
            return
        except ManifestError as error:
            diagnostics = error.diagnostics
    assert diagnostics
    lines = text.removeprefix("\ufeff").split("\n")
    for d in diagnostics:
        assert 1 <= d.line <= len(lines), d
        assert 1 <= d.column <= len(lines[d.line - 1]) + 1, d
        assert d.message
        assert f"{d.message}{d.fix}".isprintable()


@SETTINGS
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_mutations_of_the_text(tmp_path: Path, mutations: list[tuple[str, int, int]]) -> None:
    text = TEXT
    for mutation in mutations:
        text = mutate(text, *mutation)
    check_text(tmp_path / "m.yaml", text)


@SETTINGS
@given(word=st.sampled_from(WORDS), other=st.sampled_from(WORDS + PIECES), seed=st.integers(0, 99))
def test_words_put_in_place_of_others(tmp_path: Path, word: str, other: str, seed: int) -> None:
    places = [i for i in range(len(TEXT)) if TEXT.startswith(word, i)]
    at = random.Random(seed).choice(places)
    check_text(tmp_path / "m.yaml", TEXT[:at] + other + TEXT[at + len(word) :])


@SETTINGS
@given(text=st.text(max_size=60))
def test_any_text(tmp_path: Path, text: str) -> None:
    check_text(tmp_path / "m.yaml", text)


SCALAR = st.one_of(
    st.text(max_size=20), st.integers(-(10**6), 10**6), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
)


@SETTINGS
@given(options=st.dictionaries(st.text(max_size=8), VALUE, max_size=3), bound=st.integers(1, 2**31 - 1))
def test_printed_form_round_trips(tmp_path: Path, options: dict[str, object], bound: int) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT.replace("tokens: 4096", f"tokens: {bound}"))
    manifest = load_manifest(path, environment={})
    node = replace(manifest.nodes["score"], options=freeze(options))
    manifest = replace(manifest, nodes=MappingProxyType({**manifest.nodes, "score": node}))
    path.write_text(print_manifest(manifest), newline="")
    assert load_manifest(path, environment={}) == manifest


@pytest.mark.parametrize("size", range(0, len(TEXT), 97))
def test_truncated_files(tmp_path: Path, size: int) -> None:
    check_text(tmp_path / "m.yaml", TEXT[:size])
