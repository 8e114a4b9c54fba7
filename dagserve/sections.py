"""Files of sections that native code maps into memory and reads as they are (``native/src/section_file.h``).

A header (magic, version, checksum, sizes), a directory, then sections, each at a multiple of 64 bytes; numbers are
little-endian.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence

ALIGNMENT = 64

_HEADER = struct.Struct("<QI36x")
_ENTRY = struct.Struct("<QQ")


def section_file(magic: bytes, version: int, sections: Sequence[bytes]) -> bytes:
    """The whole file. ``magic`` has 8 bytes."""
    start = 16 + _HEADER.size + _ENTRY.size * len(sections)
    directory, parts, at = b"", list[bytes](), start
    for section in sections:
        parts += [bytes(-at % ALIGNMENT), section]
        at += -at % ALIGNMENT
        directory += _ENTRY.pack(at, len(section))
        at += len(section)
    checked = b"".join((_HEADER.pack(at, len(sections)), directory, *parts))
    return magic + struct.pack("<II", version, zlib.crc32(checked)) + checked


def read_sections(content: bytes | mmap.mmap, which: Sequence[int] | None = None) -> list[bytes]:
    """Sections of a file, all of them by default; native code checks it more closely."""
    _, count = _HEADER.unpack_from(content, 16)
    wanted = range(count) if which is None else which
    entries = (_ENTRY.unpack_from(content, 16 + _HEADER.size + i * _ENTRY.size) for i in wanted)
    return [content[at : at + size] for at, size in entries]
