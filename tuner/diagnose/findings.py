"""What each kind of evidence in a log says, as findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.constraints.fields import catalogue
from tuner.diagnose.diagnosis import Finding
from tuner.diagnose.facts import Facts, is_progress
from tuner.diagnose.log import Line, Log
from tuner.diagnose.memory import OUT_OF_MEMORY, kind_of, read_numbers
from tuner.diagnose.rule_messages import fix_of, rule_of
from tuner.diagnose.signatures import Fix, signatures
from tuner.diagnose.tracebacks import Raised, exception_of

_MAX_EVIDENCE = 5
_MESSAGE_LINES = 6
_QUOTED = re.compile(r"^\s*(?:\+\s|File \"|assert |raise |\^|#|>>> |\$ )")
_CONFIGURATION_FILES = re.compile(
    r"(?:transformer_config|model_parallel_config|distributed_data_parallel_config"
    r"|optimizer_config|arguments|yaml_arguments|argument_utils|comm_overlap|mixed_precision"
    r"|pipeline_parallel_layer_layout|parallel_state|num_microbatches_calculator"
    r"|bridge/training/config|gpt_provider|mla_provider|optimizer_param_scheduler)\.py$"
)
_LIBRARY_FILES = re.compile(r"(?:^|/)megatron/(?:core|bridge|training|legacy)/[\w/]+\.py$")

HEADROOM = 0.9
"""Ranks below this share of the device had memory left."""

_STAGES: Sequence[tuple[str, re.Pattern[str], str]] = (
    ("graph capture", re.compile(r"cuda_graphs?\.py|graph\.py.*make_graphed|full_cuda_graph"), "."),
    ("checkpoint", re.compile(r"checkpoint(?:ing|s)?\.py|dist_checkpointing/"), "."),
    ("optimizer", re.compile(r"optimizer|fused_adam|adamw?\.py"), "."),
    ("loss", re.compile(r"cross_entropy|fused_cross_entropy|language_module"), "."),
    ("model build", re.compile(r"param_and_grad_buffer|get_model|distributed_data_parallel"), "."),
    ("experts", re.compile(r"/moe/"), "."),
)


def memory_findings(log: Log, raises: Sequence[Raised], facts: Facts) -> Iterator[Finding]:
    """Out-of-memory messages of the CUDA allocator."""
    lines = [line for line in log if OUT_OF_MEMORY.search(line.text)]
    if not lines:
        return
    for line in lines[:_MAX_EVIDENCE]:
        yield _memory_finding(log, line, lines, raises, facts)


def _memory_finding(
    log: Log, line: Line, lines: Sequence[Line], raises: Sequence[Raised], facts: Facts
) -> Finding:
    numbers = read_numbers(_with_followers(log, line))
    cause, confidence, reason = kind_of(numbers, expandable=facts.expandable)
    stage = _stage(line, raises)
    headroom = _ranks_with_headroom(line, lines, facts, numbers.capacity_bytes)
    if cause == "oom_capacity" and headroom and not facts.expandable:
        cause, confidence = "oom_fragmentation", 0.7
        reason = f"one rank failed while {len(headroom)} others had memory left"
    details: dict[str, Any] = dict(numbers.to_json())
    if stage:
        details["stage"] = stage
    where = f" in the {stage}" if stage else ""
    return Finding(
        cause=cause,
        family="memory",
        level="root",
        confidence=confidence,
        title=_OOM_TITLES[cause] + where,
        why=f"{_OOM_WHY[cause]} Here {reason}.",
        evidence=(line, *[other for other in lines if other is not line][: _MAX_EVIDENCE - 1]),
        fix=_memory_fix(cause, stage, facts.config),
        source="PyTorch c10/cuda/CUDACachingAllocator.cpp",
        details=details,
    )


def _with_followers(log: Log, line: Line) -> str:
    """The message with its continuation lines (some frameworks wrap it)."""
    parts = [line.text]
    for follower in log.after(line.number, _MESSAGE_LINES):
        if follower.rank != line.rank or OUT_OF_MEMORY.search(follower.text):
            break
        parts.append(follower.text)
    return " ".join(parts)


def _stage(line: Line, raises: Sequence[Raised]) -> str:
    """What the job did, from the frames of the traceback that ends in this line."""
    frames = next((one.frames for one in raises if one.line.number == line.number), ())
    for frame in reversed(frames):
        for name, pattern, _ in _STAGES:
            if pattern.search(f"{frame.file} {frame.function}"):
                return name
    return ""


def _ranks_with_headroom(
    line: Line, lines: Sequence[Line], facts: Facts, capacity: int | None
) -> list[int]:
    """Ranks that reported a peak well below the device while a single rank failed."""
    failing = {one.rank for one in lines}
    if capacity is None or len(failing) != 1:
        return []
    return [
        rank
        for rank, peak in facts.peak_allocated_bytes.items()
        if peak < HEADROOM * capacity and rank != line.rank
    ]


_OOM_TITLES = {
    "oom_capacity": "GPU memory ran out: the job needs more than the device has",
    "oom_fragmentation": "GPU memory ran out through fragmentation",
    "oom_other_process": "GPU memory ran out because another process uses the device",
    "oom_graph_pools": "GPU memory ran out with CUDA graphs holding much of it",
}
_OOM_WHY = {
    "oom_capacity": "Weights, gradients, optimizer state and activations do not fit together.",
    "oom_fragmentation": (
        "Enough memory was reserved, but no block of it was large enough: the allocator had cut "
        "it into pieces."
    ),
    "oom_other_process": "The device was not free when the job started.",
    "oom_graph_pools": "A captured graph keeps its buffers for its whole life in a private pool.",
}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _memory_fix(cause: str, stage: str, config: Mapping[str, Any]) -> Fix:
    if cause == "oom_fragmentation":
        return Fix({}, EXPANDABLE, ("try the allocator setting alone before paying speed",))
    if cause == "oom_other_process":
        return Fix({}, {}, ("end the other process (nvidia-smi lists it), or take another node",))
    if cause == "oom_graph_pools":
        return Fix({"cuda_graph_impl": "none"}, {}, ("or graph fewer parts of a layer",))
    return _STAGE_FIXES.get(stage, _activation_fix)(config)


def _activation_fix(config: Mapping[str, Any]) -> Fix:
    changes: dict[str, Any] = {}
    if (_whole(config.get("micro_batch_size")) or 1) > 1:
        changes["micro_batch_size"] = (_whole(config["micro_batch_size"]) or 2) // 2
    elif config.get("recompute_granularity") is None:
        experts = config.get("num_moe_experts")
        changes["recompute_granularity"] = "selective"
        changes["recompute_modules"] = ["moe_act"] if experts else ["core_attn", "mlp"]
    elif config.get("recompute_granularity") == "selective":
        changes |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        changes["recompute_num_layers"] = 1
    actions = (
        "tuner plan ranks the layouts that fit; more pipeline stages or tensor-parallel ranks "
        "lower weights and activations per rank",
    )
    return Fix(changes, {}, actions)


def _optimizer_fix(config: Mapping[str, Any]) -> Fix:
    """State appears at the first step: shard it, shrink it, or move it to the host."""
    if not config.get("use_distributed_optimizer"):
        return Fix({"use_distributed_optimizer": True})
    if not config.get("use_precision_aware_optimizer"):
        return Fix({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"})
    return Fix({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5})


def _loss_fix(config: Mapping[str, Any]) -> Fix:
    """Logits of the whole vocabulary stand in fp32 at once."""
    return Fix({"cross_entropy_loss_fusion": True}, {}, ("or a smaller micro-batch, or more TP",))


def _build_fix(config: Mapping[str, Any]) -> Fix:
    """Weights and gradients alone do not fit: recompute cannot help."""
    actions = ("split the model over more ranks: more pipeline stages, tensor or expert ranks",)
    return Fix({}, {}, actions)


def _capture_fix(config: Mapping[str, Any]) -> Fix:
    return Fix({"cuda_graph_impl": "none"}, {}, ("or graph fewer parts of a layer",))


def _expert_fix(config: Mapping[str, Any]) -> Fix:
    """A rank may get far more tokens than its share."""
    changes = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    actions = ("more expert-parallel ranks, or a capacity factor, bound the tokens of one rank",)
    return Fix(changes, {}, actions)


def _checkpoint_fix(config: Mapping[str, Any]) -> Fix:
    actions = ("loading and saving need room for a copy: load optimizer state on the host",)
    return Fix({}, EXPANDABLE, actions)


_STAGE_FIXES = {
    "optimizer": _optimizer_fix,
    "loss": _loss_fix,
    "model build": _build_fix,
    "graph capture": _capture_fix,
    "experts": _expert_fix,
    "checkpoint": _checkpoint_fix,
}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def signature_findings(log: Log) -> Iterator[Finding]:
    """Lines that one of the signatures knows."""
    found: dict[str, list[Line]] = {}
    for line in log:
        if not line.text.strip() or _QUOTED.match(line.text) or is_progress(line.text):
            continue
        for signature in signatures():
            known = found.get(signature.id, [])
            if len(known) < _MAX_EVIDENCE and signature.matches(line.text):
                found.setdefault(signature.id, []).append(line)
    for signature in signatures():
        if signature.id in found:
            yield Finding(
                cause=signature.id,
                family=signature.family,
                level=signature.level,
                confidence=signature.confidence,
                title=signature.title,
                why=signature.why,
                evidence=tuple(found[signature.id]),
                fix=signature.fix,
                source=signature.source,
            )


def rule_findings(
    log: Log, raises: Sequence[Raised], config: Mapping[str, Any], mcore: str, frontend: str
) -> Iterator[Finding]:
    """Refusals of a configuration that a rule knows, in messages and in plain lines."""
    messages = {one.line.number: (one.line, one.message) for one in raises}
    for line in log:
        quoted = _QUOTED.match(line.text) or is_progress(line.text)
        if line.number not in messages and not quoted:
            messages[line.number] = (line, line.text)
    seen: set[str] = set()
    for _, (line, text) in sorted(messages.items()):
        rule = rule_of(" ".join(text.split()))
        if rule is None or rule.name in seen or rule.kind != "error":
            continue
        seen.add(rule.name)
        yield Finding(
            cause=rule.name,
            family="configuration",
            level="root",
            confidence=0.95,
            title=f"The configuration was refused: {rule.what}",
            why="Megatron checks this before it trains; the rule decides it without a launch.",
            evidence=(line,),
            fix=fix_of(rule, config, mcore, frontend),
            source=rule.reference,
            rule=rule.id,
        )


def refusal_findings(log: Log, raises: Sequence[Raised]) -> Iterator[Finding]:
    """Refusals that no rule's message names: raised by configuration code, or naming fields; and
    other checks of the library."""
    refused: set[int] = set()
    for one in raises:
        deepest = one.frames[-1]
        if one.type in _REFUSALS and _CONFIGURATION_FILES.search(deepest.file):
            where = f"{deepest.file.rsplit('/', 1)[-1]}: {deepest.function}"
            said = one.message or "no message; see the asserted line"
            refused.add(one.line.number)
            yield _refused(one.line, f"{one.type} in {where}: {said}", where)
    for line in log:
        named = exception_of(line.text.lstrip())
        if named is None or named[0] not in _REFUSALS:
            continue
        fields = [word for word in _FIELD_NAME.findall(named[1]) if word in catalogue()]
        if fields and _CONDITION.search(named[1]):
            refused.add(line.number)
            yield _refused(line, f"It names {', '.join(dict.fromkeys(fields))}.", "")
    for one in raises:
        checked = one.type in _REFUSALS and _LIBRARY_FILES.search(one.frames[-1].file)
        if checked and one.line.number not in refused:
            yield _failed_check(one)


def _failed_check(one: Raised) -> Finding:
    """A check inside the library that is not one of its configuration classes."""
    deepest = one.frames[-1]
    return Finding(
        cause="megatron_check_failed",
        family="configuration",
        level="root",
        confidence=0.6,
        title="A check inside Megatron stopped the run",
        why=f"{one.message or 'The check has no message.'} A setting that this version does not "
        "support together with the others, a wrong size or type, or a fault of the version.",
        evidence=(one.line,),
        fix=Fix(
            actions=(
                "tuner check CONFIG --fix lists what is wrong and the way out",
                f"read the condition in {deepest.function} of {deepest.file.rsplit('/', 1)[-1]}",
            )
        ),
        source=deepest.file[deepest.file.rindex("megatron/") :],
    )


_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError")
_FIELD_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")
_CONDITION = re.compile(
    r"\b(?:must|should|divisible|multiple|support(?:s|ed)?|require[sd]?|only|cannot|can not|"
    r"incompatible|invalid|expected|needs?|set)\b",
    re.IGNORECASE,
)


def _refused(line: Line, why: str, source: str) -> Finding:
    return Finding(
        cause="configuration_refused",
        family="configuration",
        level="root",
        confidence=0.8 if source else 0.7,
        title="The configuration was refused by Megatron's own checks",
        why=why,
        evidence=(line,),
        fix=Fix(actions=("tuner check CONFIG --fix lists what is wrong and the way out",)),
        source=source,
    )
