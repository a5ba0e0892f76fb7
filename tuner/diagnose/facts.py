"""What a log says besides its errors: progress, memory reports, environment and configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.diagnose.log import Line, Log

_ITERATION = re.compile(r"\biteration\s+(\d{1,12})\s*/\s*(\d{1,12})\s*\|(.*)")
_STEP_TIME = re.compile(r"elapsed time per iteration \(ms\):\s*(\d{1,12}(?:\.\d+)?)")
_DONE = re.compile(r"\[after training is done\]|training (?:is )?(?:done|finished|complete)", re.I)
_MEMORY = re.compile(
    r"\[Rank (\d{1,9})\].*?memory \((MB|GB)\).*?max[ -]allocated(?:-gigabytes)?:\s*"
    r"(\d{1,12}(?:\.\d+)?)",
    re.I,
)
_ENVIRONMENT = re.compile(
    r"(?:^|[\s'\"])((?:PYTORCH|NCCL|NVTE|CUDA|TORCH|NVSHMEM)_[A-Z0-9_]+)[=:]\s?['\"]?([^\s'\",;]+)"
)
_SUGGESTION = re.compile(
    r"try setting|avoid fragmentation|should be set|please set|set .* to", re.I
)
_ARGUMENT = re.compile(r"\s{2,}(\w+) \.{2,} (.*)$")
_SUMMARY = re.compile(r"\s{2}(\w+): (.*?)(?:\s{2}\(Mcore default: .*\))?$")
_SECTION = re.compile(r"\[(\w+)\](?: Non-default values|:)")
_FROM_ARGUMENTS = {
    "num_experts": "num_moe_experts",
    "te_rng_tracker": "use_te_rng_tracker",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}


@dataclass(slots=True)
class Facts:
    """What was found. `iterations` are lines that report one, with its number and the total."""

    iterations: list[tuple[Line, int, int]] = field(default_factory=list)
    step_times_ms: list[float] = field(default_factory=list)
    not_a_number: Line | None = None
    done: Line | None = None
    peak_allocated_bytes: dict[int, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def expandable(self) -> bool:
        """Whether the environment says that segments are expandable."""
        values = (
            self.environment.get(name, "")
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
        )
        return any("expandable_segments:true" in value.lower() for value in values)

    @property
    def completed(self) -> bool:
        """Whether the last iteration of the run was reported, or the end of training."""
        return self.done is not None or any(at == total for _, at, total in self.iterations)

    def progress_after(self, number: int) -> int:
        """Iterations reported behind a line."""
        return sum(line.number > number for line, _, _ in self.iterations)


def read_facts(log: Log) -> Facts:
    """Everything in one pass."""
    facts = Facts()
    section = ""
    for line in log:
        text = line.text
        _read_progress(line, facts)
        memory = _MEMORY.search(text)
        if memory is not None:
            unit = 2**20 if memory[2].upper() == "MB" else 10**9
            facts.peak_allocated_bytes[int(memory[1])] = int(float(memory[3]) * unit)
        if not _SUGGESTION.search(text):
            facts.environment.update(_ENVIRONMENT.findall(text))
        section = _read_setting(text, section, facts)
    return facts


def is_progress(text: str) -> bool:
    """Whether a line reports an iteration."""
    return _ITERATION.search(text) is not None


def _read_progress(line: Line, facts: Facts) -> None:
    match = _ITERATION.search(line.text)
    if match is None:
        if facts.done is None and _DONE.search(line.text):
            facts.done = line
        return
    facts.iterations.append((line, int(match[1]), int(match[2])))
    time = _STEP_TIME.search(match[3])
    if time is not None:
        facts.step_times_ms.append(float(time[1]))
    if facts.not_a_number is None and re.search(r"(?:loss|grad norm): (?:nan|inf)", match[3], re.I):
        facts.not_a_number = line
    skipped = re.search(r"number of nan iterations:\s*([1-9]\d*)", match[3])
    if facts.not_a_number is None and skipped is not None:
        facts.not_a_number = line


def _read_setting(text: str, section: str, facts: Facts) -> str:
    """Settings as Megatron-LM and Megatron Bridge print them at the start of a run."""
    argument = _ARGUMENT.match(text)
    if argument is not None:
        name = _FROM_ARGUMENTS.get(argument[1], argument[1])
        facts.config.setdefault(name, _literal(argument[2]))
        return section
    heading = _SECTION.match(text)
    if heading is not None:
        return heading[1]
    setting = _SUMMARY.match(text) if section else None
    if setting is not None:
        facts.config.setdefault(setting[1], _literal(setting[2]))
    elif text.startswith("="):
        return ""
    return section


def _literal(text: str) -> Any:
    named = re.fullmatch(r"<[\w.]+\.(\w+): .*>|torch\.(\w+)", text.strip())
    if named is not None:
        return named[1] or _DTYPES.get(named[2], named[2])
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def known_config(facts: Facts, mcore: str) -> Mapping[str, Any]:
    """The printed settings that the rules know and whose values they can read."""
    from tuner.constraints.fields import catalogue, type_problem
    from tuner.constraints.registry import resolve_version

    known, version = catalogue(), resolve_version(mcore)
    config = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in facts.config.items()
        if name in known and version in known[name].default
    }
    readable = {
        name: value for name, value in config.items() if type_problem(known[name], value) is None
    }
    if facts.environment:
        readable["env"] = dict(facts.environment)
    return readable
