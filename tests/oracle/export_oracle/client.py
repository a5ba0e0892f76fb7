"""The test side: starts a worker for a version, and compares what it holds with a candidate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from constraint_oracle import wheels
from constraint_oracle.client import SOURCES

OVERRIDE_PACKAGES = (
    ("hydra-core", "1.3.2"),
    ("omegaconf", "2.3.0"),
    ("antlr4-python3-runtime", "4.9.3"),
)
"""What Megatron Bridge parses overrides with; the last has a source archive only."""


def override_packages(cache: Path = wheels.CACHE) -> Path:
    """Folder with the packages of OVERRIDE_PACKAGES, fetched with pip where missing.

    Raises WheelUnavailableError where pip cannot deliver them.
    """
    target = cache / "override-packages"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{name}=={version}" for name, version in OVERRIDE_PACKAGES]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary=antlr4-python3-runtime", "--dest", folder, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode != 0:
            raise wheels.WheelUnavailableError(f"pip cannot deliver {names}: {done.stderr[-300:]}")
        partial = Path(tempfile.mkdtemp(dir=_made(cache)))
        for archive in sorted(Path(folder).iterdir()):
            _unpack(archive, partial)
    with contextlib.suppress(OSError):  # another process was faster
        partial.rename(target)
    shutil.rmtree(partial, ignore_errors=True)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as source:
        # Filters of tarfile came with Python 3.11.4: only plain files of the package are taken.
        wanted = [m for m in source.getmembers() if m.isreg() and "/src/antlr4/" in m.name]
        assert not [m for m in wanted if Path(m.name).is_absolute() or ".." in m.name.split("/")]
        source.extraction_filter = getattr(tarfile, "data_filter", None)
        source.extractall(folder, members=wanted)
        package = next(Path(folder).glob("*/src/antlr4"))
        shutil.copytree(package, target / "antlr4")


def training_folder(mcore: str, checkout: Path | None = None) -> Path | None:
    """Megatron-LM's `megatron/training`: in the wheel from 0.17 on, else of a checkout."""
    shipped = wheels.unpacked("megatron-core", mcore) / "megatron" / "training"
    if shipped.is_dir():
        return shipped
    found = checkout / "megatron" / "training" if checkout else None
    return found if found is not None and found.is_dir() else None


@contextlib.contextmanager
def worker(mcore: str, training: Path | None = None) -> Iterator[Any]:
    """A function that asks one question of Megatron-LM, or of Megatron Bridge without `training`.

    It raises RuntimeError with the worker's last words where the worker died.
    """
    path = [wheels.unpacked("megatron-core", mcore)]
    command = [sys.executable, "-m", "export_oracle.worker"]
    if training is None:
        path.append(wheels.unpacked("megatron-bridge", wheels.BRIDGE_OF_MCORE[mcore]))
        path.append(override_packages())
    else:
        command += ["--megatron-lm", str(training)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(one) for one in (*path, SOURCES)),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )

        def ask(question: Mapping[str, Any]) -> dict[str, Any]:
            assert running.stdin is not None
            assert running.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                running.stdin.write(json.dumps(question) + "\n")
                running.stdin.flush()
            line = running.stdout.readline()
            if not line:
                errors.seek(0)
                raise RuntimeError(errors.read()[-2000:])
            return json.loads(line)

        try:
            yield ask
        finally:
            running.kill()
            running.communicate()
