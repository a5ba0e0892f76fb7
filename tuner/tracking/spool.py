"""Records on their way to a store that may be away: kept on disk, sent once each, in order.

Lines are appended to a file before anything is sent; another file counts those that arrived. A
thread sends the first that has not, again and again until the store takes it, so a record written
while the store was unreachable, or by a process that was killed, arrives later all the same.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.measurement import write_json_atomically

_LOG = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 15.0

Record = Mapping[str, Any]


class Spool:
    """A durable queue of JSON documents with one consumer.

    `send` delivers one record. It may be called again for a record whose delivery failed half-way,
    or was not noted before the process ended, and must then complete it without repeating it.
    """

    def __init__(self, path: Path, send: Callable[[Record], None]) -> None:
        self._path, self._sent_path = path, path.with_suffix(".sent.json")
        self._send = send
        self._records = _read(path)
        self._sent = min(_read_count(self._sent_path), len(self._records))
        self._file = path.open("a")
        self._changed = threading.Condition()
        self._closing = False
        self._complained = False
        self._thread = threading.Thread(target=self._deliver, name="mlflow-spool", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def put(self, record: Record) -> None:
        """Keep a record for delivery; returns once it is in the file."""
        with self._changed:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._records.append(record)
            self._changed.notify_all()

    def records(self) -> list[Record]:
        """All records ever put, delivered or not, in order."""
        with self._changed:
            return list(self._records)

    def drained(self, timeout_s: float) -> bool:
        """Wait for everything to arrive; False where nothing did for `timeout_s`."""
        with self._changed:
            while self._sent < len(self._records):
                if not self._took_another(timeout_s):
                    return False
            return True

    def _took_another(self, timeout_s: float) -> bool:
        """Whether a record arrives within `timeout_s`; the lock is held."""
        before = self._sent
        return self._changed.wait_for(lambda: self._sent > before, timeout_s)

    def close(self) -> None:
        """Stop delivering; what has not arrived stays in the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=60)
        self._file.close()

    def _deliver(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._sent < len(self._records))
                if self._closing:
                    return
                record = self._records[self._sent]
            try:
                self._send(record)
            except Exception as error:
                # Any store may fail in any way; trials must go on, and the record waits.
                self._complain(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s, self._complained = _FIRST_WAIT_S, False
            with self._changed:
                self._sent += 1
                write_json_atomically(self._sent_path, {"sent": self._sent, "at_s": time.time()})
                self._changed.notify_all()

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            _LOG.warning(
                "MLflow takes no records (%s); they are kept and sent when it does", first_line
            )
        self._complained = True


def _read(path: Path) -> list[Record]:
    """The records of a file; a last line cut short by a kill is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as handle:
            handle.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _read_count(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["sent"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
