"""Recorder: queue of events between an entity and its spool.

:meth:`Recorder.record` appends an event to a queue and returns. This takes the reactor's thread about a microsecond,
even if the disk is slow. Once a second, another thread takes the events from the queue, replaces clients by pseudonyms,
encodes the events in JSON, and appends them to the spool. An event is lost, and counted as lost, if the queue or the
disk is full. Its number is not used again, so readers notice the gap.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from json import JSONEncoder
from pathlib import Path

from twisted.logger import Logger

from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.schema import EVENTS_PREFIX, SCHEMA_VERSION
from dmsg.telemetry.spool import SPOOL_LIMIT, Spool, end_line

QUEUE_LIMIT = 65536
"""Maximum number of events in the queue."""
BATCH = 2048
"""Maximum number of events in one write."""

_log = Logger()


class Recorder:
    """Recorder of the events of one process.

    :param producer: name of the writer of the events: a server's public key in hex, or another name of at most 66
        letters.
    :param wall: clock, in seconds since 1970.
    :param monotonic: monotonic clock, in seconds.
    :ivar boot: random id of the process, 32 hex digits.
    :ivar lost_events: number of events that could not be written.
    :ivar written: number of events written.
    """

    def __init__(
        self,
        directory: Path,
        producer: str,
        role: str,
        names: Pseudonyms,
        *,
        prefix: str = EVENTS_PREFIX,
        rotate_seconds: float,
        limit: int = SPOOL_LIMIT,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.names = names
        self.boot = os.urandom(16).hex()
        self.lost_events = 0
        self.written = 0
        self._failing = False
        self._producer, self._role = producer, role
        self._wall, self._monotonic = wall or time.time, monotonic or time.monotonic
        self._started = self._monotonic()
        self._numbers = count()
        # No lock is needed: the reactor's thread only appends and the writer's thread only pops, and both operations
        # are atomic.
        self._queue: deque[tuple[int, str, float, float, Mapping[str, object]]] = deque()
        self._encode = JSONEncoder(separators=(",", ":"), default=names.client, check_circular=False).encode
        self._prefix = f'"producer":"{producer}","role":"{role}","boot":"{self.boot}",'
        self.spool = Spool(
            directory, prefix + self.boot, self._end_line, rotate_seconds=rotate_seconds, limit=limit, family=prefix
        )

    def record(self, event: str, fields: Mapping[str, object]) -> None:
        """Queue an event. Never blocks and never raises.

        :param event: type of the event, one of ``EVENTS``.
        :param fields: fields of the event, without those of the envelope. A value of type bytes is a client's public
            key, and is written as its pseudonym.
        """
        number = next(self._numbers)
        if len(self._queue) >= QUEUE_LIMIT:
            self.lost_events += 1
            return
        self._queue.append((number, event, self._wall(), self._monotonic(), fields))

    def network(self, host: str) -> str | None:
        """Return today's pseudonym for the network of an IP address."""
        return self.names.network(host, int(self._wall() // 86400))

    def _end_line(self, lines: int, digest: str) -> bytes:
        number = next(self._numbers)
        envelope = {
            "v": SCHEMA_VERSION,
            "producer": self._producer,
            "role": self._role,
            "boot": self.boot,
            "seq": number,
            "ts": int(self._wall() * 1000),
            "mono": int((self._monotonic() - self._started) * 1000),
        }
        return end_line(envelope, lines, digest, recovered=False)

    # --- on the writer's thread ---

    def flush(self, *, last: bool = False) -> None:
        """Write the queued events. The writer's thread calls this method, which never raises.

        :param last: whether to seal the file even if it is small and new, because no more events follow.
        """
        queue = self._queue
        encode, prefix, started = self._encode, self._prefix, self._started
        while queue:
            lines = []
            for _ in range(min(len(queue), BATCH)):
                number, event, wall, mono, fields = queue.popleft()
                lines.append(
                    f'{{"v":{SCHEMA_VERSION},"type":"{event}",{prefix}"seq":{number},"ts":{int(wall * 1000)},'
                    f'"mono":{int((mono - started) * 1000)}{"," if fields else ""}{encode(fields)[1:]}\n'
                )
            try:
                self.spool.write("".join(lines).encode(), len(lines), self._monotonic())
                self.written += len(lines)
                self._failing = False
            except OSError as error:
                self._failed(error)
                self.lost_events += len(lines)
        try:
            if last:
                self.spool.seal()
            else:
                self.spool.seal_if_due(self._monotonic())
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            _log.warn("telemetry cannot be written: {error}", error=str(error))
        self._failing = True
