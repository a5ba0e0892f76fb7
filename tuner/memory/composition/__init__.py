"""Memory of any number of candidates, composed from profiles of a few layers.

`compose_arrays` takes columns of candidates and gives the peak of each; `stage_memories` details
one candidate. Profiles are dry runs of two layers of each kind, kept on disk.
"""

from tuner.memory.composition.compose import (
    MEMORY_PARTS,
    ComposedMemory,
    Profiles,
    as_columns,
    compose,
    compose_arrays,
    compose_index,
    gather_profiles,
    stage_memories,
)
from tuner.memory.composition.index import Index, Pipeline, index_candidates
from tuner.memory.composition.measure import ProfileSource, check_composable
from tuner.memory.composition.profile import StepProfile, UnitProfile

__all__ = [
    "MEMORY_PARTS",
    "ComposedMemory",
    "Index",
    "Pipeline",
    "ProfileSource",
    "Profiles",
    "StepProfile",
    "UnitProfile",
    "as_columns",
    "check_composable",
    "compose",
    "compose_arrays",
    "compose_index",
    "gather_profiles",
    "index_candidates",
    "stage_memories",
]
