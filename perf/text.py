"""Texts to tokens: the native tokenizer beside Hugging Face ``tokenizers`` and, where installed, tiktoken and quicktok.

Every side encodes the same texts of the Qwen3 vocabulary and its ids are compared before anything is timed.
Sides take turns, and the fastest repetition of each counts. With turns of one call each side finds the caches as
another left them, as a request does after a model has run; in longer turns it finds its own tables there, as in a bulk
job. The native side is called as in the server: a batch of texts a call, the interpreter's lock released; its figure
includes turning Python strings into UTF-8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tokenizers

from dagserve._native import CpuNode
from dagserve.tokenizer import parse_tokenizer, write_tables
from dagserve.tokenizer.vocabulary import byte_alphabet
from demo.assets import Unreachable, chinese_reviews, demo_reviews
from demo.vocabularies import vocabulary
from perf.environment import describe_environment
from perf.report import Grid, write_result

RESULT = Path(__file__).parent / "results" / "text.json"
SIZES = (20, 100, 400, 2000)
BATCH_BYTES = 200_000
TURN_S = 0.05
"""Of the longer turns."""
Encode = Callable[[Sequence[str]], list[list[int]]]


def corpora() -> dict[str, str]:
    """One long text of each class."""
    stdlib = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    english = "\n".join(review.text for review in demo_reviews())
    chinese = "\n".join(chinese_reviews())
    code = "\n".join(path.read_text(errors="ignore") for path in stdlib)
    lines = zip(english.splitlines(), chinese.splitlines(), code.splitlines(), strict=False)
    return {
        "English": english,
        "Chinese": chinese,
        "code": code,
        "mixed": "\n".join(" ".join(three) for three in lines),
    }


def cut(text: str, size: int) -> list[str]:
    """Texts of about ``size`` bytes, :data:`BATCH_BYTES` in all, cut between characters."""
    encoded = text.encode()[:BATCH_BYTES]
    return [encoded[i : i + size].decode(errors="ignore") or " " for i in range(0, len(encoded) - size, size)]


class Native:
    """The tokenize node over a template that is just the text."""

    def __init__(self, tokenizer_json: bytes, folder: Path) -> None:
        write_tables(tokenizer_json, folder / "tokenizer.bin")
        rows, most = BATCH_BYTES // min(SIZES) + 1, 2 * BATCH_BYTES
        self.node = CpuNode(
            "tokenize",
            {"tables": "tokenizer.bin", "template": [{"field": "text"}], "special_tokens": 0},
            [("text", "text", [rows], most)],
            [("tokens", "i64", [most], 8 * most), ("cu_seqlens", "i32", [rows + 1], 4 * (rows + 1))],
            str(folder),
        )

    def run(self, texts: Sequence[str]) -> Any:
        """One call for all texts."""
        return self.node.run({"text": texts})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The same as lists."""
        outputs = self.run(texts)
        ends, tokens = outputs["cu_seqlens"].tolist(), outputs["tokens"].tolist()
        return [tokens[a:b] for a, b in pairwise(ends)]


def sides(tokenizer_json: bytes, native: Native) -> dict[str, tuple[Callable[[Sequence[str]], Any], Encode]]:
    """What to time and how to get ids, by name. Sides that are not installed are left out."""
    plain = tokenizers.Tokenizer.from_str(json.dumps(json.loads(tokenizer_json) | {"added_tokens": []}))

    def single(texts: Sequence[str]) -> list[list[int]]:
        return [plain.encode(text, add_special_tokens=False).ids for text in texts]

    def batch(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    found: dict[str, tuple[Callable[[Sequence[str]], Any], Encode]] = {
        "dagserve": (native.run, native.encode),
        "tokenizers, single": (single, single),
        "tokenizers, batch": (batch, batch),
    }
    for name, encode in (("tiktoken", _tiktoken(tokenizer_json)), ("quicktok", _quicktok())):
        if encode:
            found[name] = encode
    return found


def _tiktoken(tokenizer_json: bytes) -> tuple[Callable[[Sequence[str]], Any], Encode] | None:
    try:
        import tiktoken
    except ImportError:
        return None
    spec = parse_tokenizer(tokenizer_json)
    if len(spec.splits) != 1:
        return None
    alphabet = {c: byte for byte, c in enumerate(byte_alphabet())}
    ranks = {bytes(alphabet[c] for c in token): index for token, index in spec.vocab.items()}
    encoding = tiktoken.Encoding("qwen3", pat_str=spec.splits[0].pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.encode_ordinary(text) for text in texts]

    return encode, encode


def _quicktok() -> tuple[Callable[[Sequence[str]], Any], Encode] | None:
    try:
        import quicktok
    except ImportError:
        return None
    encoding = quicktok.get_encoding("qwen3")

    def run(texts: Sequence[str]) -> Any:
        return encoding.encode_batch(list(texts), threads=1)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        tokens, offsets = run(texts)
        return [tokens[a:b].tolist() for a, b in pairwise(offsets)]

    return run, encode


def fastest(runs: Mapping[str, Callable[[], Any]], rounds: int, turn_s: float = 0.0) -> dict[str, float]:
    """Seconds of the fastest repetition of each. A turn is one repetition, or as many as begin within ``turn_s``."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            begin = start = time.perf_counter()
            while start <= begin + turn_s:
                run()
                now = time.perf_counter()
                best[name], start = min(best[name], now - start), now
    return best


def measure(texts: Sequence[str], known: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """MB/s of every side in short and long turns, and which sides gave other ids."""
    expected = known["tokenizers, single"][1](texts)
    other = [name for name, (_, encode) in known.items() if encode(texts) != expected]
    size = sum(len(text.encode()) for text in texts)
    runs = {name: partial(run, texts) for name, (run, _) in known.items()}
    best, warm = fastest(runs, rounds), fastest(runs, rounds, TURN_S)
    figures = {n: {"mb_s": size / best[n] / 1e6, "warm_mb_s": size / warm[n] / 1e6} for n in runs}
    return {"texts": len(texts), "bytes": size, "tokens": sum(map(len, expected)), "other_ids": other, "sides": figures}


def measure_cores(texts: Sequence[str], native: Native, rounds: int) -> dict[str, float]:
    """MB/s of the native side on one thread and on one thread a core."""
    size, cores = sum(len(text.encode()) for text in texts), len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        runs = {
            "one": lambda: native.run(texts),
            "all": lambda: list(pool.map(native.run, [texts] * cores)),
        }
        best = fastest(runs, rounds)
    return {"one": size / best["one"] / 1e6, "all": cores * size / best["all"] / 1e6}


def measure_request(text: str, known: Mapping[str, Any], native: Native, rounds: int) -> dict[str, Any]:
    """Microseconds for one request: 15 texts of about 100 tokens."""
    size = len(text.encode()[:100_000]) / sum(
        map(len, native.encode([text.encode()[:100_000].decode(errors="ignore")]))
    )
    texts = cut(text, int(100 * size))[:15]
    best = fastest({n: partial(run, texts) for n, (run, _) in known.items()}, 20 * rounds)
    tokens = [len(ids) for ids in native.encode(texts)]
    return {"mean_tokens": statistics.fmean(tokens), "us": {name: s * 1e6 for name, s in best.items()}}


def measure_beams(native: Native, folder: Path, document: bytes, rounds: int) -> dict[str, float]:
    """Microseconds to decode 100 sequences of 5 tokens and write them as JSON, beside the library and orjson."""
    plain = tokenizers.Tokenizer.from_str(document.decode())
    sequences, steps, random = 100, 5, np.random.default_rng(1)
    ids = random.choice(np.concatenate([native.encode([t])[0] for t in cut(corpora()["English"], 2000)]), (1, 100, 5))
    shapes = {"tokens": ids, "lengths": np.full((1, sequences), steps, dtype=np.int32)}
    shapes |= {"scores": random.standard_normal((1, sequences)).astype(np.float32)}
    shapes |= {"counts": np.array([sequences], dtype=np.int32), "cu_seqlens": np.array([0, 50], dtype=np.int32)}
    names = {"int64": "i64", "int32": "i32", "float32": "f32"}
    ports = [(n, names[str(v.dtype)], list(v.shape), v.nbytes) for n, v in shapes.items()]
    config = {"tables": "tokenizer.bin", "style": "results", "model": "m"}
    node = CpuNode("encode_sequences", config, ports, [("body", "u8", [1 << 16], 1 << 16)], str(folder))

    def library() -> bytes:
        texts = plain.decode_batch(ids[0].tolist())
        scored = zip(texts, shapes["scores"][0].tolist(), strict=True)
        return orjson.dumps({"results": [{"text": text, "score": score} for text, score in scored]})

    theirs = [s["text"] for s in orjson.loads(library())["results"]]
    ours = [s["text"] for s in orjson.loads(bytes(node.run(shapes)["body"]))["results"][0]["sequences"]]
    assert ours == theirs
    best = fastest({"dagserve": lambda: node.run(shapes), "tokenizers and orjson": library}, 40 * rounds)
    return {name: s * 1e6 for name, s in best.items()}


def grids(result: Mapping[str, Any]) -> list[Grid]:
    """The tables of a result."""
    names = list(result["classes"][0]["sides"])
    title = "MB/s on one thread (tokenizers, batch: all), {}; * other ids than Hugging Face's"
    columns = ("texts", *names, "dagserve us a text", "times single")
    turns = {
        "mb_s": "turns of one call: caches hold what another side left",
        "warm_mb_s": f"turns of {TURN_S * 1000:.0f} ms: caches hold a side's own",
    }
    speeds = [
        Grid(title.format(turns[f]), columns, tuple(_speed(c, names, f) for c in result["classes"])) for f in turns
    ]
    cores = tuple((name, f"{c['one']:.1f}", f"{c['all']:.1f}") for name, c in result["cores"].items())
    requests = tuple(
        (f"{name}, {r['mean_tokens']:.0f} tokens a text", *(f"{r['us'][n]:.0f}" for n in names))
        for name, r in result["requests"].items()
    )
    return [
        *speeds,
        Grid("dagserve, 400-byte texts: MB/s", ("class", "one thread", "a thread a core"), cores),
        Grid("One request of 15 texts: microseconds", ("class", *names), requests),
        Grid(
            "100 sequences of 5 tokens to JSON: microseconds",
            tuple(result["beams"]),
            (tuple(f"{us:.0f}" for us in result["beams"].values()),),
        ),
    ]


def _speed(measured: Mapping[str, Any], names: Sequence[str], figure: str) -> tuple[str, ...]:
    """A row for one class and size."""
    mb_s = {name: measured["sides"][name][figure] for name in names}
    cells = (f"{mb_s[name]:.1f}" + ("*" if name in measured["other_ids"] else "") for name in names)
    us = measured["bytes"] / measured["texts"] / mb_s["dagserve"]
    times = mb_s["dagserve"] / mb_s["tokenizers, single"]
    return f"{measured['class']}, {measured['size']} bytes", *cells, f"{us:.2f}", f"{times:.1f}"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(prog="python -m perf.text", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a byte-level tokenizer.json [Qwen3's]")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions [15]")
    parser.add_argument("--json", type=Path, default=RESULT, help="result; .md beside it [perf/results/text.json]")
    arguments = parser.parse_args()
    try:
        document = arguments.tokenizer.read_bytes() if arguments.tokenizer else vocabulary("qwen3")
        texts = corpora()
    except Unreachable as error:
        raise SystemExit(f"perf: {error}") from error
    result: dict[str, Any] = {"environment": describe_environment("perf.text", sys.argv[1:])}
    with tempfile.TemporaryDirectory() as folder:
        native = Native(document, Path(folder))
        known = sides(document, native)
        result["classes"] = [
            {"class": name, "size": size, **measure(cut(text, size), known, arguments.rounds)}
            for name, text in texts.items()
            for size in SIZES
        ]
        result["cores"] = {n: measure_cores(cut(t, 400), native, arguments.rounds) for n, t in texts.items()}
        result["beams"] = measure_beams(native, Path(folder), document, arguments.rounds)
        result["requests"] = {n: measure_request(t, known, native, arguments.rounds) for n, t in texts.items()}
    write_result("Tokenizing", result, grids(result), arguments.json)


if __name__ == "__main__":
    main()
