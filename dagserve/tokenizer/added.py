"""Added tokens as a byte trie: one scan finds the leftmost start, then the longest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagserve.tokenizer.hashing import EMPTY

ROOTS = 256


@dataclass
class _Node:
    children: dict[int, _Node] = field(default_factory=dict)
    token: int = EMPTY


def trie(texts: Sequence[bytes]) -> bytes:
    """A trie of texts, as ``u4``: nodes, edges, the root's child of each byte, then per node its first edge (one more
    at the end) and the index of the text that ends there, then per edge its byte and child. Of equal texts the first
    counts; empty ones are left out."""
    root = _Node()
    for index, text in enumerate(texts):
        node = root
        for byte in text:
            node = node.children.setdefault(byte, _Node())
        node.token = index if text and node.token == EMPTY else node.token
    nodes, numbers = [root], {id(root): 0}
    for node in nodes:
        for _, child in sorted(node.children.items()):
            numbers[id(child)] = len(nodes)
            nodes.append(child)
    edges = [(byte, numbers[id(child)]) for node in nodes for byte, child in sorted(node.children.items())]
    firsts = np.cumsum([0, *(len(node.children) for node in nodes)])
    roots = np.full(ROOTS, EMPTY)
    for byte, child in root.children.items():
        roots[byte] = numbers[id(child)]
    parts: list[npt.ArrayLike] = [
        [len(nodes), len(edges)],
        roots,
        firsts,
        [node.token for node in nodes],
        [byte for byte, _ in edges],
        [child for _, child in edges],
    ]
    return b"".join(np.asarray(part, dtype="<u4").tobytes() for part in parts)
