"""The folder of a study: what it holds and how it is made.

job.yaml      the job as given                  study.json   the study's identity
study.db      Optuna storage, the only record   mlflow.db    MLflow records (unless remote)
best.yaml     the best candidate                summary.json everything measured
calibration.json  the machine's rates as refined by the study's trials
trials/NNNN/  spec, logs and result of a trial  ray/         Ray Tune's own files
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import InputError
from tuner.files import read_text
from tuner.measurement import write_json_atomically


@dataclass(frozen=True, slots=True)
class StudyDirectory:
    """An existing study folder. `study_id` is unique across studies and stores.

    `job_folder` is where the job file lay: paths in the job are relative to it.
    """

    path: Path
    study_id: str
    job_folder: Path

    @property
    def storage_url(self) -> str:
        """Optuna storage inside the folder."""
        return f"sqlite:///{self.path.resolve()}/study.db"

    @property
    def job_path(self) -> Path:
        return self.path / "job.yaml"

    @property
    def best_path(self) -> Path:
        return self.path / "best.yaml"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    def trial_path(self, number: int) -> Path:
        """Folder of one trial's logs."""
        return self.path / "trials" / f"{number:04d}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study for this process. Raises InputError where another one has it."""
        with open(self.path / ".lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    "another `tuner tune` is running this study",
                    where=str(self.path),
                    fix="wait for it, or stop it",
                ) from None
            yield


def create_study_directory(path: Path, job_path: Path) -> StudyDirectory:
    """Make a new study folder with a copy of the job; nothing is left where that fails.

    Raises InputError where the folder exists already with something in it or cannot be made.
    """
    if (path / "study.json").exists():
        raise InputError(
            "holds a study already", where=str(path), fix=f"use --resume {path}, or another --study"
        )
    job_text = read_text(job_path)
    made = not path.exists()
    try:
        if path.exists() and any(path.iterdir()):
            raise InputError("is not empty", where=str(path), fix="choose another --study")
        path.mkdir(parents=True, exist_ok=True)
        (path / "trials").mkdir()
        (path / "job.yaml").write_text(job_text)
        identity = {"study_id": uuid.uuid4().hex, "job_folder": str(job_path.resolve().parent)}
        write_json_atomically(path / "study.json", identity)
    except OSError as error:
        if made:
            shutil.rmtree(path, ignore_errors=True)
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            fix="choose a writable folder with --study",
        ) from None
    return StudyDirectory(path, identity["study_id"], Path(identity["job_folder"]))


def open_study_directory(path: Path) -> StudyDirectory:
    """An existing study folder. Raises InputError where it is none."""
    try:
        identity = json.loads(read_text(path / "study.json"))
        study_id, job_folder = str(identity["study_id"]), Path(identity["job_folder"])
    except InputError:
        raise InputError(
            "is not a study directory (it has no study.json)",
            where=str(path),
            fix="give the folder that `tuner tune` printed",
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError("is damaged", where=str(path / "study.json")) from None
    if not os.access(path, os.W_OK):
        raise InputError("cannot be written", where=str(path), fix="check its permissions")
    return StudyDirectory(path, study_id, job_folder)


def free_path(folder: Path, name: str) -> Path:
    """The first of NAME, NAME-2, NAME-3, ... that does not exist in `folder`."""
    path, count = folder / name, 1
    while path.exists():
        count += 1
        path = folder / f"{name}-{count}"
    return path
