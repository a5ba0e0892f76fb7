"""A process that makes dry runs, for `worker_pool`.

`python -m tuner.memory.worker LAYERS TE_VERSION ARCHITECTURE` imports Megatron-Core once, then
reads requests from standard input, one JSON document a line: `{"request": {...}, "trace": PATH}`.
Each is run in a fork, so that none sees what another left behind. The answer, one line, is
`{"assumptions": {...}}`, or `{"error": KIND, "message": ..., "field": ..., "fix": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainables.processes import die_with_parent


def main(layers: str, te_version: str, architecture: str) -> None:
    """Serve requests until standard input ends, or whoever asks is gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not get between the answers
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    from tuner.memory.steps import framework, preload

    with framework(layers, te_version, architecture):
        preload(layers, architecture)
        for line in sys.stdin:
            answers.write(json.dumps(_in_fork(json.loads(line))) + "\n")
            answers.flush()


def _end_with(parent: int) -> None:
    """End this process, and with it the run it waits for, once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _in_fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a child process; its answer comes back through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        die_with_parent()  # a run that does not end must not outlive a worker that was stopped
        try:
            answer = _answer(job)
        except BaseException as error:  # the child must not return into the parent's loop
            answer = _as_error(error)
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": "crash", "message": f"the dry run died with status {status}"}
    document: dict[str, Any] = json.loads(text)
    return document


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    from tuner.memory.request import DryRunRequest
    from tuner.memory.steps import record_in_framework

    request = DryRunRequest.from_json(job["request"])
    os.environ.update(request.environment)
    trace, assumptions = record_in_framework(request)
    trace.save(Path(job["trace"]))
    return {"assumptions": assumptions}


def _as_error(error: BaseException) -> dict[str, Any]:
    from trainables.errors import TrialSpecError
    from tuner.errors import InputError
    from tuner.memory.errors import UnsupportedError

    if isinstance(error, InputError):
        kind = "unsupported" if isinstance(error, UnsupportedError) else "input"
        return {
            "error": kind,
            "message": error.message,
            "field": error.field,
            "fix": error.fix,
        }
    if isinstance(error, (TrialSpecError, ValueError, AssertionError)):
        refusal = _refusal(error)
        kind = "input" if refusal is None else "refused"
        message = refusal or str(error) or _place(error)
        return {"error": kind, "message": message, "field": "", "fix": ""}
    return {"error": "crash", "message": f"{type(error).__name__}: {error} {_place(error)}"}


def _refusal(error: BaseException) -> str | None:
    """What Megatron-Core says against a configuration; None for an error that is not its own."""
    import traceback

    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if "megatron" not in raised_in.parts:
        return None
    return f"Megatron-Core refuses it: {str(error) or _place(error)}"


def _place(error: BaseException) -> str:
    """Where the error was raised, and what the line says."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"(in {Path(frame.filename).name}, line {frame.lineno}: {frame.line})"


if __name__ == "__main__":
    main(*sys.argv[1:4])
