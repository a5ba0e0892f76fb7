"""Where the processes of a hung trial stand, for the record, before they are killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STACKS_FILE = "stacks.txt"
_DUMP_TIMEOUT_S = 10.0
_WRITE_WAIT_S = 0.5


def describe_hang(pid: int, output_dir: Path) -> dict[str, Any]:
    """State of every process below `pid`, with their stacks in `output_dir`/stacks.txt.

    Stacks come from py-spy where it is installed and may look; elsewhere ranks that called
    `die_with_parent` write theirs to their standard error. A stopped process shows as "stopped".
    """
    import psutil

    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    states: dict[str, str] = {}
    texts = []
    py_spy = _py_spy()
    for process in family:
        try:
            state = process.status()
        except psutil.NoSuchProcess:
            continue
        states[str(process.pid)] = state
        texts.append(f"process {process.pid}: {state}\n{_stack(py_spy, process.pid)}\n")
        if py_spy is None and state != psutil.STATUS_STOPPED:
            process.send_signal(signal.SIGUSR2)
    if py_spy is None:
        time.sleep(_WRITE_WAIT_S)
    (output_dir / STACKS_FILE).write_text("\n".join(texts))
    return {"processes": states, "stacks": STACKS_FILE}


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _stack(py_spy: str | None, pid: int) -> str:
    if py_spy is None:
        return "(py-spy is not installed; see the ranks' stderr.log)"
    try:
        done = subprocess.run(
            [py_spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_DUMP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stack: {error})"
    return done.stdout or f"(no stack: {done.stderr.strip()})"
