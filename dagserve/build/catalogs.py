"""``python -m dagserve.build.catalogs FILE OUT LIMITS [TOKENIZER]``: a catalog's tables, in a process of its own.

A server builds catalogs so while it answers requests. ``LIMITS`` is the JSON of :class:`dagserve.catalog.Limits`,
``TOKENIZER`` a ``tokenizer.json``. A wrong catalog ends with status 1 and the reason on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dagserve.catalog import Catalog, Limits, build_catalog, read_items
from dagserve.errors import DagserveError
from dagserve.tokenizer import encode_texts


def build_tables(file: Path, limits: Mapping[str, Any], tokenizer_json: bytes | None) -> Catalog:
    """Reads, checks and builds a catalog.

    Raises:
        BuildError: it is not there, is wrong, or passes the limits.
    """
    encode = None if tokenizer_json is None else partial(encode_texts, tokenizer_json)
    checked = Limits(**limits)
    return build_catalog(read_items(file, encode, checked.declared, checked.max_items), checked)


def main(file: str, out: str, limits: str, tokenizer: str = "") -> int:
    """Exit status 1 where the catalog is wrong."""
    try:
        document = Path(tokenizer).read_bytes() if tokenizer else None
        Path(out).write_bytes(build_tables(Path(file), json.loads(limits), document).file)
    except DagserveError as error:
        sys.stderr.write(" ".join(str(error).splitlines()) + "\n")  # one line: names in it may have more
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
