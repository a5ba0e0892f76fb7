"""Process groups as plain objects, so that the packages' own rank arithmetic runs on one process.

``torch.distributed`` answers as rank 0 of a world of the candidate's size.
"""

from __future__ import annotations

from typing import Any


class Group:
    """Ranks of a process group, seen from rank 0 of the world."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        """Position of world rank 0, or -1 when it is no member (as ``torch.distributed`` says)."""
        return 0 if self.ranks[0] == 0 else -1


class World:
    """Replaces what ``parallel_state`` asks of ``torch.distributed``."""

    def __init__(self) -> None:
        self.size = 1

    def install(self) -> None:
        import torch.distributed as dist

        dist.is_initialized = lambda: True
        dist.get_world_size = lambda group=None: self.size if group is None else group.size()
        dist.get_rank = lambda group=None: 0 if group is None else group.rank()
        dist.new_group = lambda ranks=None, **_: Group(range(self.size) if ranks is None else ranks)
        dist.get_process_group_ranks = lambda group: list(group.ranks)
        dist.barrier = lambda *_, **__: None
        dist.destroy_process_group = lambda group=None: None
