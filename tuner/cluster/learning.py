"""What a study's own trials teach of its machine: rates that every completed trial refines.

They are kept in the study's folder, with the trials they know: a resumed study goes on from there,
and `tuner estimate` or `tuner calibrate fit --start` can take the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cluster.prepared import PreparedJob
from tuner.errors import InputError
from tuner.measurement import write_json_atomically

if TYPE_CHECKING:
    from tuner.search.records import TrialRecord
    from tuner.timing.calibration import Calibration
    from tuner.timing.observations import Observation

CALIBRATION = "calibration.json"
_TRIALS = "trials"
_log = logging.getLogger(__name__)


class StudyRates:
    """The calibration of a study's machine, and the trials it was refined with.

    `start` is what is known before the study; a file of an earlier session is taken up.
    """

    def __init__(self, prepared: PreparedJob, start: Calibration, folder: Path) -> None:
        self._prepared, self.path = prepared, folder / CALIBRATION
        self.calibration, self._known = start, set[int]()
        if self.path.exists():
            self._take_up()

    def learn(self, records: Sequence[TrialRecord]) -> bool:
        """Refine with the completed trials that are not known yet; whether there were any."""
        from tuner.timing.refine import refined

        new = [r for r in records if r.feasible and r.number not in self._known]
        if not new:
            return False
        observations = [one for one in map(self._observation, new) if one is not None]
        self.calibration = refined(self.calibration, observations)
        self._known.update(record.number for record in new)
        document = self.calibration.to_json() | {_TRIALS: sorted(self._known)}
        write_json_atomically(self.path, document)
        return True

    def _take_up(self) -> None:
        from tuner.timing.calibration import Calibration

        try:
            self.calibration = Calibration.load(self.path)
            self._known = set(json.loads(self.path.read_text(encoding="utf-8"))[_TRIALS])
        except (InputError, KeyError, TypeError) as error:
            _log.warning("%s is not used: %s", self.path, error)

    def _observation(self, record: TrialRecord) -> Observation | None:
        from tuner.timing.observations import CPU, Observation

        cluster = self._prepared.job.cluster
        if record.measurement is None:
            return None
        return Observation.of_trial(
            self._prepared.spec_of(record.candidate),
            record.measurement.step_time_s,
            gpu=CPU if cluster.device == "cpu" else str(cluster.gpu),
            gpus_per_node=cluster.gpus_per_node,
            id=f"trial {record.number}",
        )
