"""What is installed is pinned, and the code keeps to what is safe with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    line.split("==")
    for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
SOURCES = [
    path
    for folder in ("tuner", "trainables", "search_spaces", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def requirements() -> list[Requirement]:
    """Dependencies of the package and of its development extra."""
    text = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|dev) = \[(.*?)^\]", text, re.M | re.S)
    assert len(blocks) == 2
    return [Requirement(one) for block in blocks for one in re.findall(r'"([^"]+)"', block)]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_has_a_pin_that_its_range_allows(requirement: Requirement) -> None:
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PINS.items()}
    pinned = names.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
    assert pinned is not None
    assert requirement.specifier.contains(pinned, prereleases=True)


def test_no_shell_no_unsafe_yaml_and_no_remote_code() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg in ("shell", "trust_remote_code"):
                    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    found += [] if off else [f"{path}:{node.lineno} {keyword.arg}"]
            name = ast.unparse(node.func)
            if name in ("os.system", "os.popen", "eval", "yaml.unsafe_load", "yaml.full_load"):
                found.append(f"{path}:{node.lineno} {name}")
    assert found == []
