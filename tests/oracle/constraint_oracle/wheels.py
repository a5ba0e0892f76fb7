"""Fetches the published wheels with the ordinary pip client and unzips them per version.

The wheels ask for Python 3.12 in their metadata; unzipped onto the path they import on older
interpreters too (see :mod:`constraint_oracle.stubs`), so they are downloaded for a fixed
interpreter and platform and never installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".cache" / "wheels"
DOWNLOAD_TIMEOUT_S = 180.0

#: Megatron Bridge release that is made for each Megatron-Core release (its own pin).
BRIDGE_OF_MCORE = {"0.16.1": "0.3.1", "0.17.0": "0.4.2", "0.18.0": "0.5.1", "0.19.2": "0.6.2"}
MCORE_VERSIONS = tuple(BRIDGE_OF_MCORE)


class WheelUnavailableError(RuntimeError):
    """The wheel is neither cached nor can the package registry be reached."""


def unpacked(package: str, version: str, cache: Path = CACHE) -> Path:
    """Directory that holds the unzipped wheel of ``package==version``, fetched when missing.

    Raises:
        WheelUnavailableError: pip could not deliver the wheel; the message ends with pip's reason.
    """
    target = cache / f"{package}-{version}"
    if not target.is_dir():
        download = cache / f"download-{package}-{version}-{os.getpid()}"
        try:
            _unzip(_download(package, version, download), target)
        finally:
            shutil.rmtree(download, ignore_errors=True)
    return target


def _download(package: str, version: str, directory: Path) -> Path:
    """Runs ``pip download`` for one wheel and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12"]
    command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(directory)]
    command += [f"{package}=={version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise WheelUnavailableError(f"pip download {package}=={version} timed out") from late
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WheelUnavailableError(f"pip cannot deliver {package}=={version}: {reason}")
    return wheels[0]


def _unzip(wheel: Path, target: Path) -> None:
    """Unzips beside the target first, so that a killed run leaves no half directory."""
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial, ignore_errors=True)
        if not target.is_dir():
            raise
