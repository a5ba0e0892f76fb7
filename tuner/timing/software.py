"""How old the software of a measured run is.

Releases make the same run faster, on new GPUs more than on others. A calibration holds the rates of
the newest release that it knows, and what a year of age costs; estimates are for the newest.
"""

from __future__ import annotations

import re

NEWEST = (26, 8)
"""Container of NeMo (year, month) of the newest runs that the packaged calibrations know."""

_CONTAINER = re.compile(r"container (\d\d)\.(\d\d)(?:\.(\d\d))?\b")


def age_years(version: str) -> float:
    """Years from the software of a published run to `NEWEST`, by its container's tag (year, month,
    and a patch for each month after); 0 where `version` names none."""
    found = _CONTAINER.search(version)
    if found is None:
        return 0.0
    year, month, patch = (int(part or 0) for part in found.groups())
    return (NEWEST[0] - year) + (NEWEST[1] - month - patch) / 12
