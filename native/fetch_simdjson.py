"""Puts ``simdjson.h`` and ``simdjson.cpp`` into a folder, for CMake.

The released single-file form of simdjson (Apache-2.0) is inside the source distribution of ``pysimdjson``. pip gets it
from wherever this machine's packages come from, and compares its digest.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REQUIREMENT = "pysimdjson==7.0.2 --hash=sha256:44cf276e48912a3b9c7ca362c14da8420a7ac15a9f1a16ec95becff86db3904a"
FILES = ("simdjson.h", "simdjson.cpp")


def main(folder: Path) -> None:
    """Fills the folder, unless both files are there."""
    if all((folder / name).exists() for name in FILES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(REQUIREMENT)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", scratch]
        subprocess.run([*command, "--require-hashes", "-r", str(wanted)], check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as content:
            for member in content.getmembers():
                name = Path(member.name).name
                stream = content.extractfile(member) if name in FILES else None
                if stream is not None:
                    part = folder / f".{name}"
                    part.write_bytes(stream.read())
                    part.rename(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
