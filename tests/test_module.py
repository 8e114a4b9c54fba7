"""Torch modules of a user's own as nodes, and branches of a graph that run at once."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MANIFEST
from safetensors.torch import save_file
from torch import nn

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import BuildError, CheckpointError, InternalError, InvalidRequest, ManifestError
from dagserve.passes import check_manifest
from dagserve.runtime import ReferenceRuntime

EXAMPLE = MANIFEST.parent.parent / "examples" / "own_module"

MODULES = '''
import threading
from typing import ClassVar
import numpy as np
import torch
from torch import nn
from dagserve.interface import Interface, Port

class Lookup(nn.Module):
    """Rows of a table that is a buffer, times a factor."""
    def __init__(self, size, factor):
        super().__init__()
        self.register_buffer("table", torch.zeros(size, 4))
        self.factor = factor
    def forward(self, ids):
        return self.table[ids] * self.factor

class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1).transpose(0, 1)[:, :2] if self.training else x[:, ::2]

class Stiff(nn.Module):
    def forward(self, x):
        return x[:, :2].clone() if x.shape[0] == 3 else x[:, :2] * 1

class Pair(nn.Module):
    def forward(self, x):
        return x + 1, x.sum(dim=1)

class Half(nn.Module):
    def forward(self, x):
        return x[:, :2] * 1.0

class Add(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value
    def forward(self, x):
        return x + self.value

class Meet:
    """Gives what it gets, once another one runs at the same time."""
    barrier = threading.Barrier(2)
    engine: ClassVar[str] = "cpu"
    options: ClassVar[tuple] = ()
    @staticmethod
    def interface(options, bounds):
        return Interface((Port.of("x", "f32[B,2]"),), (Port.of("y", "f32[B,2]"),))
    def __init__(self, config, root):
        pass
    def run(self, inputs):
        self.barrier.wait(timeout=20)
        if inputs["x"].max() > 1000:
            raise ValueError("a smaller number is needed")
        return {"y": inputs["x"] + 0}

class Alone(Meet):
    def run(self, inputs):
        return {"y": inputs["x"] + 0}
'''


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "their_modules.py").write_text(MODULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    sys.modules.pop("their_modules", None)


def manifest(folder: Path, options: str, inputs: str, port: str, given: str, output: str) -> Path:
    """One module node between the request and ``encode_tensors``."""
    name, _, kind = output.partition(": ")
    text = f"""
    apiVersion: dagserve/v1
    name: own
    bounds: {{batch: 8, wide: 4}}
    inputs: {{{inputs}}}
    nodes:
      own:
        engine: aoti
        op: module
        with: {{{options}}}
        inputs: {{{port}: {given}}}
        outputs: {{{name}: "{kind}"}}
      encode:
        engine: cpu
        op: encode_tensors
        with: {{tensors: {{{name}: "{kind.replace("batch", "B")}"}}}}
        inputs: {{{name}: own.{name}}}
        outputs: {{body: "u8[bytes]"}}
    outputs: {{response: encode.body}}
    targets: {{cpu: {{concurrency: {{runners: 1, contexts: 1, in_flight: 2}}}}}}
    admission: {{max_queued: 4, max_wait_ms: 2000, deadline_ms: 10000}}
    """
    (folder / "m.yaml").write_text(
        textwrap.dedent(text).replace(", wide: 4", "" if "wide" not in inputs else ", wide: 4")
    )
    return folder / "m.yaml"


LOOKUP = 'module: "their_modules:Lookup", arguments: {size: 5, factor: 3}, weights: WEIGHTS, inputs: {ids: "i64[B]"}, '
LOOKUP += 'outputs: {rows: "f32[B,4]"}, ranges: {ids: [0, 4]}'


def lookup(folder: Path, options: str = LOOKUP) -> Path:
    ids = 'ids: {type: "i64[batch]"}'
    return manifest(
        folder, options.replace("WEIGHTS", str(folder / "w.safetensors")), ids, "ids", "ids", "rows: f32[batch,4]"
    )


def test_buffers_come_from_the_file_and_integers_are_checked(modules: Path, build_cache: BuildCache) -> None:
    table = torch.arange(20.0).reshape(5, 4)
    save_file({"table": table}, modules / "w.safetensors")
    made = compile_manifest(lookup(modules), output=modules / "a", cache=build_cache).artifact
    with Engine.load(made) as engine:
        reply = engine.run({"ids": [4, 0]})
        assert reply == ReferenceRuntime(made).run({"ids": [4, 0]})
        with pytest.raises(InvalidRequest, match=r"ids\[1\] is 5; it must be from 0 to 4"):
            engine.run({"ids": [0, 5]})
    assert json.loads(reply)["outputs"][0]["data"] == (table[[4, 0]] * 3).flatten().tolist()


def test_a_changed_module_is_built_again(modules: Path, build_cache: BuildCache) -> None:
    save_file({"table": torch.ones(5, 4)}, modules / "w.safetensors")
    path = lookup(modules)
    first = compile_manifest(path, output=modules / "a", cache=build_cache)
    assert compile_manifest(path, output=modules / "a", cache=build_cache).up_to_date
    (modules / "their_modules.py").write_text(MODULES.replace("* self.factor", "* self.factor + 1"))
    again = compile_manifest(path, output=modules / "a", cache=build_cache)
    assert not again.up_to_date
    with Engine.load(first.artifact) as engine:
        assert json.loads(engine.run({"ids": [1]}))["outputs"][0]["data"] == [4.0] * 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"table": torch.ones(4, 4)}, r"does not fit the module \(1 differences\):\n  wrong shape: table is \[4, 4\]"),
        ({"other": torch.ones(1)}, r"missing: table \[5, 4\]\n  unexpected: other \[1\]"),
        ({"table": torch.ones(5, 4, dtype=torch.int64)}, "a tensor of i64 cannot become the model's f32"),
    ],
)
def test_weights_that_do_not_fit(
    tensors: dict[str, torch.Tensor], message: str, modules: Path, build_cache: BuildCache
) -> None:
    save_file(tensors, modules / "w.safetensors")
    with pytest.raises(CheckpointError, match=message):
        compile_manifest(lookup(modules), output=modules / "a", cache=build_cache)


def test_parameters_without_a_file(modules: Path, build_cache: BuildCache) -> None:
    with pytest.raises(CheckpointError, match=r"missing: table \[5, 4\]\n  name the safetensors file"):
        compile_manifest(
            lookup(modules, LOOKUP.replace("weights: WEIGHTS, ", "")), output=modules / "a", cache=build_cache
        )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("their_modules:Lookup", "their_modulez:Lookup", "there is no module `their_modulez`; install it, or put"),
        ("their_modules:Lookup", "their_modules.Lookup", "`nodes.own.with.module` is `their_modules.Lookup`, which is"),
        (", ranges: {ids: [0, 4]}", "", "input `ids` is i64: say what it may hold, `ranges: {ids: [0, 9]}`"),
        ("ranges: {ids: [0, 4]}", "ranges: {ids: [4, 0]}", "ranges: `ids` goes from 4 to 0; write the lower one first"),
        (
            "ranges: {ids: [0, 4]}",
            "ranges: {ids: [0, 4], x: [0, 1]}",
            "ranges: `x` is no integer input; use one of ids",
        ),
        ('"f32[B,4]"', '"f32[B,K]"', "output `rows` has the size K, which no input has"),
        ('inputs: {ids: "i64[B]"}', 'inputs: {ids: "text[B]"}', "`ids` is text; a module takes and gives u8, bool"),
    ],
)
def test_a_wrong_declaration(old: str, new: str, message: str, modules: Path) -> None:
    assert old in LOOKUP
    with pytest.raises(ManifestError) as caught:
        check_manifest(lookup(modules, LOOKUP.replace(old, new)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("module", "outputs", "message"),
    [
        ("Half", "y: f32[batch,3]", r"y is torch.float32\[\d, 2\], declared as f32\[B,3\]; make them agree"),
        ("Half", "y: i32[batch,2]", r"y is torch.float32\[\d, 2\], declared as i32\[B,2\]"),
        ("Pair", "y: f32[batch,4]", "it gives 2 outputs; 1 are declared"),
        ("Stiff", "y: f32[batch,2]", "second.module: UserError: Constraints violated \\(B\\)"),
        ("Turned", "y: f32[batch,2]", r"y is not contiguous in memory; end forward with .clone\(memory_format="),
    ],
)
def test_a_module_that_gives_something_else(
    module: str, outputs: str, message: str, modules: Path, build_cache: BuildCache
) -> None:
    save_file({"table": torch.ones(5, 4)}, modules / "w.safetensors")
    name, _, kind = outputs.partition(": ")
    text = (
        lookup(modules)
        .read_text()
        .replace("  encode:", SECOND % (module, kind.replace("batch", "B"), name, kind) + "  encode:")
    )
    text = text.replace(
        'with: {tensors: {rows: "f32[B,4]"}}', f'with: {{tensors: {{y: "{kind.replace("batch", "B")}"}}}}'
    )
    text = text.replace("inputs: {rows: own.rows}", f"inputs: {{{name}: second.{name}}}")
    (modules / "m.yaml").write_text(text)
    with pytest.raises(BuildError, match=message):
        compile_manifest(modules / "m.yaml", output=modules / "a", cache=build_cache)


SECOND = """  second:
    engine: aoti
    op: module
    with: {module: "their_modules:%s", inputs: {x: "f32[B,4]"}, outputs: {y: "%s"}}
    inputs: {x: own.rows}
    outputs: {%s: "%s"}
"""


def test_the_example(
    tmp_path: Path, tiny_model: Path, build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("own_module.py", "manifest.yaml"):
        shutil.copy(EXAMPLE / file, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    from own_module import Rating  # type: ignore[import-not-found]

    torch.manual_seed(3)
    module: nn.Module = Rating(64).train()
    module(torch.randn(50, 64) * 3 + 1)  # moves the running statistics, which are buffers
    save_file(module.state_dict(), "rating.safetensors")
    made = compile_manifest(tmp_path / "manifest.yaml", {"model": str(tiny_model)}, cache=build_cache).artifact
    with Engine.load(made) as engine:
        values = engine.trace({"texts": ["a good film", "a"]})
    with torch.no_grad():
        probabilities, rating = module.eval()(torch.tensor(values["embed.embeddings"]))
    torch.testing.assert_close(torch.tensor(values["rate.probabilities"]), probabilities)
    torch.testing.assert_close(torch.tensor(values["rate.rating"]), rating)
    sys.modules.pop("own_module")


BRANCHES = """
apiVersion: dagserve/v1
name: branches
bounds: {batch: 4}
inputs: {ids: {type: "i64[batch]"}}
nodes:
  start:
    engine: aoti
    op: module
    with: {module: "their_modules:Half", inputs: {x: "f32[B,4]"}, outputs: {y: "f32[B,2]"}}
    inputs: {x: rows.rows}
    outputs: {y: "f32[batch,2]"}
  rows:
    engine: aoti
    op: module
    with: {LOOKUP}
    inputs: {ids: ids}
    outputs: {rows: "f32[batch,4]"}
  one:
    engine: aoti
    op: module
    with: {module: "their_modules:Add", arguments: {value: 1.0}, inputs: {x: "f32[B,2]"}, outputs: {y: "f32[B,2]"}}
    inputs: {x: start.y}
    outputs: {y: "f32[batch,2]"}
  two:
    engine: aoti
    op: module
    with: {module: "their_modules:Add", arguments: {value: 2.0}, inputs: {x: "f32[B,2]"}, outputs: {y: "f32[B,2]"}}
    inputs: {x: start.y}
    outputs: {y: "f32[batch,2]"}
  after_one:
    engine: cpu
    op: their_modules:Meet
    inputs: {x: one.y}
    outputs: {y: "f32[batch,2]"}
  after_two:
    engine: cpu
    op: their_modules:Meet
    inputs: {x: two.y}
    outputs: {y: "f32[batch,2]"}
  encode:
    engine: cpu
    op: encode_tensors
    with: {tensors: {one: "f32[B,2]", two: "f32[B,2]"}}
    inputs: {one: after_one.y, two: after_two.y}
    outputs: {body: "u8[bytes]"}
outputs: {response: encode.body}
targets: {cpu: {concurrency: {runners: 2, contexts: 2, in_flight: 4}}}
admission: {max_queued: 8, max_wait_ms: 20000, deadline_ms: 60000}
"""


def branches(folder: Path, cache: BuildCache, table: torch.Tensor) -> Path:
    save_file({"table": table}, folder / "w.safetensors")
    lookup_options = LOOKUP.replace("WEIGHTS", str(folder / "w.safetensors"))
    (folder / "b.yaml").write_text(BRANCHES.replace("{LOOKUP}", "{" + lookup_options + "}"))
    return compile_manifest(folder / "b.yaml", output=folder / "b", cache=cache).artifact


def test_independent_branches_run_at_once(modules: Path, build_cache: BuildCache) -> None:
    """Each of the two nodes waits for the other: one after the other neither would ever end."""
    made = branches(modules, build_cache, torch.arange(20.0).reshape(5, 4))
    with Engine.load(made) as engine:
        for _ in range(50):
            reply = json.loads(engine.run({"ids": [1, 2]}))
            assert [o["data"] for o in reply["outputs"]] == [[13, 16, 25, 28], [14, 17, 26, 29]]


def test_of_two_branches_that_fail_the_first_one_is_told(modules: Path, build_cache: BuildCache) -> None:
    made = branches(modules, build_cache, torch.tensor([0.0, 0, 0, 0, 999])[:, None].expand(5, 4).contiguous())
    with Engine.load(made) as engine:
        for _ in range(50):
            with pytest.raises(InternalError, match="a smaller number is needed") as caught:
                engine.run({"ids": [1, 4]})
            assert caught.value.node == "after_one"
        assert engine.stats()["counters"]["failed"] == 50
