"""CUDA graphs: field names of each Megatron-Core version, and when graphs are captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainables.errors import TrialSpecError

FULL_ITERATION = "full_iteration"


def translate_cuda_graph_fields(
    fields: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """The CUDA-graph fields of `fields` in the spelling of the installed Megatron-Core.

    Versions 0.16 and 0.17 name what is captured `cuda_graph_scope` and treat the whole iteration
    as a scope of the `local` implementation; from 0.18 it is `cuda_graph_modules` and an
    implementation of its own (`TransformerConfig` of each version). Either spelling is accepted.
    `known` holds the field names of the installed `TransformerConfig`. Empty when `fields` asks
    for no graph.
    """
    implementation = fields.get("cuda_graph_impl") or "none"
    scope = fields.get("cuda_graph_modules")
    if scope is None:
        scope = fields.get("cuda_graph_scope")
    modules = _as_list(scope)
    if FULL_ITERATION in modules:
        implementation = FULL_ITERATION
        modules = [module for module in modules if module != FULL_ITERATION]
    if implementation == "none":
        return {}
    if implementation == FULL_ITERATION and modules:
        raise TrialSpecError(
            f"cuda_graph_impl='full_iteration' captures everything; remove {modules} from "
            "cuda_graph_modules"
        )
    if "cuda_graph_modules" in known:
        return {"cuda_graph_impl": implementation, "cuda_graph_modules": modules}
    if implementation == FULL_ITERATION:
        return {"cuda_graph_impl": "local", "cuda_graph_scope": [FULL_ITERATION]}
    return {"cuda_graph_impl": implementation, "cuda_graph_scope": modules}


def _as_list(scope: object) -> list[str]:
    if scope is None:
        return []
    names = scope.split(",") if isinstance(scope, str) else list(scope)  # type: ignore[call-overload]
    # "full" is the old spelling of an empty scope: the whole layer.
    return [str(name) for name in names if name and name != "full"]


def steps_until_captured(transformer: Mapping[str, Any]) -> int:
    """Steps after which no more graph is captured, for `TransformerConfig` arguments.

    0 without graphs. Graphs are captured after `cuda_graph_warmup_steps` eager steps (3 unless
    set); the replay after that may still allocate.
    """
    if transformer.get("cuda_graph_impl", "none") == "none":
        return 0
    return int(transformer.get("cuda_graph_warmup_steps", 3)) + 2
