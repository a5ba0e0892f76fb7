"""`tuner estimate`: what a configuration needs, from a dry run of real Megatron-Core."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.commands.check import DEFAULT_FRONTEND, note_misspelt_keys, numbered_lines
from tuner.commands.output import coloured, console, print_json
from tuner.commands.starting import with_vocabulary
from tuner.configuration import completed, full_configuration, mcore_version, with_model
from tuner.errors import InputError
from tuner.formats.reader import expand, read_given_and_effective

_GIB = 2**30


def run_estimate(
    config: Path | None,
    jsonl: Path | None,
    *,
    run: Mapping[str, Any] | None = None,
    started_with: Sequence[str] = (),
    method: str = "dryrun",
    timeline: Path | None = None,
    as_json: bool,
) -> int:
    """Estimate and print; 0 where everything fits, 1 where something does not.

    `run` holds what the command line says of the run (GPU, number of GPUs), which fills in what
    CONFIG leaves open. `method` is "dryrun" or "composed"; `timeline` receives the predicted step
    of CONFIG.
    """
    if (config is None) == (jsonl is None):
        raise InputError("give a CONFIG file or --jsonl FILE", fix="see tuner estimate --help")
    if jsonl is not None and timeline is not None:
        raise InputError("is of one configuration", field="--timeline", fix="give a CONFIG file")
    if jsonl is not None:
        return _estimate_lines(jsonl, method, run or {})
    assert config is not None
    where, run = str(config), run or {}
    both = read_given_and_effective(config, mcore=mcore_version(), started_with=started_with)
    given, document = (completed(read, run) for read in both)
    note_misspelt_keys(given, config)
    document, assumed = with_vocabulary(document)
    if timeline is not None:
        write_timeline(document, timeline, where=where, base_folder=config.parent)
    answer = judged_estimate(document, given, where=where, base_folder=config.parent, method=method)
    if assumed:
        answer["assumptions"] = {**answer["assumptions"], **assumed}
    if as_json:
        print_json(answer)
    else:
        _print_estimate(answer, str(config))
        for field, value in assumed.items():
            console().print(f"assumed: {field} {value:,}, which the configuration does not say")
    return 0 if answer["fits"] else 1


def estimate_document(
    document: Mapping[str, Any],
    *,
    where: str,
    base_folder: Path = Path(),
    method: str = "dryrun",
    ranks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The estimate of one input document by "dryrun" or "composed".

    `ranks` are those to dry-run, by default all that may hold the peak. Raises InputError naming
    the field and the file.
    """
    from tuner.estimation import estimate
    from tuner.estimation_composed import estimate_composed
    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError

    try:
        document = with_model(document, base_folder)
        if method == "composed":
            return estimate_composed(document)
        return estimate(document, ranks=ranks)
    except (UnsupportedError, DryRunError) as error:
        raise InputError(f"cannot be estimated: {error}", where=where) from None
    except InputError as error:
        raise error.at(where) from None
    except (ValueError, TypeError) as error:
        raise InputError(str(error), where=where) from None


def judged_estimate(
    document: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    where: str,
    base_folder: Path = Path(),
    method: str = "dryrun",
) -> dict[str, Any]:
    """The estimate of a document, with the rules that `given`, the document as written, breaks.

    An invalid configuration may still be estimated; where it cannot, the InputError names the
    broken rules first.
    """
    broken = _broken_rules(given, where, base_folder)
    try:
        answer = estimate_document(document, where=where, base_folder=base_folder, method=method)
    except InputError as error:
        if not broken:
            raise
        rules = "; ".join(f"{rule['rule']}: {rule['message']}" for rule in broken)
        reason = f"{error.field}: {error.message}" if error.field else error.message
        raise InputError(
            f"breaks rule {rules}. It cannot be estimated: {reason}",
            where=where,
            fix=error.fix or "`tuner check --fix` finds a valid configuration",
        ) from None
    return {**answer, "broken_rules": broken}


def _broken_rules(given: Mapping[str, Any], where: str, base_folder: Path) -> list[dict[str, Any]]:
    """`rule`, `message` and `fix` of each rule by which the configuration is invalid or fails."""
    from tuner.constraints import check
    from tuner.constraints.registry import FRONTENDS

    frontend = str(given.get("frontend") or DEFAULT_FRONTEND)
    if frontend not in FRONTENDS:
        return []
    mcore = mcore_version()
    flat = full_configuration(given, mcore=mcore, where=where, base_folder=base_folder)
    found = check(flat, mcore=mcore, frontend=frontend).failures
    return [
        {
            "rule": violation.rule,
            "message": violation.message,
            "fix": violation.fix,
            "fails": violation.doomed,
        }
        for violation in found
    ]


def write_timeline(
    document: Mapping[str, Any], path: Path, *, where: str, base_folder: Path = Path()
) -> None:
    """Write the predicted step of an input document as a trace for Perfetto.

    Raises InputError naming the file for what cannot be timed.
    """
    from tuner.measurement import write_json_atomically
    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError
    from tuner.timing.predicted import predicted_trace

    try:
        document = with_model(document, base_folder)
        trace = predicted_trace(document)
    except InputError as error:
        raise error.at(where) from None
    except (UnsupportedError, DryRunError, ValueError) as error:
        raise InputError(f"cannot be timed: {error}", where=where) from None
    write_json_atomically(path, trace)


def _estimate_lines(path: Path, method: str, run: Mapping[str, Any]) -> int:
    """One JSON answer per input line, in order; a line that cannot be estimated says why."""
    everything_fits = True
    for number, line in numbered_lines(path):
        where = f"{path}:{number}"
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise InputError("is not a JSON object", where=where)
            given, document = (
                completed(
                    expand(
                        document,
                        mcore=mcore_version(),
                        where=where,
                        base=path.parent,
                        effective=effective,
                    ),
                    run,
                )
                for effective in (False, True)
            )
            answer = judged_estimate(
                document, given, where=where, base_folder=path.parent, method=method
            )
        except (ValueError, RecursionError) as error:
            message = str(error) if isinstance(error, InputError) else f"{where}: {error}"
            answer = {"fits": False, "input_error": message}
        everything_fits &= bool(answer["fits"])
        print(json.dumps(answer, default=str), flush=True)
    return 0 if everything_fits else 1


def _print_estimate(answer: Mapping[str, Any], name: str) -> None:
    from rich.table import Table

    out = console()
    verdict = ("fits", "green") if answer["fits"] else ("does not fit", "red")
    peaks = (
        f"; peak {answer['peak_allocated_bytes'] / _GIB:.2f} GiB allocated, "
        f"{answer['peak_reserved_bytes'] / _GIB:.2f} GiB reserved"
    )
    out.print(coloured(f"{name}: ", verdict, peaks))
    for rule in answer["broken_rules"]:
        said = "fails" if rule["fails"] else "invalid"
        out.print(coloured((said, "red"), f": {rule['rule']}: {rule['message']}"))
    if answer.get("step_time_s") is not None:
        out.print(_time_line(answer))
    table = Table(
        "rank", "stage", "allocated GiB", "reserved GiB", "made of (GiB)", box=None, pad_edge=False
    )
    for rank in answer["ranks"]:
        parts = sorted(rank["breakdown"].items(), key=lambda item: -item[1])
        shown = [f"{part} {held / _GIB:.2f}" for part, held in parts if held >= 0.005 * _GIB]
        table.add_row(
            str(rank["rank"]),
            str(rank["stage"]),
            f"{rank['allocated_bytes'] / _GIB:.2f}",
            f"{rank['reserved_bytes'] / _GIB:.2f}",
            ", ".join(shown),
        )
    out.print(table)


def _time_line(answer: Mapping[str, Any]) -> str:
    """Step time with its uncertainty, rates, and the largest parts of the step."""
    spent = dict(answer["time_breakdown"])
    spread = spent.pop("uncertainty", None)
    margin = "" if spread is None else f" \u00b1 {spread:.0%}"
    parts = sorted(spent.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts if seconds >= 0.005)
    return (
        f"step {answer['step_time_s']:.3g} s{margin}, "
        f"{answer['tokens_per_s_per_gpu']:.4g} tokens/s/GPU, "
        f"{answer['tflops_per_gpu']:.4g} TFLOP/s/GPU (MFU {answer['mfu']:.0%}): {shown}"
    )
