"""Random valid candidates, exported, applied to the real packages and compared field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from constraint_oracle.candidate import completed
from constraint_oracle.generator import CandidateGenerator

from tuner.candidate import Candidate
from tuner.constraints import check
from tuner.formats import export_document
from tuner.formats.bridge_fields import paths_of
from tuner.formats.megatron_fields import NOT_ARGUMENTS, RENAMED, layout_text
from tuner.formats.reader import read_configuration
from tuner.models import MODEL_FIELDS

Ask = Callable[[Mapping[str, Any]], dict[str, Any]]
FRONTENDS = {"megatron-args": "megatron-lm"}
BRIDGE_FORMATS = {"bridge-cli": "overrides", "bridge-yaml": "yaml", "bridge-python": "python"}
ARCHITECTURE = frozenset(MODEL_FIELDS)
#: What a training job has besides a candidate; the parser or its checks ask for it.
JOB_ARGUMENTS = ["--train-iters", "10", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer"]


@dataclass
class Outcome:
    """What a round trip over many candidates found."""

    candidates: int = 0
    fields: int = 0
    rewritten: int = 0
    left_out: int = 0
    inexpressible: int = 0
    refused: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    wrong: list[tuple[dict[str, Any], str, Any, Any]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Count another round trip in."""
        for name in ("candidates", "fields", "rewritten", "left_out", "inexpressible"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused += other.refused
        self.wrong += other.wrong

    def to_json(self) -> dict[str, Any]:
        return {
            "candidates": self.candidates,
            "fields_compared": self.fields,
            "fields_rewritten_as_predicted": self.rewritten,
            "fields_not_expressible": self.left_out,
            "models_not_expressible": self.inexpressible,
            "candidates_refused_upstream": len(self.refused),
            "fields_wrong": len(self.wrong),
        }


def valid_candidates(
    seed: int, mcore: str, frontend: str
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Valid candidates in canonical form, and the rewrites the rules predict for each."""
    drawn_for = "bridge" if frontend == "bridge" else "mcore"
    for drawn in CandidateGenerator(seed, mcore, drawn_for):
        flat = Candidate.from_flat(completed(drawn)).to_flat(mcore=mcore)
        verdict = check(flat, mcore=mcore, frontend=frontend, fixes=False)
        if verdict.valid:
            yield flat, verdict.rewrites


def through_megatron_lm(ask: Ask, flat: dict[str, Any], rewrites: Any, mcore: str) -> Outcome:
    """One candidate through Megatron-LM's parser, checks and configuration objects."""
    exported = export_document(flat, "megatron-args", mcore=mcore)
    if ARCHITECTURE & set(exported.left_out or {}):
        return Outcome(candidates=1, inexpressible=1)
    words = [*exported.arguments, *JOB_ARGUMENTS]
    if "--max-position-embeddings" not in words:
        words += ["--max-position-embeddings", str(flat.get("seq_length", 4096))]
    if "--seq-length" not in words:
        words += ["--seq-length", "4096"]
    held = ask(_machine(flat) | {"arguments": words})
    outcome = Outcome(candidates=1, left_out=len(exported.left_out or {}))
    if "error" in held:
        outcome.refused.append((flat, held["error"]))
        return outcome
    for name, value in flat.items():
        if name in NOT_ARGUMENTS or name in (exported.left_out or {}):
            continue
        if flat.get("recompute_modules") == [] and name.startswith("recompute_"):
            value = None  # the same run: nothing is recomputed, and the option needs a module
            if name == "recompute_modules":
                continue
        found = _megatron_value(name, held)
        _compare(outcome, flat, name, rewrites.get(name, value), value, found)
    read = read_configuration(_command(exported.text), mcore=mcore, effective=True)
    wanted = {
        name: value
        for name, value in flat.items()
        if name not in (exported.left_out or {}) and not _is_unread(name, flat)
    }
    if flat.get("recompute_modules") == []:
        wanted["recompute_granularity"] = None  # the same run: nothing is recomputed
    found = {**read.get("model", {}), **read, **read["config"]}
    _compare_read(outcome, wanted, found, rewrites)
    return outcome


def _is_unread(name: str, flat: Mapping[str, Any]) -> bool:
    return name.startswith("moe_") and not flat.get("num_moe_experts")


def _command(text: str) -> str:
    return text.replace("# torchrun ...", "torchrun")


def _megatron_value(name: str, held: Mapping[str, Any]) -> Any:
    if name == "order":
        return "tp-cp-ep-pp-dp" if held["args.use_tp_pp_dp_mapping"] else "tp-cp-ep-dp-pp"
    if name in OUTSIDE_MODEL and f"args.{OUTSIDE_MODEL[name]}" in held:
        return held[f"args.{OUTSIDE_MODEL[name]}"]
    for part in ("model", "ddp", "optimizer"):
        if f"{part}.{name}" in held:
            return held[f"{part}.{name}"]
    return held.get(f"args.{RENAMED.get(name, name)}", MISSING)


#: Fields that the command line keeps under other names than Megatron-Core's configuration.
OUTSIDE_MODEL = {
    "use_te_rng_tracker": "te_rng_tracker",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
}
MISSING = "not held anywhere"


def through_bridge(ask: Ask, flat: dict[str, Any], rewrites: Any, mcore: str, to: str) -> Outcome:
    """One candidate laid over a recipe's container by Bridge's own override code."""
    base = {name: value for name, value in flat.items() if name in ARCHITECTURE}
    base = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4} | base
    tuned = {name: value for name, value in flat.items() if name not in ARCHITECTURE}
    base["multi_latent_attention"] = bool(flat.get("multi_latent_attention"))
    exported = export_document(tuned, to, mcore=mcore)
    question = list(exported.arguments) if to == "bridge-cli" else exported.text
    held = ask(_machine(flat) | {"base": base, BRIDGE_FORMATS[to]: question})
    outcome = Outcome(candidates=1, left_out=len(exported.left_out or {}))
    if "error" in held:
        outcome.refused.append((flat, held["error"]))
        return outcome
    for name, value in tuned.items():
        if name in NOT_ARGUMENTS or name in (exported.left_out or {}) or name == "order":
            continue
        if name == "cuda_graph_scope" and flat.get("cuda_graph_impl") in (None, "none"):
            continue  # the same run: nothing is captured, and the newer field may be given too
        for path in paths_of(name, mcore):
            found = held.get(path, MISSING)
            if name == "comm_overlap":
                found, value = found != "NoneType", value is not None
            if found == MISSING and path.partition(".")[0] in ("ddp", "optimizer"):
                continue  # this version's class lacks what another part has
            _compare(outcome, flat, name, value, value, found)
    if to != "bridge-python":
        read = read_configuration(exported.text, mcore=mcore)
        _compare_read(outcome, tuned, {**read, **read["config"]})
    return outcome


def _machine(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "world_size": flat["world_size"],
        "env": flat.get("env") or {},
        "gpu": flat.get("gpu"),
        "te_version": flat.get("te_version"),
    }


def _compare(
    outcome: Outcome, flat: dict[str, Any], name: str, expected: Any, given: Any, found: Any
) -> None:
    outcome.fields += 1
    outcome.rewritten += expected != given
    if not _equal(name, expected, found):
        outcome.wrong.append((flat, name, expected, found))


def _equal(name: str, expected: Any, found: Any) -> bool:
    if name == "pipeline_model_parallel_layout" and expected is not None:
        return found is not MISSING  # held as an object that has parsed the string
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if name.endswith(("_modules", "_scope")):
            return sorted(map(str, expected)) == sorted(map(str, found))
        return list(expected) == list(found)
    if isinstance(expected, (list, tuple)) and len(expected) == 1:
        return expected[0] == found
    return bool(expected == found) or (expected is None and found is False)


def _compare_read(
    outcome: Outcome,
    flat: Mapping[str, Any],
    read: Mapping[str, Any],
    rewrites: Mapping[str, Any] | None = None,
) -> None:
    """What the tuner reads back from its own export is the candidate, or what becomes of it."""
    again = Candidate.from_flat({n: read[n] for n in read if n in flat}).to_flat()
    wanted = Candidate.from_flat(flat).to_flat()
    for name, value in wanted.items():
        if name in NOT_ARGUMENTS or name in UNREADABLE:
            continue
        outcome.fields += 1
        found = again.get(name, MISSING)
        if name == "pipeline_model_parallel_layout":
            value = layout_text(value)
        rewritten = (rewrites or {}).get(name, value)
        same = _equal(name, value, found) or _equal(name, rewritten, found)
        same = same or (name == "virtual_pipeline_model_parallel_size" and value == 1)
        if not same and value not in (None, False, [], MISSING):
            outcome.wrong.append((dict(flat), f"read back: {name}", value, found))


#: Read from other words than their own, or not at all: held by the real parser's comparison.
UNREADABLE = frozenset(("batch_p2p_comm", "deallocate_pipeline_outputs", "pipeline_dtype", "order"))
