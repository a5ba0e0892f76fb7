"""What the settings that a log prints say about a run that did not fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.diagnose.diagnosis import Finding
from tuner.diagnose.facts import Facts
from tuner.diagnose.log import Line
from tuner.diagnose.signatures import Fix

_WORTH_SAYING = {
    "offloaded_optimizer_is_slow": 0.8,
    "mlp_recompute_needs_dense_layers": 0.85,
    "empty_selection_recomputes_nothing": 0.8,
    "fused_attention_recomputes_itself": 0.7,
    "layernorm_alone_saves_nothing": 0.7,
    "weight_offload_does_nothing": 0.8,
    "double_buffering_does_nothing": 0.8,
    "user_buffers_conflict_with_expandable_segments": 0.7,
}
"""Advice that explains why a run that works is slow or saves nothing, and how sure it makes us."""


def advice_findings(
    facts: Facts, config: Mapping[str, Any], mcore: str, frontend: str
) -> list[Finding]:
    """Advice of the rules on the printed settings; none where the log prints no settings."""
    if len(config) < 3 or not facts.iterations:
        return []
    from tuner.constraints import check
    from tuner.constraints.registry import load_rules

    names = {rule.id: rule.name for rule in load_rules() if rule.kind == "advice"}
    found = []
    for violation in check(config, mcore=mcore, frontend=frontend).violations:
        name = names.get(violation.rule, "")
        if violation.kind != "advice" or name not in _WORTH_SAYING:
            continue
        env = (violation.fix or {}).get("env")
        changes = {k: v for k, v in (violation.fix or {}).items() if k != "env"}
        found.append(
            Finding(
                cause=name,
                family="advice",
                level="hint",
                confidence=_WORTH_SAYING[name],
                title=violation.message,
                why="The run works, but these settings are unwise.",
                evidence=(_last_step(facts),),
                fix=Fix(changes, env if isinstance(env, dict) else {}),
                source=violation.reference,
                rule=violation.rule,
            )
        )
    return found


def _last_step(facts: Facts) -> Line:
    return facts.iterations[-1][0]
