"""The ``dagserve`` command. Each command imports what it needs when it runs, so that ``--help`` stays fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dagserve
from dagserve.errors import DagserveError, ManifestError, RequestError

if TYPE_CHECKING:
    from dagserve.build.run import Progress

app = typer.Typer(
    name="dagserve",
    help="Bounded generation on small language models: a manifest, a static graph, an HTTP service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ManifestPath = Annotated[Path, typer.Argument(help="The manifest, a YAML file.", metavar="MANIFEST")]
ArtifactPath = Annotated[
    Path, typer.Argument(help="An artifact directory made by `dagserve compile`.", metavar="ARTIFACT")
]
Variables = Annotated[
    list[str] | None, typer.Option("--set", help="Value of a ${variable} of the manifest.", metavar="NAME=VALUE")
]
TargetName = Annotated[str | None, typer.Option("--target", help="Target of the manifest; the first when left out.")]


def _fail(message: object, status: int = 1) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(status)


@contextmanager
def _reporting() -> Iterator[None]:
    """Turns this project's errors into a message and exit status 1; a request's own mistake into status 2."""
    try:
        yield
    except RequestError as error:
        where = f" in node {error.node}" if error.node else ""
        raise _fail(f"{error.kind}{where}: {error}", 2) from error
    except ManifestError as error:  # as it is: editors jump to file:line:col at the start of a line
        typer.echo(error, err=True)
        raise typer.Exit(1) from error
    except DagserveError as error:
        raise _fail(error) from error


def _variables(settings: list[str] | None) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings or ()]
    wrong = [name for name, equals, _ in pairs if not equals or not name]
    if wrong:
        raise _fail(f"--set {wrong[0]}: write --set NAME=VALUE", 2)
    return {name: value for name, _, value in pairs}


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(dagserve.__version__)
        raise typer.Exit


@app.command()
def check(manifest: ManifestPath, settings: Variables = None, target: TargetName = None) -> None:
    """Check a manifest without building anything; print every mistake with its place and its fix."""
    from dagserve.passes import check_manifest

    variables = _variables(settings)
    with _reporting():
        graph = check_manifest(manifest, variables, target)
    context, slot = graph.memory_bytes
    sizes = f"{context:,} bytes a context, {slot:,} a request slot"
    typer.echo(f"{manifest}: ok ({len(graph.nodes)} nodes, target {graph.target.name}, {sizes})")
    for warning in graph.warnings:
        typer.echo(f"warning: {warning}", err=True)


@app.command(name="compile")
def compile_(
    manifest: ManifestPath,
    settings: Variables = None,
    target: TargetName = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Artifact directory (artifacts/NAME.TARGET when left out).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Build processes at a time (when left out the cores, at most 4).")
    ] = None,
) -> None:
    """Compile a manifest into an artifact directory, atomically; unchanged parts come from the cache."""
    from dagserve.compiler import compile_manifest

    variables = _variables(settings)
    with _reporting(), _progress() as progress:
        result = compile_manifest(manifest, variables, target, output, progress=progress, workers=workers)
    state = "is up to date" if result.up_to_date else "compiled"
    typer.echo(f"{result.artifact} {state} ({result.seconds:.1f} s)")


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each build step on a terminal; a line for each stage elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[tuple[str, str]] = set()

        def say(task: str, stage: str, _: float) -> None:
            if (task, stage) not in seen:
                seen.add((task, stage))
                console.print(f"{task}: {stage}", highlight=False)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def move(task: str, stage: str, fraction: float) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=1.0, stage=stage)
            bars.update(tasks[task], completed=fraction, stage=stage)

        yield move


@app.command()
def inspect(
    artifact: ArtifactPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also compare the digest of every file.")] = False,
) -> None:
    """Print an artifact's plan, its memory per context and in total, and its three descriptions."""
    from dagserve.inspect import print_plan, verify_digests

    with _reporting():
        if verify:
            count = verify_digests(artifact)
            typer.echo(f"{artifact}: {count} files are as they were compiled", err=as_json)
        print_plan(artifact, as_json)


@app.command()
def graph(
    manifest: ManifestPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture: .svg, .png, .dot or .mmd.")] = Path(
        "graph.svg"
    ),
    settings: Variables = None,
    target: TargetName = None,
) -> None:
    """Draw a manifest's graph with tensor names, shapes and devices on the edges: .svg, .png, .dot or .mmd."""
    from dagserve.draw import draw
    from dagserve.passes import check_manifest

    variables = _variables(settings)
    with _reporting():
        draw(check_manifest(manifest, variables, target), output)
    typer.echo(f"wrote {output}")


@app.command()
def run(
    artifact: ArtifactPath,
    request: Annotated[
        Path, typer.Option("--input", "-i", help="JSON body of a request, as over HTTP; - is standard input.")
    ],
    reference: Annotated[bool, typer.Option("--reference", help="Use the Python artifact runtime instead.")] = False,
) -> None:
    """Run one request without a server and print the reply."""
    from dagserve.engine import Engine

    with _reporting():
        content = _read_request(request)
        if reference:
            from dagserve.runtime import ReferenceRuntime

            body = ReferenceRuntime(artifact).run_body(content)
        else:
            with Engine.load(artifact) as engine:
                body = engine.run_body(content)
    sys.stdout.buffer.write(body + b"\n")


def _read_request(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise _fail(f"cannot read {path}: {error.strerror}", 2) from error


@app.command()
def serve(
    artifact: ArtifactPath,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve an artifact over HTTP; Ctrl-C drains."""
    from dagserve.server import serve as run_server

    with _reporting():
        raise typer.Exit(run_server(artifact, host, port))


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="Endpoint, for example http://127.0.0.1:8000/v1/score.")],
    request: Annotated[
        Path, typer.Option("--request", "-r", help="Request body (.json), or one body a line (.jsonl).")
    ],
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Requests in flight.")] = 1,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", min=1, help="Requests to send (100 when left out).")
    ] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds to run instead.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the result as JSON.")] = None,
) -> None:
    """Load an endpoint with a fixed number of requests in flight; print QPS and latency."""
    from dagserve.bench import bench as run

    if requests is not None and duration is not None:
        raise _fail("give --requests or --duration, not both", 2)
    with _reporting():
        raise typer.Exit(run(url, request, concurrency, requests, duration, warmup, json_path))


@app.command(name="tune-kernels")
def tune_kernels(
    operators: Annotated[
        list[str] | None, typer.Argument(help="Operators, folders of kernels/; all when left out.", metavar="OPERATOR")
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for OPERATOR/configs/GPU.json ($DAGSERVE_KERNEL_CONFIGS or the package when left out)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tables of all that was tried.")] = Path("perf/results"),
    limit: Annotated[
        float | None, typer.Option(min=0, help="Seconds; what is not done then keeps the tiles it had.")
    ] = None,
) -> None:
    """Search tile sizes of the Triton kernels on this GPU; `compile` uses them for targets like it."""
    from dagserve.tuning import tune_kernels as tune

    with _reporting():
        written = tune(operators or [], configs, out, limit, typer.echo)
    for path in written:
        typer.echo(f"wrote {path}")


@app.command(name="include-dir")
def include_dir() -> None:
    """Print the folder of dagserve/cpu_node.h, for building CPU nodes of your own."""
    from importlib.resources import files

    typer.echo(files("dagserve") / "include")


def main() -> None:
    """Entry point of the console command."""
    app()


if __name__ == "__main__":
    main()
