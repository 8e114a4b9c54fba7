"""CPU nodes of a user's own: the worked example in C++ and Python, and what happens when one is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import MANIFEST
from test_cli import dagserve, served

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import ArtifactError, BuildError, InvalidRequest, RequestError
from dagserve.runtime import ReferenceRuntime

EXAMPLE = MANIFEST.parent.parent / "examples" / "own_nodes"
REQUEST = {"query": "red wool coat", "items": ["a RED coat", "blue shoes", "Red wool  coat, new"]}
REPLY = {"share": [0.6666667, 0, 0.6666667], "order": [0, 2, 1]}


def build(folder: Path, *flags: str, source: str = "overlap.cc") -> Path:
    """The example's library, built as its Makefile does."""
    include = EXAMPLE.parent.parent / "dagserve" / "include"
    library = folder / "liboverlap.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([*command, f"-I{include}", *flags, str(folder / source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    for name in ("overlap.cc", "own_nodes.py", "manifest.yaml"):
        shutil.copy(EXAMPLE / name, folder)
    build(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("own_nodes", None)
    os.environ.pop("PYTHONPATH")


@pytest.fixture(scope="module")
def artifact(example: Path, build_cache: BuildCache) -> Path:
    return compile_manifest(example / "manifest.yaml", output=example / "artifact", cache=build_cache).artifact


def outputs(body: bytes) -> dict[str, object]:
    return {o["name"]: o["data"] for o in json.loads(body)["outputs"]}


def test_the_example_from_the_command_line_and_over_http(example: Path, artifact: Path) -> None:
    checked = dagserve("check", example / "manifest.yaml")
    assert (checked.returncode, b"node `rank` runs in Python" in checked.stderr) == (0, True)
    (example / "request.json").write_text(json.dumps(REQUEST))
    run = dagserve("run", artifact, "-i", example / "request.json")
    assert outputs(run.stdout) == REPLY
    assert dagserve("run", artifact, "-i", example / "request.json", "--reference").stdout == run.stdout
    with served(artifact) as (_, url):
        reply = httpx.post(f"{url}/v1/score", json=REQUEST, trust_env=False)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert reply.content + b"\n" == run.stdout
    assert 'dagserve_node_runs_total{engine="python",node="rank"} 2.0' in metrics  # one of the warm-up
    assert 'dagserve_node_runs_total{engine="cpu",node="overlap"} 2.0' in metrics


def test_a_nodes_own_refusal_is_the_requests_fault(artifact: Path) -> None:
    with Engine.load(artifact) as engine:
        for request, message, node in (
            ({"query": "", "items": ["a"]}, r"\[Overlap\] query is empty", "overlap"),
            ({"query": "a", "items": ["b"]}, r"\[Rank\] no item shares 10%", "rank"),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                engine.run(request)
            assert caught.value.node == node
        assert engine.stats()["counters"]["invalid"] == 2


def test_many_threads_share_both_kinds(artifact: Path) -> None:
    with Engine.load(artifact) as engine, ThreadPoolExecutor(16) as pool:
        replies = set(pool.map(lambda _: engine.run(REQUEST), range(400)))
    assert [outputs(body) for body in replies] == [REPLY]


def test_a_change_of_the_library_or_the_definition_is_compiled_again(
    example: Path, artifact: Path, build_cache: BuildCache
) -> None:
    def again() -> bool:
        return compile_manifest(example / "manifest.yaml", output=artifact, cache=build_cache).up_to_date

    assert again()
    build(example, "-DCHANGED", "-O2")
    assert not again()
    with (example / "own_nodes.py").open("a") as stream:
        stream.write("# changed\n")
    assert not again()
    assert again()


PROGRAMS: dict[str, tuple[str, str]] = {
    "another interface": ("DAGSERVE_NODE_ABI, 1, kNodes}", "DAGSERVE_NODE_ABI + 1, 1, kNodes}"),
    "no symbol": ("dagserve_nodes() { return", "other_name() { return"),
    "no such node": ('{"Overlap", create', '{"Other", create'),
    "refuses": ("config->input_count == 2", "config->input_count == 3"),
}
EXPECTED = {
    "another interface": "is built for node interface 2, this is 1; build it again",
    "no symbol": "exports no dagserve_nodes",
    "no such node": "no CPU node is called 'Overlap' in ",
    "refuses": "node overlap: Overlap has the inputs query and items",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_library_that_cannot_be_used_says_why(kind: str, artifact: Path, tmp_path: Path) -> None:
    old, new = PROGRAMS[kind]
    source = (EXAMPLE / "overlap.cc").read_text()
    assert old in source
    text = source.replace(old, new).replace("const dagserve_library* other", "extern const dagserve_library* other")
    (tmp_path / "overlap.cc").write_text(text)
    copy = tmp_path / "artifact"
    shutil.copytree(artifact, copy)
    library = build(tmp_path, "-Wno-unused")
    shutil.copy(library, copy / "nodes" / "liboverlap.so")
    plan = json.loads((copy / "plan.json").read_text())
    plan["files"]["nodes/liboverlap.so"] = library.stat().st_size
    (copy / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ArtifactError, match=EXPECTED[kind]):
        Engine.load(copy)


def test_a_missing_library_is_a_build_error(example: Path, build_cache: BuildCache) -> None:
    library = example / "liboverlap.so"
    library.rename(example / "away.so")
    try:
        with pytest.raises(BuildError, match=r"node `overlap`: its library .*liboverlap\.so is not there; build it"):
            compile_manifest(example / "manifest.yaml", output=example / "none", cache=build_cache)
    finally:
        (example / "away.so").rename(library)


NODE = """
import threading, time
import numpy as np
from dagserve.errors import InvalidRequest
from dagserve.interface import Interface, Port

started = threading.Event()

class Odd:
    engine = "cpu"
    options = ()

    @staticmethod
    def interface(options, bounds):
        return Interface((Port.of("items", "text[B]"),), (Port.of("n", "i32[B]"), Port.of("t", "text[B]")))

    def __init__(self, config, root):
        pass

    def run(self, inputs):
        started.set()
        n, t = np.array([len(x) for x in inputs["items"]], dtype=np.int32), [x[::-1] for x in inputs["items"]]
        match inputs["items"][0]:
            case "raise": raise ZeroDivisionError("odd")
            case "dtype": n = n.astype(np.int64)
            case "rank": n = n[None]
            case "large": n = np.zeros(1000, dtype=np.int32)
            case "rows": n = np.zeros(7, dtype=np.int32)
            case "list": n = list(map(int, n))
            case "text": t = 5
            case "long": t = ["x" * 100000] * len(t)
            case "missing": return {"n": n}
            case "none": return None
            case "slow": time.sleep(0.5)
            case "stuck": time.sleep(600)
        return {"n": n, "t": t}
"""
ODD_MANIFEST = """
apiVersion: dagserve/v1
name: odd
bounds: {batch: 8}
inputs:
  items: {type: "text[batch]"}
nodes:
  odd:
    engine: cpu
    op: odd_node:Odd
    inputs: {items: items}
    outputs: {n: "i32[batch]", t: "text[batch]"}
  again:
    engine: cpu
    op: odd_node:Odd
    inputs: {items: odd.t}
    outputs: {n: "i32[batch]", t: "text[batch]"}
  encode:
    engine: cpu
    op: encode_tensors
    with: {tensors: {first: "i32[batch]", second: "i32[batch]"}}
    inputs: {first: odd.n, second: again.n}
    outputs: {body: "u8[bytes]"}
outputs: {response: encode.body}
targets: {cpu: {concurrency: {contexts: 2}}}
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, build_cache: BuildCache) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_node.py").write_text(NODE)
    (folder / "odd.yaml").write_text(ODD_MANIFEST)
    sys.path.insert(0, str(folder))
    yield compile_manifest(folder / "odd.yaml", output=folder / "artifact", cache=build_cache).artifact
    sys.path.remove(str(folder))


WRONG = {
    "raise": "ZeroDivisionError: odd",
    "dtype": "n must be an array of type i32 and rank 1",
    "rank": "n must be an array of type i32 and rank 1",
    "large": "n has 4000 bytes; it must have at most 32",
    "rows": "has batch = 7, but items has 1",
    "list": "n must be a numpy array of type i32",
    "text": "t must be a list",
    "long": "t has more than",
    "missing": "returned no output t",
    "none": "",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_python_node_that_is_wrong_fails_its_request_alone(what: str, odd: Path) -> None:
    with Engine.load(odd) as engine:
        with pytest.raises(RequestError) as caught:
            engine.run({"items": [what]})
        assert caught.value.node == "odd"
        assert WRONG[what] in str(caught.value)
        assert outputs(engine.run({"items": ["ab", "日本語"]})) == {"first": [2, 3], "second": [2, 3]}


def test_text_reaches_python_and_comes_back(odd: Path) -> None:
    items = ["", "\x00", "😀é", "\udc80"]
    with Engine.load(odd) as engine:
        assert outputs(engine.run({"items": items})) == {"first": [0, 1, 2, 1], "second": [0, 1, 2, 1]}
        traced = engine.trace({"items": items})
    assert traced["odd.t"][2] == "é😀".encode()
    assert ReferenceRuntime(odd).trace({"items": items})["odd.t"] == [t[::-1] for t in items]


@pytest.mark.parametrize("end", [lambda e: e.close(), lambda _: None], ids=["closed", "dropped"])
def test_an_engine_ends_while_python_runs(end: Callable[[Engine], None], odd: Path) -> None:
    """Neither waits for the other's lock."""
    import odd_node  # type: ignore[import-not-found]

    engine = Engine.load(odd)
    odd_node.started.clear()
    thread = threading.Thread(target=engine.run, args=({"items": ["slow"]},))
    thread.start()
    assert odd_node.started.wait(5)
    end(engine)
    del engine
    thread.join(10)
    assert not thread.is_alive()


def test_a_second_signal_ends_the_process_at_once(
    odd: Path, build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose node does not return keeps the first signal waiting, and not the second."""
    manifest = odd.parent / "served.yaml"
    manifest.write_text(ODD_MANIFEST.replace("items: {type", "texts: {type").replace("items: items", "items: texts"))
    with manifest.open("a") as more:
        more.write("endpoint: embeddings\n")
    artifact = compile_manifest(manifest, output=odd.parent / "served", cache=build_cache).artifact
    monkeypatch.setenv("PYTHONPATH", str(odd.parent))
    ends: list[str] = []
    with served(artifact) as (process, url):

        def send() -> None:
            try:
                reply = httpx.post(f"{url}/v1/embeddings", json={"input": ["stuck"]}, timeout=60, trust_env=False)
                ends.append(str(reply.status_code))
            except httpx.TransportError:
                ends.append("cut")

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        while "dagserve_requests_admitted_total 3.0" not in httpx.get(f"{url}/metrics", trust_env=False).text:
            pass  # two, and one of the warm-up
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/ready", trust_env=False).status_code != 503:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        for thread in threads:
            thread.join()
    assert ends == ["cut"] * 2


def test_requests_beside_the_event_loop(artifact: Path) -> None:
    async def many(engine: Engine) -> list[bytes]:
        return await asyncio.gather(*(engine.submit(REQUEST) for _ in range(8)))

    with Engine.load(artifact) as engine:
        assert [outputs(body) for body in asyncio.run(many(engine))] == [REPLY] * 8


def test_a_module_that_is_not_there_says_what_to_do(odd: Path) -> None:
    command = [sys.executable, "-m", "dagserve.cli", "run", str(odd), "-i", "-"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, input=b'{"items":["a"]}', capture_output=True)
    assert done.returncode == 1
    assert b"node odd: [odd_node:Odd] cannot import odd_node" in done.stderr
    assert b"set PYTHONPATH" in done.stderr
