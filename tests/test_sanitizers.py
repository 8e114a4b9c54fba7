"""The native tokenizer under AddressSanitizer, UBSan and ThreadSanitizer: native/fuzz/tokenizer_fuzz.cc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from test_tokenizer import trained
from test_tokenizer_parts import PARTS, document_of

from dagserve.attributes import Attribute
from dagserve.catalog import Column, Items, Limits, build_catalog
from dagserve.tokenizer import write_tables
from tools import fuzz


def build(folder: Path, sanitizers: str) -> Path:
    """The fuzzer with its own inputs, by the compiler that builds the project."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler: set CXX")
    program = folder / "fuzz"
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-DDAGSERVE_FUZZ_MAIN"]
    includes = [f"-I{fuzz.NATIVE / 'src'}", f"-I{fuzz.NATIVE / 'include'}"]
    files = [fuzz.NATIVE / "fuzz" / "tokenizer_fuzz.cc", *(fuzz.NATIVE / "src" / f"{name}.cc" for name in fuzz.TEXT)]
    subprocess.run([compiler, *flags, *includes, *map(str, files), "-o", str(program), "-pthread"], check=True)
    return program


def tables(folder: Path) -> list[Path]:
    """Tokenizers of every kind of part."""
    paths = []
    documents = {"trained": trained(digits=False)} | {
        name: document_of(PARTS[name])
        for name in ("byte fallback", "nfc", "metaspace first", "split MergedWithNext ", "prepend and replace")
    }
    for name, content in documents.items():
        document = json.loads(content)
        document["added_tokens"] = []
        paths.append(folder / f"{name.replace(' ', '-')}.bin")
        write_tables(json.dumps(document).encode(), paths[-1])
    return paths


def run(program: Path, *arguments: object) -> None:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


def test_no_byte_is_read_or_written_outside(tmp_path: Path) -> None:
    program = build(tmp_path, "address,undefined")
    for path in tables(tmp_path):
        run(program, path, 2, 3000)


def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """``make fuzz`` for FUZZ_SECONDS, 10 when unset; all targets side by side."""
    seconds, path = int(os.environ.get("FUZZ_SECONDS", "10")), tables(tmp_path)[0]
    source, catalog = Random(0), tmp_path / "catalog.bin"
    paths = [[source.randrange(3) for _ in range(source.randint(1, 5))] for _ in range(60)]
    limits = Limits(max_items=60, max_depth=5, max_children=3)
    columns = [Column(Attribute("region", "text")), Column(Attribute("stock", "bool"))]
    for n in range(len(paths)):
        columns[0].add("", f"r{n % 7}" if n % 5 else None)
        columns[1].add("", n % 2 == 0)
    catalog.write_bytes(build_catalog(Items([f"i{n}" for n in range(len(paths))], [*paths], columns), limits).file)

    def run_target(target: str) -> bool:
        folder = tmp_path / target
        folder.mkdir()
        return fuzz.run(target, folder, seconds, catalog if target == "catalog" else path)

    with ThreadPoolExecutor(len(fuzz.TARGETS)) as pool:
        found = dict(zip(fuzz.TARGETS, pool.map(run_target, fuzz.TARGETS), strict=True))
    assert found == dict.fromkeys(fuzz.TARGETS, True)


def test_sixteen_threads_share_a_tokenizer(tmp_path: Path) -> None:
    program = build(tmp_path, "thread")
    for path in tables(tmp_path)[:3]:
        run(program, path, 16, 300)
