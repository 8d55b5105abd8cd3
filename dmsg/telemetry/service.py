"""Telemetry of an entity: its recorders, its heartbeats, and the calls that write events in a thread."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

from twisted.internet.defer import Deferred, TimeoutError, maybeDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.memory import resident
from dmsg.base.version import program_version
from dmsg.errors import DmsgError
from dmsg.keys import SecKey
from dmsg.net.deadlines import no_answer
from dmsg.net.isolate import call_isolated
from dmsg.net.threads import in_thread
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.recorder import Recorder
from dmsg.telemetry.schema import EVENTS_PREFIX, RECEIPTS_PREFIX
from dmsg.telemetry.settings import TelemetrySettings
from dmsg.telemetry.spool import recover
from dmsg.telemetry.vouchers import write_voucher

HEARTBEAT_INTERVAL = 60.0
"""Seconds between heartbeats."""
FLUSH_INTERVAL = 1.0
"""Seconds between writes. A killed process loses at most the events of this period."""
STOP_TIMEOUT = 5.0
"""Maximum seconds that :meth:`Telemetry.stop` waits for the disk."""
REPEATS_LIMIT = 4096
"""Maximum number of kinds of repeated events to count between heartbeats. If there are more, the count of the oldest
kind is written at once."""
RECEIPTS_DIVISOR = 4
"""Divisor of the limit of a server's spool. The result is the part for receipts; events have the rest, so that receipts
never displace events."""
TARGETS_LIMIT = 1024
"""Maximum number of different targets to count for a repeated event."""

_log = Logger()
_Arguments = ParamSpec("_Arguments")


@dataclass
class SentCounts:
    """Counts of files sent to a collector.

    :ivar delivered: number of files that the collector has confirmed.
    :ivar delivered_bytes: total size of the delivered files.
    :ivar refused: number of refusals; a file counts each time it is refused.
    :ivar failures: number of rounds of sending that failed for another reason.
    :ivar waiting: number of files that wait to be sent, as of the last search for files.
    """

    delivered: int = 0
    delivered_bytes: int = 0
    refused: int = 0
    failures: int = 0
    waiting: int = 0


def _vouch(directory: Path, key: SecKey) -> None:
    """Write the voucher for the sender. A failure is only logged: events can be written without a voucher, but a
    collector will refuse them."""
    try:
        write_voucher(directory, key)
    except (DmsgError, OSError) as error:
        _log.warn("events in {directory} are not sent to a collector: {error}", directory=directory, error=str(error))


class _RepeatCount:
    """Count of the repeated events of one kind since an event of this kind was written."""

    __slots__ = ("count", "fields", "targets")

    def __init__(self, fields: Mapping[str, object]) -> None:
        self.fields = fields
        self.count = 0
        self.targets: set[bytes] = set()


class Telemetry:
    """Writer of the events of an entity.

    :param role: server or discovery.
    :param key: the server's secret key. Its public key is the name of the producer, and it signs the voucher for the
        sender of the events. With None, the name is derived from the secret of the directory.
    :ivar about: fields of the start event.
    :ivar loads: functions that return fields for a heartbeat.
    :ivar sent: counts of the files sent to a collector, if there is one.
    :ivar beats: functions that are called before each heartbeat, to record further events.
    :ivar turns: functions that are called each second.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        settings: TelemetrySettings,
        role: str,
        key: SecKey | None = None,
        *,
        wall: Callable[[], float] | None = None,
    ) -> None:
        """Prepare the directory, and write the voucher if there is a key.

        :raises DmsgError: the directory cannot be used.
        """
        own, for_names = settings.prepare()
        if key is not None:
            _vouch(settings.directory, key)
        names = self._names = Pseudonyms(for_names, clear=settings.clear)
        self._reactor = reactor
        self._settings = settings
        self.about: dict[str, object] = {}
        for_receipts = settings.limit // RECEIPTS_DIVISOR if role == "server" else 0

        def recorder(prefix: str, limit: int) -> Recorder:
            return Recorder(
                settings.directory,
                key.public.hex() if key is not None else f"{role}-{Pseudonyms(own).name()}",
                role,
                names,
                prefix=prefix,
                rotate_seconds=settings.rotate_seconds,
                limit=limit,
                wall=wall,
                monotonic=reactor.seconds,
            )

        self._recorder = recorder(EVENTS_PREFIX, settings.limit - for_receipts)
        self._receipts = recorder(RECEIPTS_PREFIX, for_receipts)
        self.record = self._recorder.record
        self.record_receipt = self._receipts.record
        self.network = self._recorder.network
        self.beats: list[Callable[[], None]] = []
        self.turns: list[Callable[[], None]] = []
        self.loads: list[Callable[[], Mapping[str, object]]] = []
        self._repeated: OrderedDict[tuple[str, tuple[Hashable, ...]], _RepeatCount] = OrderedDict()
        self._call: IDelayedCall | None = None
        self._expected = 0.0
        self._beat_at = 0.0
        self._lag = 0.0
        self._cpu = 0.0
        self._lost_events = 0
        self._writing: Deferred[None] | None = None
        self._stopped = False
        self.sent = SentCounts()

    def client(self, key: bytes) -> str:
        """Return the name of a client in events: a pseudonym, or its public key."""
        return self._names.client(key)

    @property
    def lost(self) -> int:
        """Number of events that could not be written."""
        return self._recorder.lost_events + self._receipts.lost_events

    @property
    def written(self) -> int:
        """Number of events written."""
        return self._recorder.written + self._receipts.written

    @property
    def removed(self) -> int:
        """Number of sealed files that were removed to make room for newer ones."""
        return self._recorder.spool.removed + self._receipts.spool.removed

    # --- events ---

    def record_repeated(
        self, event: str, key: tuple[Hashable, ...], fields: Mapping[str, object], target: bytes | None = None
    ) -> None:
        """Record an event that strangers can cause any number of times.

        The first event of a ``key`` is written at once. Further events before the next heartbeat are written as one
        event with their number ``n``, so that an attacker cannot fill the spool.

        :param key: values that identify the kind of event. Only events with the same ``event`` and ``key`` are
            combined.
        :param target: object of the event, such as the client that was requested. Different targets are counted.
        """
        kind = event, key
        repeated = self._repeated.get(kind)
        if repeated is None:
            if len(self._repeated) >= REPEATS_LIMIT:
                self._write_repeated(*self._repeated.popitem(last=False))
            self._repeated[kind] = _RepeatCount(fields)
            self.record(event, {**fields, "n": 1} if target is None else {**fields, "n": 1, "targets": 1})
            return
        repeated.count += 1
        if target is not None and len(repeated.targets) < TARGETS_LIMIT:
            repeated.targets.add(target)

    def _write_repeated(self, kind: tuple[str, tuple[Hashable, ...]], repeated: _RepeatCount) -> None:
        if repeated.count:
            fields = {**repeated.fields, "n": repeated.count}
            if repeated.targets:
                fields["targets"] = len(repeated.targets)
            self.record(kind[0], fields)

    # --- start and stop ---

    def start(self) -> None:
        """Record the start event, seal the files that killed processes left, and begin to write once a second."""
        now = self._reactor.seconds()
        self._beat_at = now
        self._cpu = time.process_time()
        self._lost_events = self.lost
        keys = "clear" if self._settings.clear else "hashed"
        self.record("start", {"version": program_version(), "keys": keys, "names": self._names.space(), **self.about})
        self._in_thread(recover, self._settings.directory)
        self._expected = now + FLUSH_INTERVAL
        self._call = self._reactor.callLater(FLUSH_INTERVAL, self._turn)

    def _turn(self) -> None:
        now = self._reactor.seconds()
        self._lag = max(self._lag, now - self._expected)
        for turn in self.turns:
            call_isolated(turn)
        if now - self._beat_at >= HEARTBEAT_INTERVAL:
            self.write_heartbeat()
        if self._writing is None:
            self._in_thread(self._flush)
        self._expected = now + FLUSH_INTERVAL
        self._call = self._reactor.callLater(FLUSH_INTERVAL, self._turn)

    def _flush(self, *, last: bool = False) -> None:
        self._recorder.flush(last=last)
        self._receipts.flush(last=last)

    def write_heartbeat(self) -> None:
        """Call the functions in :attr:`beats`, then record the repeated events and a heartbeat."""
        for told in self.beats:
            call_isolated(told)
        repeated = list(self._repeated.items())
        self._repeated.clear()
        for kind, one in repeated:
            self._write_repeated(kind, one)
        now = self._reactor.seconds()
        cpu, lost = time.process_time(), self.lost
        self.record(
            "heartbeat",
            {
                "interval_ms": round((now - self._beat_at) * 1000),
                **{name: value for load in self.loads for name, value in load().items()},
                "lag_ms": round(self._lag * 1000),
                "cpu_ms": round((cpu - self._cpu) * 1000),
                "rss_kb": resident() // 1024,
                "lost": lost - self._lost_events,
            },
        )
        self._beat_at, self._cpu, self._lag, self._lost_events = now, cpu, 0.0, lost

    def stop(self) -> Deferred[None]:
        """Write the remaining events and seal the files.

        :returns: Deferred that fires when all events are on the disk, or after :data:`STOP_TIMEOUT` seconds.
        """
        if self._call is None:
            return maybeDeferred(lambda: None)
        self._call.cancel()
        self._call = None
        self.write_heartbeat()
        self.record("stop", {})

        def flush(_: object = None) -> Deferred[None]:
            return self._in_thread(self._flush, last=True)

        def late(error: Failure) -> None:
            error.trap(TimeoutError)
            _log.warn("the program stops before all telemetry is written; the rest is lost")

        done = flush() if self._writing is None else self._writing.addCallback(flush)
        return done.addTimeout(STOP_TIMEOUT, self._reactor, no_answer).addErrback(late)

    def _in_thread(
        self, act: Callable[_Arguments, object], *args: _Arguments.args, **options: _Arguments.kwargs
    ) -> Deferred[None]:
        writing: Deferred[None] | None = None

        def finished(result: object) -> None:
            if self._writing is writing:
                self._writing = None
            if isinstance(result, Failure):
                _log.failure("unhandled error while telemetry was written", result)

        writing = in_thread(self._reactor, act, *args, **options).addBoth(finished)
        if not writing.called:  # A test's clock has no threads, so the work is done synchronously.
            self._writing = writing
        return writing
