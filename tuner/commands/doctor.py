"""`tuner doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from tuner.commands.output import coloured, console, print_json

Status = Literal["ok", "missing", "optional", "problem"]
_COMMAND_TIMEOUT_S = 10.0
_TRACKING_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `needed_for` says who misses it; `command` gets it."""

    name: str
    status: Status
    found: str
    needed_for: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    module: str
    needed_for: str
    required: bool
    command: str


_PACKAGES = (
    _Package("torch", "torch", "dry runs and trials", True, "pip install 'torch>=2.6'"),
    _Package(
        "megatron-core", "megatron.core", "estimates and trials", True, "pip install megatron-core"
    ),
    _Package("ray", "ray", "tuner tune", True, "pip install 'ray[tune]>=2.40'"),
    _Package("optuna", "optuna", "the search", True, "pip install 'optuna>=5.0'"),
    _Package("mlflow", "mlflow", "records of studies", True, "pip install 'mlflow>=3.0'"),
    _Package(
        "transformer-engine",
        "transformer_engine",
        "trials on GPUs: FP8, graphs, fused layers",
        False,
        "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.6'",
    ),
    _Package(
        "megatron-bridge",
        "megatron.bridge",
        "trials of Megatron Bridge recipes",
        False,
        "pip install megatron-bridge",
    ),
    _Package(
        "flash-attn",
        "flash_attn",
        "the flash attention backend of Transformer Engine",
        False,
        "pip install --no-build-isolation flash-attn",
    ),
    _Package(
        "deep-ep",
        "deep_ep",
        "the flex dispatcher of mixture-of-experts models",
        False,
        "see https://github.com/deepseek-ai/DeepEP for its build",
    ),
)


def run_doctor(tracking_uri: str | None, *, as_json: bool) -> int:
    """Look and print; 0 where nothing required is missing, else 3."""
    checks = list(examine(tracking_uri))
    ready = not any(check.status in ("missing", "problem") for check in checks)
    if as_json:
        print_json({"ready": ready, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, ready)
    return 0 if ready else 3


def examine(tracking_uri: str | None) -> Iterator[Check]:
    """Every check, in the order in which things are needed."""
    yield _python()
    for package in _PACKAGES:
        yield _package(package)
    yield _core_version()
    yield from _devices()
    yield _links()
    yield _tracking(tracking_uri)
    yield from _host()


def _python() -> Check:
    version = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return Check(
        "python",
        "ok" if fits else "problem",
        version,
        "everything (3.10 to 3.13)",
        "" if fits else "install Python 3.11 and make a new environment",
    )


def _package(package: _Package) -> Check:
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        version = "installed, version unknown" if _can_find(package.module) else ""
    if version:
        return Check(package.name, "ok", version, package.needed_for)
    status: Status = "missing" if package.required else "optional"
    return Check(package.name, status, "not installed", package.needed_for, package.command)


def _can_find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _core_version() -> Check:
    """Whether the rules know the installed Megatron-Core."""
    from tuner.configuration import mcore_version
    from tuner.constraints.registry import MCORE_VERSIONS, resolve_version

    known = ", ".join(MCORE_VERSIONS)
    version = mcore_version()
    try:
        judged = resolve_version(version)
    except ValueError:
        return Check(
            "rules",
            "problem",
            f"Megatron-Core {version} is not one of {known}",
            "tuner check",
            f"pip install megatron-core=={MCORE_VERSIONS[-1]}",
        )
    return Check("rules", "ok", f"those of Megatron-Core {judged} (known: {known})", "tuner check")


def _devices() -> Iterator[Check]:
    driver = _output(
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,compute_cap",
        "--format=csv,noheader",
    )
    gpus = [line.strip() for line in (driver or "").splitlines() if line.strip()]
    if not gpus:
        yield Check(
            "gpus",
            "optional",
            "none (nvidia-smi shows no GPU)",
            "trials on GPUs; plans, estimates and CPU trials work without",
            "run on a GPU node; in a container start it with --gpus all",
        )
        return
    yield Check("gpus", "ok", f"{len(gpus)} x {gpus[0]}", "trials on GPUs")
    yield _torch_sees(len(gpus))


def _torch_sees(count: int) -> Check:
    """Whether the installed PyTorch can use the GPUs; asked in a process of its own.

    CUDA must not be initialised in the process that later forks dry-run workers.
    """
    code = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"
    answer = _output(sys.executable, "-c", code, timeout_s=60.0)
    words = (answer or "0 None").split()
    if words[0] == str(count):
        return Check("torch on gpus", "ok", f"CUDA {words[1]}", "trials on GPUs")
    return Check(
        "torch on gpus",
        "problem",
        f"PyTorch sees {words[0]} of {count} GPUs (built for CUDA {words[1]})",
        "trials on GPUs",
        "install a CUDA build of PyTorch: see https://pytorch.org/get-started/locally",
    )


def _links() -> Check:
    """Links between the GPUs, and adapters to other nodes."""
    topology = _output("nvidia-smi", "topo", "-m") or ""
    links = sorted(set(re.findall(r"\bNV\d+\b", topology)))
    adapters = _adapters()
    found = []
    if links:
        found.append(f"NVLink ({', '.join(links)})")
    if adapters:
        found.append(f"RDMA adapters {', '.join(adapters)}")
    if found:
        return Check("links", "ok", "; ".join(found), "layouts over GPUs and nodes")
    return Check(
        "links", "optional", "no NVLink and no RDMA adapter", "layouts over several GPUs and nodes"
    )


def _adapters() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def _tracking(uri: str | None) -> Check:
    """Whether the MLflow server answers; without one, studies keep their records in a file."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri or not uri.startswith(("http://", "https://")):
        place = uri or "an SQLite file in each study directory"
        return Check("mlflow tracking", "ok", place, "records of studies")
    import urllib.error
    import urllib.request

    health = uri.rstrip("/") + "/health"
    try:
        with urllib.request.urlopen(health, timeout=_TRACKING_TIMEOUT_S) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, ValueError) as error:
        return Check(
            "mlflow tracking",
            "problem",
            f"{uri} does not answer: {getattr(error, 'reason', error)}",
            "records of studies",
            "check the address and the network, or start one: mlflow server --port 5000",
        )
    if status in (401, 403):
        command = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN)"
        return Check("mlflow tracking", "problem", f"{uri} wants a login", "records", command)
    return Check("mlflow tracking", "ok", f"{uri} answers ({status})", "records of studies")


def _host() -> Iterator[Check]:
    import psutil

    cores, memory = psutil.cpu_count() or 1, psutil.virtual_memory().total / 2**30
    yield Check("host", "ok", f"{cores} cores, {memory:.0f} GiB", "dry runs, offload")
    try:
        shared = shutil.disk_usage("/dev/shm").total / 2**30
    except OSError:
        return
    small = shared < 1.0
    yield Check(
        "/dev/shm",
        "problem" if small else "ok",
        f"{shared:.1f} GiB",
        "Ray, data loaders and NCCL",
        "start the container with --ipc=host or --shm-size=16g" if small else "",
    )


def _output(*command: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str | None:
    """What a command prints; None where it does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


_MARKS = {
    "ok": ("ok", "green"),
    "missing": ("missing", "red"),
    "problem": ("problem", "red"),
    "optional": ("not here", "yellow"),
}


def _print(checks: list[Check], ready: bool) -> None:
    from rich.table import Table

    out = console()
    table = Table("", "what", "found", "needed for", box=None, pad_edge=False)
    for check in checks:
        table.add_row(coloured(_MARKS[check.status]), check.name, check.found, check.needed_for)
    out.print(table)
    for check in checks:
        if check.command:
            out.print(f"{check.name}: {check.command}")
    out.print("ready" if ready else "not ready: see what is missing above")
