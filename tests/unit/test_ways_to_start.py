"""The Slurm script, the KubeRay manifest and the Dockerfile, as far as they go on one machine."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shlex
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "docs" / "clusters"
CRD = ROOT / "tests" / "data" / "kuberay" / "rayjob_v1.json.gz"

FAKE_SRUN = """#!/usr/bin/env bash
trap 'echo told >> "$CALLS"; exit 1' TERM
printf '%s\\n' "$*" >> "$CALLS"
case "$*" in
  *"hostname --ip-address"*) echo "10.0.0.1 fe80::1" ;;
  *"ray start --head"*|*"ray start --address"*) exec sleep 60 ;;
  *"tuner tune"*)
    [[ -n "${HOLD:-}" ]] && { sleep 60 & wait; }
    exit "${STATUS:-0}" ;;
esac
"""


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused: the API server drops them without a word."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: closed(item) for name, item in value.items()}
        elif key in ("enum", "default", "required"):
            result[key] = value
        else:
            result[key] = closed(value)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def errors_of(manifest: dict[str, Any]) -> list[str]:
    from jsonschema import Draft202012Validator

    schema = closed(json.loads(gzip.decompress(CRD.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    found = Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in found]


def test_the_rayjob_manifest_is_what_kuberay_takes() -> None:
    manifest = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())
    assert errors_of(manifest) == []
    command = shlex.split(manifest["spec"]["entrypoint"])
    assert command[:2] == ["tuner", "tune"]
    cluster = manifest["spec"]["rayClusterSpec"]
    pinned = re.search(r"^ray==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]


def test_the_schema_refuses_what_it_does_not_know() -> None:
    manifest = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 8
    manifest["spec"]["backoffLimit"] = "none"
    errors = "; ".join(errors_of(manifest))
    assert "'replica' was unexpected" in errors
    assert "'none' is not of type 'integer'" in errors


@pytest.fixture
def slurm(tmp_path: Path):
    """Run the script with fakes of Slurm's commands; gives the process and the calls it made."""
    bin_folder, calls = tmp_path / "bin", tmp_path / "calls"
    bin_folder.mkdir()
    calls.touch()
    fakes = {"srun": FAKE_SRUN, "scontrol": "#!/usr/bin/env bash\nprintf 'n1\\nn2\\nn3\\n'\n"}
    for name, text in fakes.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(stat.S_IRWXU)

    def start(*arguments: str, **variables: str) -> tuple[subprocess.Popen[str], Path]:
        environment = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(calls),
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_GPUS_ON_NODE": "8",
            **variables,
        }
        process = subprocess.Popen(
            ["bash", str(CLUSTERS / "slurm.sbatch"), *arguments],
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process, calls

    started: list[subprocess.Popen[str]] = []
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


def test_the_slurm_script_starts_one_ray_per_node_and_the_tuner_beside_the_head(slurm) -> None:
    process, calls = slurm("job with space.yaml", "--resume", "study", STATUS="1")
    assert process.wait(timeout=60) == 1  # the tuner's own answer
    deadline = time.monotonic() + 60
    while calls.read_text().count("ray start") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # started in the background, beside a tuner that has ended at once
    lines = calls.read_text().splitlines()
    (head,) = [line for line in lines if "ray start --head" in line]
    assert "--nodelist=n1 " in head
    assert "--node-ip-address=10.0.0.1 --port=6379 --num-gpus=8" in head
    assert "--dashboard-host=127.0.0.1" in head
    (workers,) = [line for line in lines if "ray start --address=10.0.0.1:6379" in line]
    assert "--nodes=2 --ntasks=2" in workers
    assert "--nodelist=n2,n3" in workers
    (tuner,) = [line for line in lines if "tuner tune" in line]
    assert tuner.endswith("tuner tune job with space.yaml --resume study --address 10.0.0.1:6379")


def test_the_slurm_script_hands_the_warning_of_the_time_limit_to_the_tuner(slurm) -> None:
    process, calls = slurm("job.yaml", HOLD="1")
    while "tuner tune" not in calls.read_text():
        assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=60) == 1
    assert "told" in calls.read_text()


def test_the_slurm_script_wants_a_job_file(slurm) -> None:
    process, _ = slurm()
    assert process.wait(timeout=60) == 2
    assert process.stderr is not None
    assert "usage" in process.stderr.read()


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in pairs]


def test_the_dockerfile_copies_what_exists_and_keeps_the_containers_packages() -> None:
    parsed = instructions((CLUSTERS / "Dockerfile").read_text())
    names = [name for name, _ in parsed]
    assert names[:2] == ["ARG", "FROM"]
    assert set(names) <= {
        *("ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD")
    }
    for name, rest in parsed:
        if name == "COPY":
            *sources, target = rest.split()
            assert target.startswith("/opt/megatron-tuner")
            assert all((ROOT / source).exists() for source in sources)
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)
    users = [rest for name, rest in parsed if name == "USER"]
    assert users[-1] not in ("root", "0")
    (install,) = [rest for name, rest in parsed if "pip install" in rest]
    added = shlex.split(install.partition("&&")[0])[4:]
    wanted = yaml.safe_load(json.dumps(_dependencies()))
    left = {_name(word) for word in wanted} - {_name(word) for word in added}
    assert left == {"megatron-core", "torch", "numpy", "pyyaml"}  # NeMo's container has these
    assert not {_name(word) for word in added} & {"torch", "megatron-core", "transformer-engine"}


def _dependencies() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert block is not None
    return re.findall(r'"([^"]+)"', block[1])


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=! ]", requirement)[0].lower()
