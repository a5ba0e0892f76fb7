"""What `tuner tune` shows on the terminal: live progress, then the table of trials."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuner.candidate import Candidate
from tuner.measurement import Outcome
from tuner.search.records import Proposal, TrialRecord

_GIB = 2**30
_SHOWN_TRIALS = 12
_OUTCOME_STYLES = {
    Outcome.COMPLETED.value: "green",
    Outcome.OOM.value: "yellow",
    Outcome.INTERRUPTED.value: "dim",
}


class ProgressDisplay:
    """Trials done, running and pruned, the best so far and the time left.

    On a terminal it is drawn in place; elsewhere each ending prints one line. `rejected` is asked
    for the number of candidates the rules pruned. Use it as a context manager.
    """

    def __init__(
        self,
        console: Console,
        *,
        trials: int,
        wall_clock_s: float | None,
        metric: str,
        world_size_of: Callable[[Candidate], int],
    ) -> None:
        self._console = console
        self._trials = trials
        self._wall_clock_s = wall_clock_s
        self._metric = metric
        self._world_size_of = world_size_of
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Candidate, float]] = {}
        self._outcomes: Counter[str] = Counter()
        self._durations: list[float] = []
        self._last_number = -1
        self._best: TrialRecord | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2)

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def started(self, proposal: Proposal) -> None:
        with self._lock:
            self._running[proposal.number] = (proposal.candidate, time.monotonic())
            self._last_number = max(self._last_number, proposal.number)

    def ended(self, record: TrialRecord) -> None:
        with self._lock:
            self._running.pop(record.number, None)
            self._outcomes[record.outcome] += 1
            self._durations.append(record.duration_s)
            if record.feasible and self._figure(record) > self._figure(self._best):
                self._best = record
        self._console.print(self._line(record), highlight=False)

    def _figure(self, record: TrialRecord | None) -> float:
        if record is None or record.measurement is None:
            return float("-inf")
        return float(getattr(record.measurement, self._metric))

    def _line(self, record: TrialRecord) -> Text:
        done = sum(self._outcomes.values())
        label = record.candidate.label(self._world_size_of(record.candidate))
        text = Text(f"[{done}/{self._trials}] trial {record.number}: {label}, ")
        text.append(f"{record.candidate.memory_label()}: ")
        text.append(record.outcome, style=_OUTCOME_STYLES.get(record.outcome, "red"))
        measured = record.measurement
        if measured is not None:
            text.append(
                f"  step {measured.step_time_s:.3f} s, {measured.tflops_per_gpu:.4g} TFLOP/s/GPU, "
                f"peak {measured.peak_memory_allocated_bytes / _GIB:.3f} GiB"
            )
        if record.reason and record.outcome != Outcome.COMPLETED.value:
            text.append(f"  ({record.reason.splitlines()[0][:160]})", style="dim")
        return text

    def _render(self) -> Group:
        with self._lock:
            running, outcomes = list(self._running.items()), Counter(self._outcomes)
            best, durations = self._best, list(self._durations)
            proposals = self._last_number + 1
        done = sum(outcomes.values())
        elapsed = time.monotonic() - self._started
        pruned = max(0, proposals - done - len(running))
        parts: list[Any] = [ProgressBar(total=self._trials, completed=done, width=60)]
        parts.append(
            Text(
                f"{done} done, {len(running)} running, {pruned} pruned; {_clock(elapsed)} elapsed, "
                f"{self._time_left(done, durations, elapsed)} left"
            )
        )
        for number, (candidate, since) in running:
            label = candidate.label(self._world_size_of(candidate))
            age = time.monotonic() - since
            parts.append(
                Text(f"  running {number}: {label}, {candidate.memory_label()} ({age:.0f} s)")
            )
        if best is not None:
            parts.append(Text("best: ", style="bold").append_text(self._line_of_best(best)))
        return Group(*parts)

    def _line_of_best(self, best: TrialRecord) -> Text:
        label = best.candidate.label(self._world_size_of(best.candidate))
        return Text(
            f"{label}, {best.candidate.memory_label()}: {self._figure(best):.4g} {self._metric}",
            style="green",
        )

    def _time_left(self, done: int, durations: list[float], elapsed: float) -> str:
        """At most this long: trials left at the mean pace so far, or the clock of the budget."""
        limits = []
        if durations:
            limits.append((self._trials - done) * elapsed / max(1, done))
        if self._wall_clock_s is not None:
            limits.append(self._wall_clock_s - elapsed)
        return f"at most {_clock(max(0.0, min(limits)))}" if limits else "unknown time"


def result_table(summary: dict[str, Any], world_size_of: Callable[[Candidate], int]) -> Table:
    """The best trials of a summary document, best first; Pareto-optimal ones are marked."""
    metric = summary["metric"]
    table = Table(title=f"{summary['study']}: best trials by {metric}")
    for column, justify in _COLUMNS:
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    trials = [t for t in summary["trials"] if t["outcome"] == Outcome.COMPLETED.value]
    trials.sort(key=lambda t: -t["measured"][metric])
    for trial in trials[:_SHOWN_TRIALS]:
        candidate = Candidate.from_flat(trial["config"])
        measured = trial["measured"]
        marks = ("best " if trial["number"] == summary["best"] else "") + (
            "Pareto" if trial["number"] in summary["pareto"] else ""
        )
        table.add_row(
            str(trial["number"]),
            candidate.label(world_size_of(candidate)),
            candidate.memory_label(),
            f"{measured['step_time_s']:.3f}",
            f"{measured['tokens_per_s_per_gpu']:,.0f}",
            f"{measured['tflops_per_gpu']:.4g}",
            f"{measured['peak_memory_allocated_bytes'] / _GIB:.3f}",
            marks.strip(),
            style="bold" if trial["number"] == summary["best"] else None,
        )
    return table


def pareto_lines(summary: dict[str, Any], world_size_of: Callable[[Candidate], int]) -> list[str]:
    """The Pareto front of throughput against memory, leanest first, a line each."""
    by_number = {trial["number"]: trial for trial in summary["trials"]}
    lines = []
    for number in summary["pareto"]:
        trial = by_number[number]
        candidate = Candidate.from_flat(trial["config"])
        gib = trial["measured"]["peak_memory_allocated_bytes"] / _GIB
        figure = trial["measured"][summary["metric"]]
        lines.append(
            f"{gib:8.3f} GiB  {figure:10.4g} {summary['metric']}  "
            f"{candidate.label(world_size_of(candidate))}, {candidate.memory_label()}"
        )
    return lines


_COLUMNS = (
    ("trial", "right"),
    ("layout", "left"),
    ("memory settings", "left"),
    ("step s", "right"),
    ("tokens/s/GPU", "right"),
    ("TFLOP/s/GPU", "right"),
    ("peak GiB", "right"),
    ("", "left"),
)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
