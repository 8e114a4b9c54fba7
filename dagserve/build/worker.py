"""``python -m dagserve.build.worker JOB.json``: one build step in a process of its own.

Progress goes to standard output as JSON lines ``{"stage": ..., "fraction": ...}``, the last being ``{"done": true}`` or
``{"error": ..., "kind": ...}``; whatever compilers print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from dagserve.build.package import compile_package, verify_package
from dagserve.build.weights import write_weights
from dagserve.errors import BuildError, CheckpointError, DagserveError

STEPS = {"weights": write_weights, "compile": compile_package, "verify": verify_package}


def run_job(job: Mapping[str, Any], channel: IO[str]) -> int:
    """Runs one job and reports it; returns the exit status."""

    def say(**event: object) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    try:
        STEPS[job["step"]](job, Path(job["out"]), lambda stage, fraction: say(stage=stage, fraction=fraction))
    except (BuildError, CheckpointError) as error:
        say(error=str(error), kind=type(error).__name__)
        return 1
    except (DagserveError, ValueError) as error:
        say(error=str(error), kind="BuildError")
        return 1
    except Exception as error:  # a module of the user's may raise anything, the compiler nearly so
        traceback.print_exc()
        say(error=f"{job['name']}: {type(error).__name__}: {error}", kind="BuildError")
        return 1
    say(done=True)
    return 0


def main() -> int:
    """Reads the job file named on the command line."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    return run_job(json.loads(Path(sys.argv[1]).read_text()), channel)


if __name__ == "__main__":
    sys.exit(main())
