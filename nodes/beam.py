"""The beam search node. Torch code is in :mod:`dagserve.nodes.beam_search`, imported only when a package is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar

from dagserve.errors import CheckpointError
from dagserve.interface import BuildSpec, Call, Check, Interface, Operators, Option, PackageSpec, Port, When
from dagserve.nodes.operators import BEAM, CATALOG
from dagserve.nodes.prefill import packed_checks

MAX_WIDTH = 400
MAX_STEPS = 8
MAX_PENALTY = 10
"""The largest length penalty either way: scores stay finite with it."""

_MODULE = "dagserve.nodes.beam_search"
_MAPPING = "dagserve.nodes.decoder:parameter_mapping"
_STATE = ("history", "beams", "completed", "pool")
_RESULT = ("tokens", "lengths", "scores", "cumulative", "step_scores", "finished", "counts")
_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
_DTYPES: Mapping[str, str] = {"fp32": "f32", "bf16": "bf16"}


class BeamSearch:
    """AOTI node: prompts to their best continuations, at a fixed width and a fixed number of steps.

    One prefill, then ``steps`` expansions with a decode step between each two; the runtime runs it as one node. Widths
    and steps are bounded here, and a request may ask for less. The semantics are in docs/beam.md.
    """

    engine: ClassVar[str] = "aoti"
    operators: ClassVar[Operators] = BEAM
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    options: ClassVar[tuple[Option, ...]] = (
        Option("checkpoint", {"type": "string", "minLength": 1}, required=True),
        Option("width", {"type": "integer", "minimum": 1, "maximum": MAX_WIDTH}, required=True),
        Option("steps", {"type": "integer", "minimum": 1, "maximum": MAX_STEPS}, required=True),
        Option("returned", {"type": "integer", "minimum": 1, "maximum": MAX_WIDTH}),
        Option("stop_tokens", {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True}),
        Option("min_tokens", {"type": "integer", "minimum": 0, "maximum": MAX_STEPS}, default=0),
        Option("length_penalty", {"type": "number", "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}, default=1.0),
        Option("max_length", {"type": "integer", "minimum": 1}),
        Option("unrolled", {"type": "boolean"}, default=False),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:  # noqa: ARG004
        """``tokens: i64[T]`` and ``cu_seqlens: i32[P+1]``, packed prompts -> the best sequences of each.

        Per request, each optional: ``width: i64`` (at most the option), ``returned: i64`` (at most the width), and
        ``length_penalty: f32``. Outputs, for ``R`` sequences of at most ``N = steps`` tokens: ``tokens: i64[P,R,N]``,
        ``lengths: i32[P,R]``, ``scores: f32[P,R]`` (cumulative / length ** length_penalty), ``cumulative: f32[P,R]``,
        ``step_scores: f32[P,R,N]``, ``finished: bool[P,R]`` (ended in a stop token), ``counts: i32[P]`` (found).
        """
        if (options["returned"] or 1) > options["width"]:
            raise ValueError(f"returned is {options['returned']}; it must be at most width, {options['width']}")
        if options["min_tokens"] > options["steps"]:
            raise ValueError(f"min_tokens is {options['min_tokens']}; it must be at most steps, {options['steps']}")
        inputs = (
            Port.of("tokens", "i64[T]"),
            Port.of("cu_seqlens", "i32[P+1]"),
            Port.of("width", "i64", optional=True),
            Port.of("returned", "i64", optional=True),
            Port.of("length_penalty", "f32", optional=True),
        )
        return Interface(inputs, _result_ports(options["steps"]), {"R": options["width"]})

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        connected: Set[str],
    ) -> BuildSpec:
        """Four packages over one copy of the weights; ``connected`` are the input ports that have a tensor.

        With ``unrolled`` one package has the whole search.
        """
        steps, width = options["steps"], options["width"]
        packages = _packages(options, config, precision, operators)
        sizes = {"W": width, "B": width, "L": options["max_length"]}
        state = _state_bytes(options, config, precision)
        calls = _calls(options)
        if options["unrolled"]:
            packages, calls = (_unrolled(packages),), (_whole_call(calls),)
        return BuildSpec(packages, calls, _checks(options, config, connected), _MAPPING, sizes, state, steps - 1)


class CatalogSearch:
    """AOTI node: prompts to the best items of a catalog. Every sequence it gives is an item's; see docs/catalogs.md."""

    engine: ClassVar[str] = "aoti"
    operators: ClassVar[Operators] = CATALOG
    precisions: ClassVar[tuple[str, ...]] = BeamSearch.precisions
    options: ClassVar[tuple[Option, ...]] = (
        *(o for o in BeamSearch.options if o.name not in ("stop_tokens", "min_tokens")),
        Option("normalize", {"enum": ["vocabulary", "catalog"]}, default="vocabulary"),
    )

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:
        """The ports of :class:`BeamSearch`, and those of a ``catalog`` node whose ``max_depth`` is ``steps``.

        One more output, ``nodes: i64[P,R]``: the node of the catalog's trie that each sequence ends in.
        """
        if options["unrolled"]:
            raise ValueError(
                "a catalog's search cannot be unrolled: its tables differ from level to level; leave it out"
            )
        plain = BeamSearch.interface({**options, "min_tokens": 0}, bounds)
        trie = (
            Port.of("first", "i32[F]"),
            Port.of("label", "i32[N]"),
            Port.of("marks", "u8[M]"),
            Port.of("alphabets", "i32[A]"),
            Port.of("alphabet_ends", f"i32[{options['steps'] + 1}]"),
            Port.of("children", "i32[K]"),
            Port.of("children_ends", f"i32[{options['steps'] + 1}]"),
        )
        return Interface((*plain.inputs, *trie), (*plain.outputs, Port.of("nodes", "i64[P,R]")), plain.bounds)

    @staticmethod
    def build(
        options: Mapping[str, Any],
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        connected: Set[str],
    ) -> BuildSpec:
        """As :meth:`BeamSearch.build`; ``expand`` reads the catalog."""
        plain = BeamSearch.build(
            {**options, "stop_tokens": (), "min_tokens": 0}, config, precision, operators, connected
        )
        tokens = Check("range", {"tensor": "alphabets", "low": 0, "high": config["vocab_size"]})
        sizes = {**plain.bounds, "U": config["vocab_size"], "C": lambda s: s["K"] // options["steps"]}
        return replace(
            plain,
            packages=tuple(_of_catalog(p, options) for p in plain.packages),
            calls=_catalog_calls(plain.calls),
            checks=(*plain.checks, tokens),
            bounds=sizes,
        )


_CATALOG_PORTS = (
    Port.of("first", "i32[F]"),
    Port.of("label", "i32[N]"),
    Port.of("marks", "u8[M]"),
    Port.of("alphabet", "i32[U]"),
    Port.of("children", "i32[C]"),
)


def _of_catalog(package: PackageSpec, options: Mapping[str, Any]) -> PackageSpec:
    """A package of the plain search as a catalog's search has it."""
    inputs, outputs = (tuple(_with_node(p) for p in ports) for ports in (package.inputs, package.outputs))
    arguments: Mapping[str, Any] = package.arguments
    if package.name == "expand":
        kept = ("config", "precision", "operators", "steps")
        arguments = {**{k: arguments[k] for k in kept}, "normalize": options["normalize"]}
        inputs = (*inputs, *_CATALOG_PORTS)
        return replace(package, module=f"{_MODULE}:ExpandCatalog", arguments=arguments, inputs=inputs, outputs=outputs)
    if package.name == "finish":
        outputs = (*outputs, Port.of("nodes", "i64[P,R]"))
    if package.name != "step":
        arguments = {**arguments, "catalog": True}
    return replace(package, arguments=arguments, inputs=inputs, outputs=outputs)


def _with_node(port: Port) -> Port:
    """``history`` and ``completed`` have a column more, for the node."""
    if port.name not in ("history", "completed"):
        return port
    *rows, columns = port.type.shape
    return replace(port, type=replace(port.type, shape=(*rows, replace(columns, add=columns.add + 1))))


def _catalog_calls(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Each ``expand`` reads its level of the catalog, and ``finish`` gives nodes."""
    level, result = 0, []
    for call in calls:
        if call.package == "expand":
            rows = (f"row:alphabets:alphabet_ends:{level}", f"row:children:children_ends:{level}")
            call = replace(call, inputs=(*call.inputs, "port:first", "port:label", "port:marks", *rows))
            level += 1
        elif call.package == "finish":
            call = replace(call, outputs=(*call.outputs, "port:nodes"))
        result.append(call)
    return tuple(result)


def _result_ports(steps: int) -> tuple[Port, ...]:
    return (
        Port.of("tokens", f"i64[P,R,{steps}]"),
        Port.of("lengths", "i32[P,R]"),
        Port.of("scores", "f32[P,R]"),
        Port.of("cumulative", "f32[P,R]"),
        Port.of("step_scores", f"f32[P,R,{steps}]"),
        Port.of("finished", "bool[P,R]"),
        Port.of("counts", "i32[P]"),
    )


def _state_ports(steps: int, rows: str) -> tuple[Port, ...]:
    """``history, beams, completed, pool``; ``rows`` is the symbol of open beams."""
    return (
        Port.of("history", f"i64[P,{rows},{steps}]"),
        Port.of("beams", f"f32[P,{rows},{steps + 1}]"),
        Port.of("completed", f"i64[P,W,{steps + 1}]"),
        Port.of("pool", f"f32[P,W,{steps + 2}]"),
    )


def _columns(config: Mapping[str, Any]) -> tuple[int, int]:
    """``2K`` and ``C`` of the K/V tensors."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"], (config.get("num_key_value_heads") or heads) * size


def stop_tokens(options: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """The option, or the checkpoint's ``eos_token_id``.

    Raises:
        CheckpointError: a token that the model does not have.
    """
    given = options["stop_tokens"]
    found = config.get("eos_token_id") if given is None else given
    stops = [] if found is None else [found] if isinstance(found, int) else list(found)
    if stops and max(stops) >= config["vocab_size"]:
        most = config["vocab_size"] - 1
        raise CheckpointError(f"stop_tokens has {max(stops)}; the model's tokens are from 0 to {most}: correct it")
    return stops


def _packages(
    options: Mapping[str, Any], config: Mapping[str, Any], precision: str, operators: Mapping[str, str]
) -> tuple[PackageSpec, ...]:
    steps, dtype = options["steps"], _DTYPES[precision]
    layers, columns = _columns(config)
    keys = max(steps - 1, 1) * columns
    model = {"config": dict(config), "precision": precision, "operators": dict(operators), "steps": steps}
    stops = stop_tokens(options, config)
    search = {"stop_tokens": stops, "min_tokens": options["min_tokens"], "max_width": options["width"]}
    hidden = config["hidden_size"]
    prefix, suffix = (
        Port.of("prefix", f"{dtype}[{layers},P,L,{columns}]"),
        Port.of("suffix", f"{dtype}[{layers},P,W,{keys}]"),
    )
    step = Port.of("step", "i64[1]")
    token, parent = Port.of("token", "i64[P,W]"), Port.of("parent", "i64[P,W]")
    penalty, returned = Port.of("length_penalty", "f32"), Port.of("returned", "i32[R]")
    cu_seqlens = Port.of("cu_seqlens", "i32[P+1]")
    prompts = (Port.of("tokens", "i64[T]"), cu_seqlens, Port.of("iota", "i32[L]"), Port.of("width", "i32[W]"))
    begun = (Port.of("hidden", f"{dtype}[P,1,{hidden}]"), prefix, suffix, *_state_ports(steps, "1"), step)
    before = (Port.of("hidden", f"{dtype}[P,B,{hidden}]"), step, *_state_ports(steps, "B"), penalty, returned)
    after = (token, parent, Port.of("open", "u8[1]"), step, *_state_ports(steps, "W"))
    decoded = (Port.of("hidden", f"{dtype}[P,W,{hidden}]"), suffix)
    ended = (step, *_state_ports(steps, "W"), penalty, returned)
    # Of two candidates whose scores are equal but for rounding either may come first, so tokens are not compared.
    compared = ("beams", "pool")
    first = PackageSpec("prefill", f"{_MODULE}:Prefill", model, prompts, begun)
    expand = PackageSpec("expand", f"{_MODULE}:Expand", {**model, **search}, before, after, compared)
    finish = PackageSpec("finish", f"{_MODULE}:Finish", {"steps": steps}, ended, _result_ports(steps))
    if steps == 1:
        return first, expand, finish
    inputs = (token, parent, step, cu_seqlens, prefix, suffix)
    return first, expand, PackageSpec("step", f"{_MODULE}:Step", model, inputs, decoded), finish


def _calls(options: Mapping[str, Any]) -> tuple[Call, ...]:
    state = tuple(f"local:{name}" for name in _STATE)
    returned = f"count:returned:{options['returned'] or options['width']}:width:{options['width']}"
    penalty = f"scalar:length_penalty:{options['length_penalty']}"
    begun = ("local:hidden", "local:prefix", "local:suffix", *state, "local:step")
    prefill = Call(
        "prefill",
        ("port:tokens", "port:cu_seqlens", "iota:cu_seqlens", f"count:width:{options['width']}"),
        begun,
    )
    after = ("local:token", "local:parent", "local:open", "local:step", *state)
    open_ = When("local:open", 1, 0)
    before = ("local:hidden", "local:step", *state, penalty, returned)
    inputs = ("local:token", "local:parent", "local:step", "port:cu_seqlens", "local:prefix", "local:suffix")
    calls = [prefill, Call("expand", before, after)]
    for _ in range(options["steps"] - 1):
        calls += [Call("step", inputs, ("local:hidden", "local:suffix"), open_), Call("expand", before, after, open_)]
    results = tuple(f"port:{name}" for name in _RESULT)
    return (*calls, Call("finish", ("local:step", *state, penalty, returned), results))


def _unrolled(packages: Sequence[PackageSpec]) -> PackageSpec:
    """The whole search as one package: what goes into the first one and out of the last one."""
    first, expand, last = packages[0], packages[1], packages[-1]
    return PackageSpec(
        "search",
        f"{_MODULE}:Unrolled",
        expand.arguments,
        (*first.inputs, Port.of("beams", "i32[B]"), *expand.inputs[-2:]),
        last.outputs,
        ("scores", "counts"),  # as for `expand`
    )


def _whole_call(calls: Sequence[Call]) -> Call:
    first, last = calls[0], calls[-1]
    return Call("search", (*first.inputs, first.inputs[-1], *last.inputs[-2:]), last.outputs)


def _checks(options: Mapping[str, Any], config: Mapping[str, Any], connected: Set[str]) -> tuple[Check, ...]:
    width, checks = options["width"], [*packed_checks(options, config)]
    checks += [
        Check("range", {"tensor": port, "low": 1, "high": width + 1})
        for port in ("width", "returned")
        if port in connected
    ]
    if "length_penalty" in connected:  # beyond it scores overflow, and an infinite one stands for no sequence
        checks.append(Check("range", {"tensor": "length_penalty", "low": -MAX_PENALTY, "high": MAX_PENALTY + 1}))
    if {"width", "returned"} <= connected:
        checks.append(Check("at_most", {"tensor": "returned", "other": "width"}))
    return tuple(checks)


def _state_bytes(options: Mapping[str, Any], config: Mapping[str, Any], precision: str) -> Mapping[str, str]:
    """Largest bytes of what a request keeps between calls, as products of symbols."""
    layers, columns = _columns(config)
    size, steps = _BYTES[precision], options["steps"]
    keys = max(steps - 1, 1) * columns
    return {
        "prefix K/V": f"P*L*{layers * columns * size}",
        "suffix K/V": f"P*W*{layers * keys * size}",
        "beams and sequences": f"P*W*{8 * steps + 4 * (steps + 1) + 8 * (steps + 1) + 4 * (steps + 2)}",
        "logits and order keys": f"P*W*{max(config['vocab_size'], 1) * (size + 4 + 8)}",
    }
