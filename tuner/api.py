"""The Python API: what the commands do, as functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.constraints import CheckResult
    from tuner.formats import Exported


def check(
    document: Mapping[str, Any], *, mcore: str | None = None, frontend: str = "mcore"
) -> CheckResult:
    """The verdict of the rules on `{"model", "world_size", "config"}` or a flat configuration.

    `mcore` is a Megatron-Core version (default: the installed one), `frontend` one of "mcore",
    "bridge" and "megatron-lm". Raises InputError (a ValueError) where the document cannot be read
    as a configuration, ValueError for an unknown version or front end.
    """
    from tuner.configuration import full_configuration, mcore_version
    from tuner.constraints import check as check_flat

    mcore = mcore or mcore_version()
    flat = full_configuration(document, mcore=mcore, where="configuration")
    return check_flat(flat, mcore=mcore, frontend=frontend)


def estimate(document: Mapping[str, Any], *, method: str = "dryrun") -> dict[str, Any]:
    """What `{"model", "world_size", "seq_length", "global_batch_size", "gpu", "config"}` needs.

    `method` is "dryrun" (full dry runs) or "composed" (profiles of a few layers). Returns the
    document of `tuner estimate`: peak bytes per rank, what they are made of, step time, and the
    rules by which the configuration is invalid or its run fails (`broken_rules`). Raises InputError
    for a document that cannot be estimated.
    """
    from tuner.commands.estimate import judged_estimate

    if method not in ("dryrun", "composed"):
        raise ValueError(f"method={method!r} is neither 'dryrun' nor 'composed'")
    return judged_estimate(document, document, where="configuration", method=method)


def export(document: Mapping[str, Any], to: str, *, mcore: str | None = None) -> Exported:
    """A configuration as "bridge-cli", "bridge-yaml", "bridge-python", "megatron-args" or "yaml".

    `document` is `{"model", "world_size", "config"}` or a flat configuration; `mcore` the
    Megatron-Core version to write for (default: the installed one). Raises InputError for a
    document, form or version that cannot be used.
    """
    from tuner.configuration import mcore_version
    from tuner.formats import export_document

    return export_document(document, to, mcore=mcore or mcore_version())


def plan(job: str | Path, *, top: int = 10, confirm: int = 2) -> dict[str, Any]:
    """The best candidates of a job file (or a shipped job by name), without a GPU.

    Returns the document of `tuner plan`; `confirm` finalists are confirmed by full dry runs.
    Raises InputError for a bad job or one that names no GPU.
    """
    from tuner.commands.plan import PlanRequest, plan_document
    from tuner.job import find_job, load_job

    file = find_job(Path(job))
    return plan_document(
        load_job(file),
        PlanRequest(top, confirm),
        where=str(file),
        base_folder=file.resolve().parent,
    )


def tune(
    job: str | Path | None = None,
    *,
    study: str | Path | None = None,
    resume: str | Path | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Run a job file (or a shipped job by name), or go on with the study in `resume`.

    Returns the summary document, as `summary.json` holds it. Raises InputError for a bad job and
    EnvironmentLacksError where MLflow, Ray or a package is missing.
    """
    from tuner.commands.tune import open_run, run_study

    prepared, directory = open_run(
        None if job is None else Path(job),
        None if study is None else Path(study),
        None if resume is None else Path(resume),
        None,
    )
    return run_study(prepared, directory, address, resume=resume is not None).summary
