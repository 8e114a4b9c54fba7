"""What a node declares about itself, read by the compiler without running it.

A node definition is a class named in a manifest by a registered name (``tokenize``) or ``package.module:Class``.
Importing its module must be cheap: Torch modules live elsewhere and are imported when a package is built.

Port shapes use the definition's own symbols; the compiler unifies them with the manifest's. A symbol that stands in no
present input is *bound* by the node at run time (``tokens`` by ``tokenize``), within its upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dagserve.shapes import TensorType, parse_type

REGISTERED: Mapping[str, str] = {
    "tokenize": "dagserve.nodes.tokenize:Tokenize",
    "resolve_labels": "dagserve.nodes.labels:ResolveLabels",
    "encode_scores": "dagserve.nodes.encode:EncodeScores",
    "encode_embeddings": "dagserve.nodes.encode:EncodeEmbeddings",
    "encode_rerank": "dagserve.nodes.encode:EncodeRerank",
    "encode_tensors": "dagserve.nodes.encode:EncodeTensors",
    "encode_sequences": "dagserve.nodes.encode_sequences:EncodeSequences",
    "encode_classes": "dagserve.nodes.encode:EncodeClasses",
    "catalog": "dagserve.nodes.catalog:Catalog",
    "module": "dagserve.nodes.module:Module",
    "share_prefix": "dagserve.nodes.share_prefix:SharePrefix",
}
"""Short names a manifest may use for ``op``, and the definitions they stand for."""


@dataclass(frozen=True)
class Port:
    """A named input or output. ``type`` may hold definition-local symbols, for example ``i32[B+1]``.

    An ``optional`` input may stay unconnected, or be connected to an optional request input. A ``broadcast`` input of
    type ``text[B]`` also takes a scalar ``text``, which is repeated. A ``borrowed`` output has no buffer: a cpu node
    points it at memory of its own, or at its workspace, which stay as they are until the request ends.
    """

    name: str
    type: TensorType
    optional: bool = False
    broadcast: bool = False
    borrowed: bool = False

    @staticmethod
    def of(
        name: str, type_text: str, *, optional: bool = False, broadcast: bool = False, borrowed: bool = False
    ) -> Port:
        """``Port.of("tokens", "i64[T]")``."""
        return Port(name, parse_type(type_text), optional, broadcast, borrowed)


@dataclass(frozen=True)
class Option:
    """One key of a node's ``with:`` block, checked by ``check`` before anything is built.

    ``schema`` is a JSON Schema fragment, such as ``{"type": "string"}``.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool = False
    default: Any = None


@dataclass(frozen=True)
class Interface:
    """The ports of one node, and upper bounds it can state itself for symbols of its outputs.

    ``bounds`` maps an output's symbol (definition-local) to its largest value; the manifest then need not bound it. A
    function gives it from the bounds of the node's other symbols.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    bounds: Mapping[str, int | Callable[[Mapping[str, int]], int]] = field(default_factory=dict, compare=False)


class NodeDefinition(Protocol):
    """A class a manifest can name.

    A cpu node whose class has ``library`` (a shared library's path, relative to the class's file) runs that library's
    node of the name ``native_op`` (the class's name when left out); see ``cpu_node.h``. Without ``library`` it runs the
    class itself under Python's lock: ``Class(config, root).run(inputs)`` returns its outputs by port, with text as
    ``str`` and all else as numpy arrays. A ``configure(options, assets)`` may turn options into the ``config``.
    """

    engine: ClassVar[str]
    """``cpu`` or ``aoti``."""

    options: ClassVar[tuple[Option, ...]]

    @staticmethod
    def interface(options: Mapping[str, Any], bounds: Mapping[str, int]) -> Interface:
        """The ports, given the node's options (defaults filled in) and the manifest's bounds.

        Raises:
            ValueError: the options do not fit together; the message says which and how to fix it.
        """
        ...


def _fits(config: Mapping[str, Any], precision: str) -> str | None:  # noqa: ARG001
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator that a target may choose.

    Attributes:
        devices: the devices it runs on.
        compute: the least compute capability it needs of a CUDA device, ``8.9``.
        misfit: from the model's ``config.json`` and the target's precision to why it cannot be used, None where it can.
        tolerance: what a package with it is compared by, of ``validation.tolerance``; empty for the target's precision.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    compute: float = 0.0
    misfit: Callable[[Mapping[str, Any], str], str | None] = _fits
    tolerance: str = ""


Operators = Mapping[str, Mapping[str, Implementation]]
"""A node's replaceable operators: for each its implementations by name. Where a target chooses none, the first one for
its device that fits the model is taken."""


@dataclass(frozen=True)
class Made:
    """A parameter that is made of tensors of a checkpoint.

    Attributes:
        sources: their names.
        shapes: their shapes.
        make: from these tensors in FP32, and the module's own tensor for shape and dtype, to the parameter.
    """

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[[Sequence[Any], Any], Any]


ParameterMapping = Mapping[str, "str | Made"]
"""For each parameter of a package's modules where it comes from in a checkpoint."""


@dataclass(frozen=True)
class PackageSpec:
    """One AOTInductor package of a node.

    Attributes:
        name: unique inside the node, for example ``backbone``.
        module: ``package.module:Class`` of a ``torch.nn.Module``. It may have ``example(sizes, generator)``, which
            returns one valid tuple of inputs for given sizes of the shape symbols; without it inputs are random.
        arguments: keyword arguments of the module, JSON values.
        inputs, outputs: in call order, in definition-local symbols.
        compared: the outputs that must equal eager's; all of them when empty. Those that depend on the order of nearly
            equal values cannot.
        weights: the option that names where its parameters come from: ``checkpoint`` is a model, any other one a
            safetensors file with the module's own names. A package whose option is not given has no parameters.
        ranges: for integer inputs, the least value and one more than the largest: what random inputs may hold.
    """

    name: str
    module: str
    arguments: Mapping[str, Any]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    compared: tuple[str, ...] = ()
    weights: str = "checkpoint"
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class When:
    """Run a call only where element 0 of ``port`` equals ``equals``; an absent input counts as ``default``.

    ``port`` is an input, or ``local:NAME``, a ``u8`` or ``bool`` that an earlier call has made.
    """

    port: str
    equals: int
    default: int


@dataclass(frozen=True)
class Call:
    """One package run. Operands are ``port:NAME`` or ``local:NAME`` (kept inside the node, and replaced by a later call
    that writes the same name; no package may return one of its inputs as it is). For inputs also:

    - ``iota:PORT``: ``i32[L]`` = 0..L-1 with L the longest sequence of the ``cu_seqlens`` in that port; of packed texts
      with a shared prefix ``iota:PORT:rest`` leaves row 0 out, and ``iota:PORT:first`` is of row 0, at least 1;
    - ``count:PORT:DEFAULT``: ``i32[n]`` = 0..n-1 with n the value of an ``i64`` input, DEFAULT where it is absent;
      ``count:PORT:DEFAULT:OTHER:OTHER_DEFAULT`` takes a default of at most what OTHER counts;
    - ``scalar:PORT:DEFAULT``: an ``f32`` input, DEFAULT where it is absent;
    - ``row:PORT:ENDS:I``: row I of a packed one-dimensional input, from element I to I+1 of the ``i32`` input ENDS.
    """

    package: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    when: When | None = None


@dataclass(frozen=True)
class Check:
    """A check of the request before the first call.

    ``packed`` (tokens, cu_seqlens, max_length; with ``shared`` row 0 is a prefix of the others), ``range`` (tensor,
    low, high) or ``at_most`` (tensor, other: two ``i64`` scalars).
    """

    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BuildSpec:
    """How an AOTI node is built and run.

    ``bounds`` gives sizes of symbols that only packages have, a function from those of the ports. ``mapping`` names a
    function from ``config.json`` to :data:`ParameterMapping`, for packages over a ``checkpoint``. ``state`` says how
    many bytes a request keeps inside the node between calls: by name, a product of symbols and an integer such as
    ``P*L*1536``.
    ``generated`` is how many positions the node adds to the longest input.
    """

    packages: tuple[PackageSpec, ...]
    calls: tuple[Call, ...]
    checks: tuple[Check, ...]
    mapping: str
    bounds: Mapping[str, int | Callable[[Mapping[str, int]], int]]
    state: Mapping[str, str] = field(default_factory=dict)
    generated: int = 0


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer in the artifact: native tables and the ``tokenizer.json`` they came from, relative to its root.

    ``normalized_tokens`` are the added tokens that are looked for in text after a normalizer changed it; ``text_error``
    is why its tokens cannot become text, None where they can.
    """

    tables: str
    json: str
    vocab_size: int
    normalized_tokens: tuple[str, ...] = ()
    text_error: str | None = None


class Assets(Protocol):
    """What a CPU node's ``configure`` may ask of the compiler."""

    model_name: str
    """The manifest's name."""

    sizes: Mapping[str, int]
    """The bound of each definition-local symbol."""

    request_inputs: Mapping[str, str]
    """For each input port that reads a request input directly, that input's name: what messages should call it."""

    def tokenizer(self, spec: str) -> TokenizerFiles:
        """Puts a tokenizer into the artifact. ``spec`` is a ``tokenizer.json`` or anything ``checkpoint`` may be."""
        ...

    def catalog(self, file: str, tokenizer: str | None, limits: Mapping[str, Any]) -> str:
        """Builds a catalog's tables into the artifact and returns their path in it; see :mod:`dagserve.catalog`.

        Raises:
            BuildError: the catalog is not there, is wrong, or passes the limits.
        """
        ...

    def label_id(self, spec: str, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            CheckpointError: it is not; the message says what it became.
        """
        ...
