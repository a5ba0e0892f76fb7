"""Worker: reads candidates as JSON lines, answers the verdict of the real package per line.

Started as ``python -m constraint_oracle.asker`` with the unzipped wheels first on the path.
The answer is ``{"valid", "error", "exc", "stage"}`` plus ``"rewritten"`` when the package changed
a field that the candidate set: ``{field: [given, held]}``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from constraint_oracle import groups, mcore_stages, stubs
from constraint_oracle.candidate import Candidate


class Session:
    """What stays installed between candidates."""

    def __init__(self, frontend: str) -> None:
        self.frontend = frontend
        packages: Sequence[str] = stubs.STUBBED_FOR_MCORE
        if frontend == "bridge":
            from constraint_oracle import bridge_stages

            packages = (*packages, *bridge_stages.STUBBED)
        self.finder = stubs.install(packages)
        self.gpu = stubs.Gpu()
        self.gpu.install()
        self.world = groups.World()
        self.world.install()
        if frontend == "bridge":
            self.stages: Sequence[Callable[[Any], None]] = bridge_stages.STAGES
            self.new_candidate: Callable[[Any], Any] = bridge_stages.BridgeCandidate
            bridge_stages.prepare(self.world)
        else:
            self.stages = mcore_stages.STAGES
            self.new_candidate = Candidate
        self._import_everything()

    def _import_everything(self) -> None:
        """Modules that look at Transformer Engine while importing must see it installed."""
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.transformer.moe.moe_layer
        import megatron.core.transformer.transformer_block  # noqa: F401

    def verdict(self, config: dict[str, Any]) -> dict[str, Any]:
        """Runs the stages until one raises."""
        from megatron.core import parallel_state

        candidate = self.new_candidate(config)
        self.gpu.name = config.get("gpu") or stubs.DEFAULT_GPU
        self.world.size = candidate.config["world_size"]
        answer: dict[str, Any] = {"valid": True, "error": None, "exc": None, "stage": None}
        with (
            environment(candidate.env),
            stubs.transformer_engine(self.finder, config.get("te_version")),
        ):
            for stage in self.stages:
                try:
                    stage(candidate)
                except Exception as refused:
                    error = str(refused.args[0]) if refused.args else ""
                    answer = {
                        "valid": False,
                        "error": str(refused) or error,
                        "exc": type(refused).__name__,
                        "stage": getattr(refused, "stage", stage.__name__),
                    }
                    break
        parallel_state.destroy_model_parallel()
        rewritten = candidate.rewritten()
        return answer | ({"rewritten": rewritten} if rewritten else {})


@contextlib.contextmanager
def environment(env: dict[str, str]) -> Iterator[None]:
    """Only the candidate's own settings of the variables the packages read."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("NCCL_", "NVTE_", "CUDA_", "PYTORCH_CUDA_", "PYTORCH_ALLOC_")):
            del os.environ[name]
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def serve(session: Session, lines: TextIO, answers: TextIO) -> None:
    for line in lines:
        answers.write(json.dumps(session.verdict(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frontend", choices=("mcore", "bridge"), default="mcore")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # the packages print
    serve(Session(arguments.frontend), sys.stdin, answers)


if __name__ == "__main__":
    main()
