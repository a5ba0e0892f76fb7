"""The process around a user's command: start it, read its output, report for the whole trial.

It runs once per node, or once per rank, in place of the ranks of other trainables, so that the
launcher's limits, kills and error files apply. The processes of a trial meet over Gloo to agree
on where the command's own ranks meet, and to put their figures together.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from trainables.command.result import CommandReport, trial_result
from trainables.command.template import Site, expand
from trainables.device_memory import PeakSampler, devices_used_bytes, family_peak_rss_bytes
from trainables.failures import is_out_of_memory
from trainables.logs import MEGATRON_PATTERNS, LogReader
from trainables.processes import (
    AGENT_PID_VARIABLE,
    free_port,
    stop_marked,
    tell_when_parent_ends,
)
from trainables.progress import write_progress
from trainables.rank_program import report_result, run_program
from tuner.measurement import TrialSpec
from tuner.redaction import redact

OUTPUT_FILE = "command-{rank}.log"

_KEPT_LINES = 400
_ERROR_LINE_LENGTH = 300
_OUTPUT_ENDS_WITHIN_S = 5.0


class CommandFailedError(RuntimeError):
    """The command ended with an error; the message is its most telling line."""


def main() -> None:
    """Run the command of `--spec`'s trial; the first process of each node writes the result."""
    run_program("trainables.command", __doc__, run)


def run(spec_file: Path, output_dir: Path) -> None:
    """Run this process's share of the trial described in `spec_file`."""
    spec = TrialSpec.from_json(json.loads(spec_file.read_text()))
    _stop_the_command_when_told()
    with _met(spec.timeout_s):
        site = _site(spec, output_dir)
        report = _report(spec, site, output_dir)
        result = trial_result(spec, _gathered(report))
    report_result(result, output_dir)


def _stop_the_command_when_told() -> None:
    """SIGTERM, also when this process's parent ends, takes the command's whole family along."""

    def stop(number: int, frame: object) -> None:
        mark = os.environ.get(AGENT_PID_VARIABLE)
        if mark is not None:
            stop_marked(int(mark), spare=os.getpid())
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    tell_when_parent_ends(signal.SIGTERM)


@contextmanager
def _met(timeout_s: float) -> Iterator[None]:
    import torch

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    yield
    torch.distributed.destroy_process_group()


def _site(spec: TrialSpec, output_dir: Path) -> Site:
    """Where this process stands, with an address for the command's own ranks to meet at."""
    per_node = spec.options.get("per", "node") == "node"
    processes, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    nnodes = processes if per_node else processes // int(os.environ["LOCAL_WORLD_SIZE"])
    endpoint = _shared(free_port() if rank == 0 else None)
    return Site(
        nnodes=nnodes,
        node_rank=rank if per_node else int(os.environ["GROUP_RANK"]),
        ranks_per_node=spec.world_size // nnodes,
        rank=rank,
        local_rank=local_rank,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(endpoint),
        output_dir=str(output_dir),
        python=sys.executable,
    )


def _shared(value: Any) -> Any:
    """What the first process says, on all processes."""
    import torch

    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _gathered(report: CommandReport) -> list[CommandReport]:
    import torch

    reports = [report] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    return reports


def _report(spec: TrialSpec, site: Site, output_dir: Path) -> CommandReport:
    """Run the command to its end; what is kept of its output carries no credentials.

    Raises CommandFailedError where it fails.
    """
    options = spec.options
    command = expand(options["launch"], spec, site)
    log = options.get("log", "megatron")
    reader = LogReader(MEGATRON_PATTERNS if log == "megatron" else log, rank=site.rank)
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    progress = _Progress(output_dir, site)
    output = output_dir / OUTPUT_FILE.format(rank=site.rank)
    with (
        output.open("w", errors="replace") as copy,
        _started(command, spec, site, output_dir) as process,
        _sampler(spec, process.pid) as memory,
    ):
        follower = threading.Thread(
            target=_follow, args=(process.stdout, reader, tail, copy, progress), daemon=True
        )
        follower.start()
        code = process.wait()
        # Processes the command left behind may keep its output open for ever.
        follower.join(_OUTPUT_ENDS_WITHIN_S)
    if code != 0:
        raise CommandFailedError(_telling_line(list(tail), code))
    return CommandReport(site.rank, reader.figures, memory.peak_bytes, memory.what)


@contextmanager
def _started(
    command: Sequence[str], spec: TrialSpec, site: Site, output_dir: Path
) -> Iterator[subprocess.Popen[str]]:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=spec.options.get("working_directory") or output_dir,
            env=_environment(spec, site),
        )
    except OSError as error:
        raise CommandFailedError(f"{command[0]!r} cannot be started: {error}") from None
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _environment(spec: TrialSpec, site: Site) -> dict[str, str]:
    """The trial's environment: the section's variables, then the candidate's.

    The command's first rank makes a store of its own: the launcher's belongs to this process.
    """
    return {
        **os.environ,
        **{name: str(value) for name, value in (spec.options.get("environment") or {}).items()},
        **{name: str(value) for name, value in (spec.config.get("env") or {}).items()},
        "MASTER_ADDR": site.master_addr,
        "MASTER_PORT": str(site.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _sampler(spec: TrialSpec, pid: int) -> PeakSampler:
    if spec.device == "cpu":
        return PeakSampler(lambda: family_peak_rss_bytes(pid), "largest process, resident bytes")
    return PeakSampler(devices_used_bytes, "fullest device, all processes")


def _follow(
    stream: Any, reader: LogReader, tail: deque[str], copy: IO[str], progress: _Progress
) -> None:
    """Read the output to its end."""
    with contextlib.suppress(ValueError):  # the copy was closed while processes still wrote
        for line in stream:
            reader.feed(line)
            shown = redact(line)
            tail.append(shown.strip())
            copy.write(shown)
            copy.flush()
            progress.note(len(reader.figures.steps))


class _Progress:
    """Tells the launcher of every new step the output speaks of."""

    def __init__(self, output_dir: Path, site: Site) -> None:
        self._output_dir, self._site, self._steps = output_dir, site, 0

    def note(self, steps: int) -> None:
        if steps > self._steps and self._site.local_rank == 0:
            self._steps = steps
            write_progress(self._output_dir, self._site.node_rank, "steps", steps)


def _telling_line(lines: Sequence[str], code: int) -> str:
    """The line that says why: memory that ran out, else the last error, else the last line."""
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    for line in lines:
        if is_out_of_memory(line):
            return f"{line[:_ERROR_LINE_LENGTH]} ({ended})"
    for line in reversed(lines):
        head = line.partition(":")[0].rpartition(" ")[2]
        if head.endswith(("Error", "Exception")):
            return f"{line[:_ERROR_LINE_LENGTH]} ({ended})"
    last = next((line for line in reversed(lines) if line), "no output")
    return f"{ended}: {last[:_ERROR_LINE_LENGTH]}"
