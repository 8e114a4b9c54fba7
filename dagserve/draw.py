"""Pictures of a graph: Graphviz and Mermaid text, and SVG or PNG drawn here.

On every edge stand the tensor's name, its type with its shape, and the device it is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx

from dagserve.errors import DagserveError
from dagserve.graph import Graph, Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".dot", ".mmd")

Vertex: TypeAlias = tuple[str, str]
"""Kind (``input``, ``node``, ``output``, ``tensor``, ``bend``) and name."""


def draw(graph: Graph, path: str | Path) -> None:
    """Writes a picture in the format of the path's suffix: ``.svg``, ``.png``, ``.dot`` or ``.mmd``.

    Raises:
        DagserveError: another suffix.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DagserveError(f"cannot draw to {str(path)!r}: give a name that ends in {', '.join(SUFFIXES)}")
    if suffix in (".dot", ".mmd"):
        path.write_text(to_dot(graph) if suffix == ".dot" else to_mermaid(graph), encoding="utf-8")
    else:
        _save(_figure(graph), path, suffix)


def _save(figure: Figure, path: Path, suffix: str) -> None:
    from matplotlib import rc_context

    # A fixed salt and no date make equal graphs equal files; text stays text in SVG.
    with rc_context({"svg.hashsalt": "dagserve", "svg.fonttype": "none"}):
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(path, format=suffix[1:], dpi=150, metadata=metadata)


def _edges(graph: Graph) -> Iterator[tuple[Vertex, Vertex, Tensor]]:
    """Every connection: from an input or node, to a node or output, with the tensor that goes there."""
    for tensor in graph.tensors.values():
        start = ("node", tensor.node) if tensor.node else ("input", tensor.name)
        for name in dict.fromkeys(consumer.node for consumer in tensor.consumers):
            yield start, ("node", name), tensor
        for name, source in graph.outputs.items():
            if source == tensor.name:
                yield start, ("output", name), tensor


def _vertices(graph: Graph) -> list[Vertex]:
    inputs = [("input", spec.name) for spec in graph.inputs]
    return inputs + [("node", node.name) for node in graph.nodes] + [("output", name) for name in graph.outputs]


def _node_label(graph: Graph, name: str) -> tuple[str, str]:
    node = graph.node(name)
    return name, f"{node.op.rpartition(':')[2]} · {node.engine} on {node.device}"


def _edge_label(tensor: Tensor) -> str:
    return f"{tensor.name}: {tensor.type} @ {tensor.device}"


def to_dot(graph: Graph) -> str:
    """The graph in Graphviz's language: boxes are nodes, ellipses inputs, double octagons outputs."""
    shapes = {"input": "ellipse", "node": "box", "output": "doubleoctagon"}
    lines = [f"digraph {_quote(graph.manifest.name)} {{", "  rankdir=TB;", '  node [fontname="Helvetica"];']
    for kind, name in _vertices(graph):
        label = "\n".join(_node_label(graph, name)) if kind == "node" else name
        style = ", style=dashed" if _is_optional(graph, (kind, name)) else ""
        lines.append(f"  {_quote(f'{kind} {name}')} [label={_quote(label)}, shape={shapes[kind]}{style}];")
    for start, end, tensor in _edges(graph):
        ends = f"{_quote(' '.join(start))} -> {_quote(' '.join(end))}"
        lines.append(f"  {ends} [label={_quote(_edge_label(tensor))}];")
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def to_mermaid(graph: Graph) -> str:
    """The graph as a Mermaid flowchart: boxes are nodes, stadiums inputs, double circles outputs."""
    shapes = {"input": ("([", "])"), "node": ("[", "]"), "output": ("(((", ")))")}
    lines = ["flowchart TD"]
    for kind, name in _vertices(graph):
        label = "<br/>".join(map(_entities, _node_label(graph, name))) if kind == "node" else _entities(name)
        left, right = shapes[kind]
        lines.append(f'  {kind}_{name}{left}"{label}"{right}')
    for start, end, tensor in _edges(graph):
        arrow = "-.->" if _is_optional(graph, start) else "-->"
        lines.append(f'  {"_".join(start)} {arrow}|"{_entities(_edge_label(tensor))}"| {"_".join(end)}')
    return "\n".join([*lines, ""])


def _entities(text: str) -> str:
    return "".join(f"#{ord(c)};" if c in '#"<>&' else c for c in text)


def _is_optional(graph: Graph, vertex: Vertex) -> bool:
    return vertex[0] == "input" and graph.manifest.inputs[vertex[1]].optional


# Layered drawing. Lengths are in points (1/72 inch); y grows downwards.

FONT = 9.0
GAP = 18.0
ROW = 62.0
MARGIN = 24.0


@dataclass(frozen=True)
class Layout:
    """Centres and sizes of all vertices in points, and the paths of edges as vertex sequences."""

    labels: Mapping[Vertex, tuple[str, ...]]
    centres: Mapping[Vertex, tuple[float, float]]
    sizes: Mapping[Vertex, tuple[float, float]]
    paths: tuple[tuple[Vertex, ...], ...]


def layout(graph: Graph) -> Layout:
    """Places vertices in rows by topological generation, so that no two labels overlap.

    Tensors are vertices of their own, between their producer's row and their first consumer's. An edge over several
    rows bends around what stands there.
    """
    labels = _labels(graph)
    layered, paths = _with_bends(_bipartite(graph))
    sizes = {v: _size(labels.get(v, ())) for v in layered}
    rows = _ordered_rows(layered)
    across = _across(layered, rows, sizes)
    centres = {v: (across[v], layered.nodes[v]["row"] * ROW) for v in layered}
    return Layout(labels, centres, sizes, paths)


def _labels(graph: Graph) -> dict[Vertex, tuple[str, ...]]:
    labels: dict[Vertex, tuple[str, ...]] = {}
    for kind, name in _vertices(graph):
        labels[kind, name] = _node_label(graph, name) if kind == "node" else (name,)
    for tensor in graph.tensors.values():
        # An input's name stands in the row above already.
        name_line = (tensor.name,) if tensor.node else ()
        labels["tensor", tensor.name] = (*name_line, f"{tensor.type} @ {tensor.device}")
    return labels


def _bipartite(graph: Graph) -> nx.DiGraph:
    network = nx.DiGraph()
    network.add_nodes_from(_vertices(graph))
    for start, end, tensor in _edges(graph):
        network.add_edge(start, ("tensor", tensor.name))
        network.add_edge(("tensor", tensor.name), end)
    for row, generation in enumerate(nx.topological_generations(network)):
        for vertex in generation:
            network.nodes[vertex]["row"] = row
    last = max((data["row"] for _, data in network.nodes(data=True)), default=0)
    for vertex in network:
        if vertex[0] == "output":
            network.nodes[vertex]["row"] = last
    return network


def _with_bends(network: nx.DiGraph) -> tuple[nx.DiGraph, tuple[tuple[Vertex, ...], ...]]:
    """Cuts edges over several rows into pieces of one row; the paths are the uncut edges."""
    layered = nx.DiGraph()
    layered.add_nodes_from(network.nodes(data=True))
    paths = []
    for start, end in network.edges:
        first, last = network.nodes[start]["row"], network.nodes[end]["row"]
        bends = [("bend", f"{'.'.join(start)} {'.'.join(end)} {row}") for row in range(first + 1, last)]
        layered.add_nodes_from((bend, {"row": first + 1 + i}) for i, bend in enumerate(bends))
        path = (start, *bends, end)
        nx.add_path(layered, path)
        paths.append(path)
    return layered, tuple(paths)


def _size(lines: tuple[str, ...]) -> tuple[float, float]:
    if not lines:  # a bend: as high as a box, so that its edge passes boxes in its row upright
        return 4.0, 2 * FONT * 1.35 + 10
    from matplotlib.textpath import TextPath

    width = max(TextPath((0, 0), line or " ", size=FONT).get_extents().width for line in lines)
    return width * 1.15 + 16, len(lines) * FONT * 1.35 + 10


def _ordered_rows(layered: nx.DiGraph) -> list[list[Vertex]]:
    """Vertices of each row, ordered by the mean place of their neighbours, swept down and up to have few crossings."""
    count = 1 + max((data["row"] for _, data in layered.nodes(data=True)), default=-1)
    rows: list[list[Vertex]] = [[] for _ in range(count)]
    for vertex, data in layered.nodes(data=True):
        rows[data["row"]].append(vertex)
    for sweep in range(8):
        down = sweep % 2 == 0
        for row in range(1, count) if down else range(count - 2, -1, -1):
            place = {v: i for i, v in enumerate(rows[row - 1 if down else row + 1])}
            neighbours = layered.predecessors if down else layered.successors
            rows[row] = _sorted_by_mean(rows[row], {v: [place[n] for n in neighbours(v)] for v in rows[row]})
    return rows


def _sorted_by_mean(row: list[Vertex], places: Mapping[Vertex, list[int]]) -> list[Vertex]:
    means = {v: sum(p) / len(p) if p else float(i) for (i, v), p in zip(enumerate(row), places.values(), strict=True)}
    return sorted(row, key=means.__getitem__)


def _across(
    layered: nx.DiGraph, rows: list[list[Vertex]], sizes: Mapping[Vertex, tuple[float, float]]
) -> dict[Vertex, float]:
    """Horizontal centres: as near to the neighbours' mean as the widths allow, in the rows' order."""
    x = dict.fromkeys(layered, 0.0)
    for row in rows:
        x.update(_spread(row, [0.0] * len(row), sizes))
    for _ in range(60):
        for row in rows:
            wanted = [_mean([x[n] for n in nx.all_neighbors(layered, v)], x[v]) for v in row]
            x.update(_spread(row, wanted, sizes))
    return x


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _spread(row: list[Vertex], wanted: list[float], sizes: Mapping[Vertex, tuple[float, float]]) -> dict[Vertex, float]:
    """The closest places to the wanted ones that keep the order and the gaps (isotonic regression by pooling)."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (sizes[left][0] + sizes[right][0]) / 2 + GAP)
    pools: list[tuple[float, int]] = []  # sum and count of vertices that moved together
    for want, offset in zip(wanted, offsets, strict=False):
        pool = (want - offset, 1)
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            total, count = pools.pop()
            pool = (total + pool[0], count + pool[1])
        pools.append(pool)
    places = (total / count for total, count in pools for _ in range(count))
    return {v: place + offset for v, place, offset in zip(row, places, offsets, strict=False)}


_STYLES: Mapping[str, Mapping[str, Any]] = {
    "input": {"boxstyle": "round,pad=0,rounding_size=9", "facecolor": "#e3f1e1", "edgecolor": "#3b7a3b"},
    "node": {"boxstyle": "square,pad=0", "facecolor": "#e2ebf7", "edgecolor": "#2f5b96"},
    "output": {"boxstyle": "round,pad=0,rounding_size=9", "facecolor": "#fbe9d3", "edgecolor": "#a8641c"},
    "tensor": {"boxstyle": "square,pad=0", "facecolor": "white", "edgecolor": "none"},
}


def _figure(graph: Graph) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plan = layout(graph)
    boxes = [(x, y, *plan.sizes[v]) for v, (x, y) in plan.centres.items()]
    left, right = min(x - w / 2 for x, _, w, _ in boxes) - MARGIN, max(x + w / 2 for x, _, w, _ in boxes) + MARGIN
    top, bottom = min(y - h / 2 for _, y, _, h in boxes) - MARGIN, max(y + h / 2 for _, y, _, h in boxes) + MARGIN
    figure = Figure(figsize=((right - left) / 72, (bottom - top) / 72))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    for path in plan.paths:
        _draw_edge(axes, plan, path, dashed=_starts_optional(graph, path))
    for vertex in plan.labels:
        if vertex in plan.centres:
            _draw_box(axes, plan, vertex, dashed=_is_optional(graph, vertex))
    return figure


def _starts_optional(graph: Graph, path: tuple[Vertex, ...]) -> bool:
    kind, name = path[0]
    return _is_optional(graph, path[0]) or (kind == "tensor" and _is_optional_input(graph, name))


def _is_optional_input(graph: Graph, name: str) -> bool:
    return name in graph.manifest.inputs and graph.manifest.inputs[name].optional


def _draw_box(axes: Any, plan: Layout, vertex: Vertex, *, dashed: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), (width, height) = plan.centres[vertex], plan.sizes[vertex]
    line = "--" if dashed else "-"
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, **_STYLES[vertex[0]], linestyle=line, zorder=2))
    lines = plan.labels[vertex]
    for i, text in enumerate(lines):
        heavy = vertex[0] != "tensor" and i == 0
        style = {"weight": "bold"} if heavy else {"color": "#333333"}
        place = y + (i - (len(lines) - 1) / 2) * FONT * 1.35
        axes.text(x, place, text, ha="center", va="center", size=FONT, parse_math=False, zorder=3, **style)


def _draw_edge(axes: Any, plan: Layout, path: tuple[Vertex, ...], *, dashed: bool) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    for start, end in pairwise(path):
        (x0, y0), (x1, y1) = plan.centres[start], plan.centres[end]
        y0, y1 = y0 + plan.sizes[start][1] / 2, y1 - plan.sizes[end][1] / 2
        middle = (y0 + y1) / 2
        codes += [Curve.LINETO if points else Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        points += [(x0, y0), (x0, middle), (x1, middle), (x1, y1)]
    arrow = "-" if path[-1][0] == "tensor" else "-|>"
    style: dict[str, Any] = {"linestyle": "--" if dashed else "-", "color": "#555555", "linewidth": 1.0, "zorder": 1}
    axes.add_patch(
        FancyArrowPatch(path=Curve(points, codes), arrowstyle=arrow, mutation_scale=9, shrinkA=0, shrinkB=0, **style)
    )
