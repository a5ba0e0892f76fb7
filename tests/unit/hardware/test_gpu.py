"""GPU figures: names, plausibility, and a source beside each number."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from tuner.errors import InputError
from tuner.hardware import Gpu, get_gpu, gpu_names

ENTRIES = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (resources.files("tuner.hardware") / "gpus").iterdir()
}
GPUS = [get_gpu(name) for name in gpu_names()]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("h100_pcie", "H100-PCIe-80GB"),
        ("A100 SXM4 80GB", "A100-SXM-80GB"),
        ("B200-SXM-180GB", "B200"),
        ("gb300", "GB300"),
        ("MI300X-192GB", "MI300X"),
    ],
)
def test_gpus_are_found_under_their_usual_spellings(spelling, name):
    assert get_gpu(spelling).name == name


def test_an_unknown_gpu_is_answered_with_the_nearest_one():
    with pytest.raises(InputError, match=r"unknown GPU 'H20O'.*did you mean 'h200'"):
        get_gpu("H20O")


def test_no_two_gpus_share_a_spelling():
    spellings = [
        "".join(c for c in spelling.lower() if c.isalnum())
        for entry in ENTRIES.values()
        for spelling in {entry["name"], *entry["aliases"]}
    ]
    assert len({*spellings}) >= len(ENTRIES)
    owners: dict[str, str] = {}
    for entry in ENTRIES.values():
        for spelling in (entry["name"], *entry["aliases"]):
            key = "".join(c for c in spelling.lower() if c.isalnum())
            assert owners.setdefault(key, entry["name"]) == entry["name"]


@pytest.mark.parametrize("file", sorted(ENTRIES))
def test_every_figure_stands_beside_its_source(file):
    def figures(node: object) -> list[dict]:
        if not isinstance(node, dict):
            return []
        if "value" in node:
            return [node]
        return [figure for child in node.values() for figure in figures(child)]

    entry = ENTRIES[file]
    bare = {key for key, value in entry.items() if isinstance(value, (int, float))}
    assert not bare
    assert len(figures(entry)) >= 12
    assert all(isinstance(figure.get("source"), str) for figure in figures(entry))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_figures_are_plausible_together(gpu: Gpu):
    assert 0.9 < gpu.usable_memory_bytes / gpu.memory_bytes < 1.08  # GB printed, GiB-sized stacks
    assert gpu.peak_flops["tf32"] * 2 == pytest.approx(gpu.peak_flops["bf16"], rel=0.01)
    if "fp8" in gpu.peak_flops:
        assert gpu.peak_flops["fp8"] == pytest.approx(2 * gpu.peak_flops["bf16"], rel=0.01)
    balance = gpu.peak_flops["bf16"] / gpu.memory_bandwidth_bytes_per_s
    assert 100 < balance < 400  # operations a byte
    assert gpu.network_bandwidth_bytes_per_s < gpu.link_bandwidth_bytes_per_s
    assert gpu.link_domain_gpus >= 2
