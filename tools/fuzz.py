"""Builds and runs the fuzz targets of ``native/fuzz`` with AddressSanitizer and UndefinedBehaviorSanitizer.

With clang the driver is libFuzzer, which follows coverage; without it ``standalone.cc`` changes seeds at random. Exit
status 1 when a target finds something; the input is then in ``build/fuzz``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "native"
BUILD = ROOT / "build" / "fuzz"
SIMDJSON = ROOT / "build" / "simdjson"
SIMDJSON_FLAGS = (
    "-DSIMDJSON_EXCEPTIONS=0",
    "-DSIMDJSON_IMPLEMENTATION_HASWELL=0",
    "-DSIMDJSON_IMPLEMENTATION_ICELAKE=0",
)
TEXT = ("added", "bpe", "decoder", "mapped_file", "nfc", "scanner", "section_file", "tables", "tokenizer", "unicode")
NODES = (
    *("cpu_nodes", "node_config", "tokenize_node", "labels_node", "catalog_node"),
    *("encode_classes_node", "encode_node", "encode_rerank_node", "encode_sequences_node", "encode_tensors_node"),
    "share_prefix_node",
)
TARGETS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": TEXT,
    "request": ("json_place", "request_decoder", "plan", "unicode"),
    "encode": (*TEXT, *NODES),
    "catalog": (*TEXT, *NODES),
}
"""The sources of ``native/src`` each target is built from."""

SEEDS: Mapping[str, Sequence[bytes]] = {
    "catalog": (
        *(b"\0", b"\3i1\ni2\ni3\ni10", b"\1i0\ni1\ni1", b"\2i7\ni8\ni9\nnone"),
        *(b"\4region=r1\nregion=r2\nstock=true", b"\x08stock=false", b"\x0fi1\ni2\nregion=r3\nstock=true"),
    ),
    "tokenizer": ("the cat's 12 日本語 é 👍\n\n <|im_start|>".encode(),),
    "request": (
        b'{"query":"q","items":["a","b\\u00e9\\ud83d\\ude00"],"ids":[1,-2],"apply_softmax":true,"model":"m"}',
        b'{"query":"","texts":["x"],"small":[1],"options":{"tiny":[255],"real":[1e3,-0.5]},"item_first":false}',
        b'{"query":"q","items":"a","temperature":1.0,"user":{"a":[null]}}',
        b'{"query":"","items":"a","allow":{"item":["a"],"region":["de"],"stock":true,"price":[-0.5,1e300]}}',
    ),
    "encode": (bytes(range(200)), b"\x1f" + b"\x41\x00" * 24 + b"\x02" * 8 + b"\x00\x00\x80\x3f" * 30),
}


def compiler() -> tuple[str, bool]:
    """A C++ compiler, and whether it brings libFuzzer."""
    clang = os.environ.get("CLANG") or shutil.which("clang++")
    if clang:
        return clang, True
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not found:
        raise SystemExit("fuzz: no C++ compiler; install clang, or set CXX")
    return found, False


def build(target: str, folder: Path, command: str, lib_fuzzer: bool) -> Path:
    """The program of one target."""
    sanitizers = "address,undefined" + (",fuzzer" if lib_fuzzer else "")
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread"]
    includes = [f"-I{NATIVE / name}" for name in ("src", "include", "public")] + [f"-isystem{SIMDJSON}"]
    files = [NATIVE / "fuzz" / f"{target}_fuzz.cc", *(NATIVE / "src" / f"{name}.cc" for name in TARGETS[target])]
    if target != "tokenizer":
        files.append(build_simdjson(folder, command))
    if not lib_fuzzer:
        files.append(NATIVE / "fuzz" / "standalone.cc")
    program = folder / target
    arguments = [*flags, *SIMDJSON_FLAGS, *includes, *map(str, files), "-ldl", "-o", str(program)]
    subprocess.run([command, *arguments], check=True)
    return program


def build_simdjson(folder: Path, command: str) -> Path:
    """simdjson's object file, with the one instruction set that dagserve is built for."""
    source, target = SIMDJSON / "simdjson.cpp", folder / "simdjson.o"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        flags = ["-std=c++20", "-O1", "-fsanitize=address", *SIMDJSON_FLAGS]
        subprocess.run([command, *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


def run(target: str, folder: Path, seconds: int, tables: Path | None) -> bool:
    """Builds and runs one target; whether it found nothing."""
    command, lib_fuzzer = compiler()
    program = build(target, folder, command, lib_fuzzer)
    corpus = folder / f"{target}-corpus"
    corpus.mkdir(exist_ok=True)
    for i, seed in enumerate(SEEDS[target]):
        (corpus / f"seed{i}").write_bytes(seed)
    arguments = [
        str(corpus),
        f"-max_total_time={seconds}",
        "-max_len=4096",
        f"-artifact_prefix={folder}/",
        "-verbosity=0",
    ]
    if not lib_fuzzer:
        arguments = [str(seconds), *map(str, sorted(corpus.iterdir()))]
    environment = {**os.environ, **({"DAGSERVE_TABLES": str(tables)} if tables else {})}
    done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        sys.stderr.write((done.stdout + done.stderr)[-4000:])
    return done.returncode == 0


def main() -> None:
    """Runs all targets over an artifact's tokenizers."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="artifact whose tokenizers are used")
    parser.add_argument("--seconds", type=int, default=600, help="for each target and tokenizer [600]")
    arguments = parser.parse_args()
    tables = sorted(arguments.artifact.glob("tokenizers/*.bin"))
    if not tables:
        raise SystemExit(f"fuzz: {arguments.artifact} has no tokenizer; compile a manifest that tokenizes")
    BUILD.mkdir(parents=True, exist_ok=True)
    jobs = [("request", None), *((t, path) for t in ("tokenizer", "encode") for path in tables)]
    jobs += [("catalog", path) for path in sorted(arguments.artifact.glob("catalogs/*.bin"))]
    failed = [target for target, path in jobs if not run(target, BUILD, arguments.seconds, path)]
    if failed:
        sys.exit(f"fuzz: {', '.join(failed)} found something; its input is in {BUILD}")
    print("fuzz: nothing found")


if __name__ == "__main__":
    main()
