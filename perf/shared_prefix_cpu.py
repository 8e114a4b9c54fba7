"""What ``shared_prefix: exact`` saves on a CPU: the same requests with it and without, in one run.

A request is a number of texts that begin with the same tokens, as ids, so that the lengths are exactly those asked for.
Both artifacts are made from one manifest, differ in ``shared_prefix`` alone, and answer in turn on one thread. Before
anything is timed their scores must agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dagserve.checkpoint import open_checkpoint
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from demo.assets import Unreachable, demo_model
from perf.environment import describe_environment
from perf.report import Grid, timed, write_result

RESULT = Path(__file__).parent / "results" / "shared_prefix_cpu.json"
AGREE = 1e-4
SIDES = ("off", "exact")

MANIFEST = """
apiVersion: dagserve/v1
name: shared-prefix
bounds: {batch: 32, tokens: 4096, length: 512, labels: 2}
variables: {model: {}}
inputs:
  tokens: {type: "i64[tokens]"}
  cu_seqlens: {type: "i32[batch+1]"}
  label_ids: {type: "i64[labels]"}
nodes:
SHARE
  score:
    engine: aoti
    op: dagserve.nodes.prefill:Score
    with: {checkpoint: "${model}", reduce: softmax, shared_prefix: SIDE}
    inputs: {tokens: SOURCEtokens, cu_seqlens: SOURCEcu_seqlens, label_ids: label_ids}
    outputs: {scores: "f32[batch,labels]"}
  encode:
    engine: cpu
    op: encode_tensors
    with: {tensors: {scores: "f32[batch,labels]"}}
    inputs: {scores: score.scores}
    outputs: {body: "u8[body_bytes]"}
outputs: {response: encode.body}
targets: {cpu: {precision: fp32}}
"""

SHARE = """
  share:
    engine: cpu
    op: share_prefix
    inputs: {tokens: tokens, cu_seqlens: cu_seqlens}
    outputs: {tokens: "i64[left_tokens]", cu_seqlens: "i32[batch+2]"}
"""


def compiled(folder: Path, side: str, model: str) -> Path:
    """The artifact of one side."""
    shared = side == "exact"
    text = MANIFEST.replace("SHARE", SHARE if shared else "").replace("SOURCE", "share." if shared else "")
    (folder / f"{side}.yaml").write_text(text.replace("SIDE", side))
    return compile_manifest(folder / f"{side}.yaml", {"model": model}, output=folder / side).artifact


def make_request(texts: int, length: int, shared: int, vocabulary: int) -> dict[str, Any]:
    """Random texts of ``length`` tokens, of which the first ``shared`` are the same; the next one differs."""
    source = np.random.default_rng(0)
    rows = source.integers(0, vocabulary, (texts, length))
    rows[:, :shared] = rows[0, :shared]
    rows[:, shared] = np.arange(texts)
    ends = length * np.arange(texts + 1)
    return {"tokens": rows.flatten().tolist(), "cu_seqlens": ends.tolist(), "label_ids": [1, 2]}


def scores(engine: Engine, request: dict[str, Any]) -> Any:
    """``f32[texts, 2]``."""
    return engine.trace(request)["score.scores"]


def measure(engines: dict[str, Engine], request: dict[str, Any], shared: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each side, and their ratio."""
    found = [scores(engines[side], request) for side in SIDES]
    difference = float(np.abs(found[0] - found[1]).max())
    if difference > AGREE:
        raise SystemExit(f"perf: scores differ by {difference:.2g}, over {AGREE}")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            engine = engines[side]
            seconds[side].append(timed(lambda engine=engine: engine.run(request))[1])  # type: ignore[misc]
    medians = {side: 1000 * statistics.median(values) for side, values in seconds.items()}
    return {"shared": shared, "difference": difference, "ms": medians, "ratio": medians["off"] / medians["exact"]}


def grid(rows: Sequence[dict[str, Any]], texts: int, length: int) -> Grid:
    """The table of a result."""
    cells = tuple(
        (
            str(row["shared"]),
            f"{row['ms']['off']:.0f}",
            f"{row['ms']['exact']:.0f}",
            f"{row['ratio']:.2f}",
            f"{texts * length / (texts * length - (texts - 1) * row['shared']):.2f}",
            f"{row['difference']:.1e}",
        )
        for row in rows
    )
    title = f"{texts} texts of {length} tokens: median ms a request, one thread"
    return Grid(title, ("shared tokens", "off", "exact", "times", "tokens saved, times", "largest difference"), cells)


def main(given: Sequence[str] | None = None) -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(prog="python -m perf.shared_prefix_cpu", description=__doc__)
    parser.add_argument("--texts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=107, help="of each text")
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 20, 40, 80], help="of them, the same in all texts")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="a checkpoint; the demo's when left out")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    try:
        model = arguments.model or str(demo_model())
    except Unreachable as error:
        raise SystemExit(f"perf: {error}") from error
    vocabulary = int(open_checkpoint(Path(model)).config["vocab_size"])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = {side: compiled(Path(folder), side, model) for side in SIDES}
        result: dict[str, Any] = {
            "environment": describe_environment("perf.shared_prefix_cpu", sys.argv[1:] if given is None else given)
        }
        engines = {side: stack.enter_context(Engine.load(path)) for side, path in made.items()}
        result["rows"] = [
            measure(engines, make_request(arguments.texts, arguments.tokens, n, vocabulary), n, arguments.rounds)
            for n in arguments.shared
        ]
    table = grid(result["rows"], arguments.texts, arguments.tokens)
    write_result("A shared prefix on a CPU", result, [table], arguments.json)


if __name__ == "__main__":
    main()
