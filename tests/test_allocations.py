"""Our own code allocates nothing on the request path; what packages allocate is counted apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "malloc_count.c"

PROGRAM = """
import json, sys
from pathlib import Path
from dagserve.engine import Engine

items = ["a good film, 12 times", "日本語 " * 9] * 8
requests = [{"query": "q", "items": items, "apply_softmax": i % 2 == 0} for i in range(20)]
requests += [{"query": "q", "items": ["x"], "labels": [" positive"]}]
requests += [{"query": "q", "items": ["x"], "label_token_ids": [1]}]
with Engine.load(Path(sys.argv[1])) as engine:
    bodies = [json.dumps(request, ensure_ascii=i % 2 == 0).encode() for i, request in enumerate(requests)]
    engine.run(requests[0])
    engine.run_body(bodies[0])
    before = engine.stats()
    for request in requests:
        engine.run(request)
    for body in bodies:
        engine.run_body(body)
    after = engine.stats()
result = {n: after["nodes"][n]["allocations"] - before["nodes"][n]["allocations"] for n in after["nodes"]}
result["between"] = after["allocations_between_nodes"] - before["allocations_between_nodes"]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("counter") / "libmalloc_count.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


def test_the_request_path_allocates_nothing_of_its_own(counter: Path, relevance_artifact: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(counter)}
    command = [sys.executable, "-c", PROGRAM, str(relevance_artifact)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    packages = counts.pop("score")
    assert counts == {"tokenize": 0, "resolve_labels": 0, "encode": 0, "between": 0}
    assert packages > 0, "packages allocate their outputs, so a count of none means that nothing was counted"
