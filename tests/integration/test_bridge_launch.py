"""The way of a Bridge trial through the launcher: ranks, environment, callback, figures, result.

Megatron Bridge's loop needs a GPU. In its place stands a package of the same names whose `pretrain`
trains over Gloo and fires the same events; launcher, rank process, recorder and report are real.
The real package's recipes, overrides and callback manager are held in tests/oracle.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import trainables
from tuner.measurement import Outcome, TrialSpec

pytestmark = pytest.mark.slow

FILES = {
    "recipes/__init__.py": """
        import types
        from megatron.bridge.training.config import GPTDatasetConfig

        def tiny_pretrain_config():
            names = ("train", "scheduler", "checkpoint", "logger", "validation")
            parts = {name: types.SimpleNamespace() for name in names}
            parts["train"].train_iters = 1000
            parts["checkpoint"].save = "/nonexistent"
            model = types.SimpleNamespace(num_layers=2, cuda_graph_impl="none")
            return types.SimpleNamespace(
                model=model, dataset=GPTDatasetConfig(), env_vars={"FROM_THE_RECIPE": 7}, **parts
            )
    """,
    "training/__init__.py": "",
    "training/utils/__init__.py": "",
    "training/config.py": "class GPTDatasetConfig: blend = ['data']",
    "training/gpt_step.py": "def forward_step(*arguments): raise NotImplementedError",
    "training/utils/omegaconf_utils.py": """
        def process_config_with_overrides(config, cli_overrides):
            config.words = list(cli_overrides)
            return config
    """,
    "training/utils/flop_utils.py": """
        def num_floating_point_operations(config, batch_size): return 2 * 10**9 * batch_size
    """,
    "training/callbacks.py": """
        class CallbackManager:
            def __init__(self): self.functions = {}
            def register(self, event, function): self.functions[event] = function
            def fire(self, event, context): self.functions[event](context)
    """,
    "training/pretrain.py": """
        import os, time, types
        import torch

        def pretrain(config, step, callbacks=None):
            assert os.environ["FROM_THE_RECIPE"] == "7", "the recipe's environment is missing"
            assert config.dataset.blend is None
            assert config.checkpoint.save is None
            assert "model.tensor_model_parallel_size=1" in config.words
            torch.distributed.init_process_group("gloo")
            rank = torch.distributed.get_rank()
            weight = torch.full((4,), 2.0, requires_grad=True)
            callbacks.fire("on_train_start", None)
            for _ in range(config.train.train_iters):
                callbacks.fire("on_train_step_start", None)
                loss = (weight**2).mean()
                loss.backward()
                torch.distributed.all_reduce(weight.grad)
                with torch.no_grad():
                    weight -= 0.5 * weight.grad
                    weight.grad = None
                time.sleep(0.02 * (rank + 1))
                losses = {"lm loss": loss.detach()} if rank == 1 else {}
                callbacks.fire("on_train_step_end", types.SimpleNamespace(loss_dict=losses))
            raise AssertionError("the recorder did not end the run")
    """,
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "path" / "megatron" / "bridge"
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


def a_spec(num_layers: int = 2) -> TrialSpec:
    return TrialSpec(
        model={"num_layers": num_layers},
        config={"micro_batch_size": 1},
        world_size=2,
        seq_length=16,
        global_batch_size=4,
        warmup_steps=1,
        measure_steps=3,
        timeout_s=300,
        options={"recipe": "tiny_pretrain_config", "overrides": [], "step": "gpt_step"},
    )


def test_a_recipe_is_run_and_measured_on_every_rank(tmp_path: Path, stand_in: None) -> None:
    result = trainables.get("megatron_bridge").run_trial(a_spec(), tmp_path / "out")
    assert result.outcome is Outcome.COMPLETED, result.reason
    measured = result.measurement
    assert measured is not None
    assert len(measured.step_times_s) == 3
    assert measured.step_time_s >= 0.04  # the slower rank's
    assert len(measured.losses) == 5  # two to warm up, three measured; known to rank 1 only
    assert measured.losses[0] == 4.0
    assert measured.losses[-1] < 0.1
    per_gpu = measured.step_time_s * 2
    assert measured.tflops_per_gpu == pytest.approx(8e9 / per_gpu / 1e12)
    assert [rank.rank for rank in measured.ranks] == [0, 1]


def test_a_recipe_of_another_model_is_refused_by_name(tmp_path: Path, stand_in: None) -> None:
    result = trainables.get("megatron_bridge").run_trial(a_spec(3), tmp_path / "out")
    assert result.outcome is Outcome.CRASHED
    assert "the recipe has num_layers=2, the job's model 3" in result.reason
