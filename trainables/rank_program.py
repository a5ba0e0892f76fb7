"""What every program that a launcher starts once per rank does around its own work."""

from __future__ import annotations

import argparse
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from trainables.error_file import recording_errors
from trainables.processes import leave
from tuner.measurement import RESULT_FILE, TrialResult, write_json_atomically


def run_program(name: str, description: str | None, work: Callable[[Path, Path], None]) -> NoReturn:
    """Read `--spec FILE --output DIR`, do `work(spec, output)`, and end this process.

    The output folder is made where it is missing. What the work raises is left in the error file
    of the rank and on standard error (exit code 1).
    """
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of a TrialSpec")
    parser.add_argument("--output", type=Path, required=True, help=f"directory for {RESULT_FILE}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        recording_errors(work)(arguments.spec, arguments.output)
    except Exception:
        traceback.print_exc()
        leave(1)
    leave(0)


def report_result(result: TrialResult, output_dir: Path) -> None:
    """Write the result from the first rank of each node, and print how the trial ended."""
    if int(os.environ["LOCAL_RANK"]) != 0:
        return
    write_json_atomically(output_dir / RESULT_FILE, result.to_json())
    print(f"{result.outcome}: {result.reason}" if result.reason else result.outcome)
