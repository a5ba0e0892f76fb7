"""The error file a process leaves for torch's launcher when it raises."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from trainables.failures import describe_exception


def recording_errors(function: Any) -> Any:
    """`function` that leaves a torch error file when it raises.

    Unlike torch's own handler it notes the time to more than a second, to tell the first failing
    rank from those that lost it as a peer.
    """
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    class PreciseErrorHandler(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            super().record_exception(e)
            path = self._get_error_file_path()
            if not path:
                return
            document = json.loads(Path(path).read_text())
            document["message"]["message"] = describe_exception(e)
            document["message"]["extraInfo"]["time_s"] = time.time()
            Path(path).write_text(json.dumps(document))

    return record(function, PreciseErrorHandler())
