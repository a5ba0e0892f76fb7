"""What Megatron-Core's own schedules do, call by call, and an event simulation of these calls.

`programs` runs the real schedule functions once per stage with passes and transfers replaced by
notes; `replay` plays the notes of all stages against each other.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from unittest import mock

from tuner.timing.schedule import Pipeline


class _Group:
    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def programs(pipeline: Pipeline) -> list[list[tuple]]:
    """Per stage the calls in order: passes, posted transfers, waits.

    ("pass", forward, chunk, micro-batch), ("post", [(kind, peer, sends, handle)]) with kind "F" for
    activations and "B" for gradients, ("wait", handle).
    """
    return [_program(pipeline, stage) for stage in range(pipeline.stages)]


def _program(pipeline: Pipeline, stage: int) -> list[tuple]:
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    notes: list[tuple] = []
    config = _config(pipeline)
    counts: dict[tuple[bool, int], int] = defaultdict(int)

    class Handle:
        def __init__(self, name: int) -> None:
            self.name = name

        def wait(self) -> None:
            notes.append(("wait", self.name))

    class Noting(P2PCommunicator):
        def __init__(self) -> None:
            self.config, self.pp_group = config, _Group(pipeline.stages, stage)
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, **rest):
            up, down = (stage + 1) % pipeline.stages, (stage - 1) % pipeline.stages
            wanted = [
                ("send_next", "F", up, True, tensor_send_next is not None),
                ("recv_prev", "F", down, False, recv_prev),
                ("send_prev", "B", down, True, tensor_send_prev is not None),
                ("recv_next", "B", up, False, recv_next),
            ]
            first = sum(len(note[1]) for note in notes if note[0] == "post")
            chosen = [w for w in wanted if w[4]]
            handles = {w[0]: Handle(first + i) for i, w in enumerate(chosen)}
            if chosen:
                posted = [(w[1], w[2], w[3], handles[w[0]].name) for w in chosen]
                notes.append(("post", posted))
            if rest.get("wait_on_reqs", True):
                for handle in handles.values():
                    handle.wait()
                handles = None
            received = torch.zeros(1)
            return received if recv_prev else None, received if recv_next else None, handles

    def forward_step(step, data, model, *args, **kwargs):
        chunk = model.chunk
        notes.append(("pass", True, chunk, counts[True, chunk]))
        counts[True, chunk] += 1
        return torch.zeros(1), torch.zeros((), dtype=torch.int)

    def backward_step(source, output, *args):
        chunk = next_backward()
        notes.append(("pass", False, chunk, counts[False, chunk]))
        counts[False, chunk] += 1
        return torch.zeros(1)

    def next_backward() -> int:
        if pipeline.chunks == 1:
            return 0
        table = schedules.get_schedule_table(pipeline.microbatches, pipeline.chunks, pipeline.group)
        done = sum(count for (forward, _), count in counts.items() if not forward)
        return pipeline.chunks - 1 - table[done][1]

    models = []
    for chunk in range(pipeline.chunks):
        model = torch.nn.Module()
        model.config, model.chunk = config, chunk
        models.append(model)
    groups = types.SimpleNamespace(
        tp=_Group(1), cp=_Group(1), pp=None, embd=None, pos_embd=None, dp_cp=_Group(1)
    )
    with (
        mock.patch.object(schedules, "forward_step", forward_step),
        mock.patch.object(schedules, "backward_step", backward_step),
        mock.patch.object(schedules, "get_model_type"),
        mock.patch.object(schedules, "is_pp_first_stage", return_value=stage == 0),
        mock.patch.object(schedules, "is_pp_last_stage", return_value=stage == pipeline.stages - 1),
        mock.patch.object(schedules, "deallocate_output_tensor"),
        mock.patch("torch.zeros", _host(torch.zeros)),
    ):
        communicator = Noting()
        groups.pp = communicator.pp_group
        run = (
            schedules.forward_backward_pipelining_without_interleaving
            if pipeline.chunks == 1
            else schedules.forward_backward_pipelining_with_interleaving
        )
        run(
            forward_step_func=None,
            data_iterator=[None] * pipeline.chunks,
            model=models,
            num_microbatches=pipeline.microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    return notes


def _host(make):
    def zeros(*args, device=None, **kwargs):
        return make(*args, **kwargs)

    return zeros


def _config(pipeline: Pipeline):
    from megatron.core.model_parallel_config import ModelParallelConfig

    chunked = pipeline.chunks > 1
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=pipeline.chunks if chunked else None,
        microbatch_group_size_per_vp_stage=pipeline.group if chunked else None,
        overlap_p2p_comm=pipeline.overlap_p2p,
        batch_p2p_comm=not pipeline.overlap_p2p,
        overlap_p2p_comm_warmup_flush=pipeline.overlap_warmup_flush,
        pipeline_dtype=_float32(),
    )
    config.hidden_size = 1
    config.fine_grained_activation_offloading = False
    config.overlap_moe_expert_parallel_comm = False
    return config


def _float32():
    import torch

    return torch.float32


def replay(noted: list[list[tuple]], forward_s, backward_s, p2p_s):
    """Times of passes, {(stage, forward, chunk, micro-batch): (start, end)}, and stage ends.

    A transfer starts when both sides have posted it and the transfer before it the same way has
    ended, and takes `p2p_s[lower stage]`.
    """
    stages = len(noted)
    free, at = [0.0] * stages, [0] * stages
    queues: dict[tuple, deque] = defaultdict(deque)
    stream: dict[tuple, float] = defaultdict(float)
    done: dict[tuple[int, int], float] = {}
    passes = {}
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while at[stage] < len(noted[stage]):
                note = noted[stage][at[stage]]
                if note[0] == "pass":
                    _, forward, chunk, microbatch = note
                    length = (forward_s if forward else backward_s)[stage][chunk]
                    passes[stage, forward, chunk, microbatch] = (free[stage], free[stage] + length)
                    free[stage] += length
                elif note[0] == "post":
                    for kind, peer, sends, handle in note[1]:
                        key = (kind, stage, peer) if sends else (kind, peer, stage)
                        queues[(key, sends)].append((free[stage], (stage, handle)))
                        _match(queues, key, stream, done, p2p_s, stages)
                elif (stage, note[1]) in done:
                    free[stage] = max(free[stage], done[stage, note[1]])
                else:
                    break
                at[stage] += 1
                moved = True
    assert all(a == len(n) for a, n in zip(at, noted, strict=True)), "stages wait for each other"
    return passes, free


def _match(queues, key, stream, done, p2p_s, stages) -> None:
    kind, sender, receiver = key
    sent, received = queues[key, True], queues[key, False]
    while sent and received:
        (a, first), (b, second) = sent.popleft(), received.popleft()
        lower = sender if kind == "F" else receiver
        start = max(a, b, stream[kind, sender, receiver])
        end = start + p2p_s[lower]
        stream[kind, sender, receiver] = end
        done[first] = done[second] = end
