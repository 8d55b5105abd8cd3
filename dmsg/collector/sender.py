"""Sender of a spool: delivers sealed files to the collector, and then removes them from the spool.

A file is removed only after the collector has confirmed that the file is on the collector's disk. While the collector
cannot be reached, files wait in the spool, up to its limit (``--telemetry-limit``). A file whose delivery was
interrupted is sent again from its first byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from random import Random
from typing import IO

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols.basic import FileSender, LineReceiver
from twisted.python.failure import Failure

from dmsg.apps.transfer import lost_text
from dmsg.base.log_throttle import LogThrottle
from dmsg.collector.wire import FILE_LIMIT, LINE_LIMIT, Answer, Kind, Offer, WireError, is_spool_name, parse_answer
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import ConnectFailed, DmsgError
from dmsg.keylock import KeyInUse, KeyLock, hold_key
from dmsg.keys import SecKey, load_or_create_key
from dmsg.net.deadlines import no_answer
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.reactor import Reactor
from dmsg.net.retry import retry_delay
from dmsg.net.retry_loop import RetryLoop
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import transport_of
from dmsg.net.threads import in_thread
from dmsg.telemetry.schema import SEGMENT_SUFFIX
from dmsg.telemetry.service import SentCounts
from dmsg.telemetry.vouchers import SENDER_KEY_FILE, voucher_for
from dmsg.v2019.client import Client

KEY_FILE = SENDER_KEY_FILE
"""Name of the sender's key file in the spool's directory."""
CHECK_INTERVAL = 5.0
"""Seconds between two searches for sealed files."""
LATER_INTERVAL = 60.0
"""Seconds until the next attempt while another process is sending the files of this directory."""
REFUSED_INTERVAL = 3600.0
"""Seconds after which a refused file is offered again."""
CONNECT_TIMEOUT = 30.0
LAST_TIMEOUT = 5.0
"""Maximum seconds for sending the last files when the service stops. They are sent only if the collector has been
accepting files."""
QUIET_LIMIT = 120.0
"""Seconds after which the stream is aborted if the collector has not answered and sending has not progressed."""
LOG_INTERVAL = 3600.0
"""Minimum seconds between equal log lines, such as those about a collector that cannot be reached."""

_log = Logger()


class SendError(DmsgError):
    """Error: a file could not be sent now. It stays in the spool."""


class SenderProtocol(LineReceiver):
    """Protocol of the stream to the collector. It sends one file after the other."""

    delimiter = b"\n"
    MAX_LENGTH = LINE_LIMIT

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._answered: Deferred[Answer] | None = None
        self._file: IO[bytes] | None = None
        self._loss: Failure | None = None
        self._quiet: FairTimeout | None = None

    def _note_progress(self) -> None:
        if self._quiet is not None:
            self._quiet.restart()

    def offer(self, offer: Offer, file: IO[bytes]) -> Deferred[Answer]:
        """Offer a file, and send it if the collector wants it. The caller closes the file.

        :returns: Deferred that fires with the final answer. If it fails with :class:`SendError`, the stream cannot be
            used any more.
        """
        if self._loss is not None:
            return self._failed(f"the stream has ended: {self._loss.value}")
        answered: Deferred[Answer] = Deferred()
        self._answered = answered
        self._file = file
        stop_timeout(self._quiet)
        self._quiet = FairTimeout(self._reactor, QUIET_LIMIT, self._on_quiet)
        self.sendLine(offer.line())  # type: ignore[no-untyped-call]
        return answered

    @staticmethod
    def _failed(reason: str) -> Deferred[Answer]:
        failed: Deferred[Answer] = Deferred()
        failed.errback(Failure(SendError(reason)))
        return failed

    def lineReceived(self, line: bytes) -> None:
        self._note_progress()
        try:
            answer = parse_answer(line)
            if self._answered is None or (answer.kind is Kind.SEND and self._file is None):
                raise WireError("the collector sent an answer without a request")
        except WireError as error:
            self._end(SendError(str(error)))
            return
        if answer.kind is Kind.SEND:
            file, self._file = self._file, None
            FileSender().beginFileTransfer(file, self.transport, self._passed).addErrback(self._send_failed)
            return
        answered, self._answered = self._answered, None
        self._file = None
        stop_timeout(self._quiet)
        answered.callback(answer)

    def lineLengthExceeded(self, line: bytes) -> None:
        self._end(SendError("an answer is too long"))

    def _passed(self, data: bytes) -> bytes:
        self._note_progress()
        return data

    def _send_failed(self, failure: Failure) -> None:
        if failure.check(OSError, ValueError):
            self._end(SendError(f"the file cannot be read: {failure.value}"))
        # Other errors are ignored here. They mean that the stream has ended, and connectionLost reports the reason.

    def _on_quiet(self) -> None:
        """Abort the stream after :data:`QUIET_LIMIT` seconds without an answer and without progress in sending."""
        self._end(SendError(f"nothing came from the collector for {QUIET_LIMIT:g} s"))

    def _end(self, error: SendError) -> None:
        self._fail(Failure(error))
        if self.transport is not None:
            transport_of(self).abortConnection()

    def _fail(self, failure: Failure) -> None:
        stop_timeout(self._quiet)
        answered, self._answered = self._answered, None
        if answered is not None:
            answered.errback(failure)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._loss = reason
        self._fail(Failure(SendError(f"the stream has ended: {lost_text(reason)}")))


class SpoolSender(Service):
    """Service that sends the sealed files of a directory to a collector.

    :param directory: directory of the spool. It contains the sender's key, which is created if it does not exist. The
        collector's list of senders must contain this key.
    :param collector: the collector's key and port.
    :param discovery: function that returns the discovery by which the collector and servers are found: its URLs, or a
        Lookups. It is called when the first files wait.
    :param on_warning: called with a line of text when files cannot be sent or are refused.
    :ivar sent: counts of the sent files.
    """

    name = "telemetry-sender"

    def __init__(
        self,
        reactor: Reactor,
        directory: Path,
        collector: DmsgAddress,
        discovery: Callable[[], Sequence[str] | Lookups],
        *,
        sent: SentCounts | None = None,
        random: Random | None = None,
        on_warning: Callable[[str], None] = lambda text: _log.warn("{text}", text=text),
    ) -> None:
        """Load or create the sender's key.

        :raises DmsgError: the key cannot be read or made.
        """
        self._reactor = reactor
        self._directory = directory
        self._collector = collector
        self._discovery = discovery
        self._random = random or Random()
        self.key: SecKey = load_or_create_key(directory / KEY_FILE)
        self.sent = sent or SentCounts()
        self._client: Client | None = None
        self._lock: KeyLock | None = None
        self._stream: SenderProtocol | None = None
        self._refused: dict[str, float] = {}
        self._on_warning = on_warning
        self._taking = self._is_stopped = False
        self._failures = 0
        self._under_way: Deferred[None] | None = None
        self._log_throttle = LogThrottle(reactor.seconds, LOG_INTERVAL)
        self._send_loop = RetryLoop(reactor, self._round, self._retry, "sending telemetry")

    # --- service ---

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._is_stopped = False
        _log.info(
            "files of {directory} are sent to collector {collector} with key {key}; "
            "the collector must have this key on its list",
            directory=str(self._directory),
            collector=str(self._collector),
            key=str(self.key.public),
        )
        self._send_loop.start()
        self._send_loop.soon(0)

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        self._send_loop.stop()
        return Deferred.fromCoroutine(self._leave())

    async def _leave(self) -> None:
        """Send the last files of the entity if the collector has been accepting files. Then stop."""
        if self._taking:
            last = Deferred.fromCoroutine(self._send_last()).addTimeout(LAST_TIMEOUT, self._reactor, no_answer)
            # Errors are ignored, because files that were not sent are sent after the next start.
            await last.addErrback(lambda _: None)
        await self._stop()

    async def _send_last(self) -> None:
        if self._under_way is not None:
            await self._under_way
        await self._send(await in_thread(self._reactor, self._waiting_files))

    async def _stop(self) -> None:
        self._is_stopped = True
        if self._stream is not None and self._stream.transport is not None:
            transport_of(self._stream).abortConnection()
        client, self._client = self._client, None
        if client is not None:
            await client.stopService()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    # --- rounds of sending ---

    def _retry(self, failures: int) -> float:
        return retry_delay(failures, self._random)

    async def _round(self) -> float:
        """Send the waiting files, and return the seconds until the next round."""
        under_way: Deferred[None] = Deferred()
        self._under_way = under_way
        try:
            return await self._check()
        finally:
            self._under_way = None
            under_way.callback(None)

    async def _check(self) -> float:
        waiting = await in_thread(self._reactor, self._waiting_files)
        if not waiting:
            return CHECK_INTERVAL
        try:
            await self._send(waiting)
            return CHECK_INTERVAL
        except KeyInUse:
            return LATER_INTERVAL
        except (DmsgError, OSError) as error:
            if self._is_stopped:
                return CHECK_INTERVAL
            self.sent.failures += 1
            self._failures += 1
            self._taking = False
            self._tell(len(waiting), error)
            return self._retry(self._failures)

    async def send_once(self) -> SentCounts:
        """Send the waiting files and stop. Programs that do not start the service call this method.

        :raises DmsgError: not all files were sent.
        """
        try:
            if waiting := await in_thread(self._reactor, self._waiting_files):
                await self._send(waiting)
        except KeyInUse:
            raise SendError(f"another process already sends the files of {self._directory}") from None
        finally:
            await self._stop()
        return self.sent

    def _tell(self, count: int, error: Exception) -> None:
        why = str(error)
        if isinstance(error, ConnectFailed) and error.attempts:
            why = f"{why}; is {self.key.public} on its list?"
        if self._log_throttle.suffix(type(error).__name__) is not None:
            self._on_warning(f"{count} files of events could not be sent to the collector and wait: {why}")

    def _waiting_files(self) -> list[Path]:
        now = self._reactor.seconds()
        self._refused = {name: until for name, until in self._refused.items() if until > now}
        found = []
        for path in self._directory.glob(f"*{SEGMENT_SUFFIX}"):
            if is_spool_name(path.name) and path.name not in self._refused:
                with suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, path))
        self.sent.waiting = len(found)
        return [path for _, path in sorted(found)]

    async def _online(self) -> Client:
        """Return the client. The first call starts it.

        :raises KeyInUse: another process is sending the files of this directory.
        """
        if self._is_stopped:
            raise SendError("the sender has stopped")
        if self._lock is None:
            self._lock = hold_key(self._directory / KEY_FILE, self.name)
        if self._client is None:
            self._client = Client(self._reactor, self.key, self._discovery(), min_servers=1, random=self._random)
            self._client.startService()
        return self._client

    async def _send(self, waiting: Sequence[Path]) -> None:
        """Send the waiting files, oldest first.

        :raises DmsgError: the collector cannot be reached or has no room, or the stream ended.
        """
        client = await self._online()
        factory: Factory[SenderProtocol] = Factory()
        factory.noisy = False
        factory.protocol = lambda: SenderProtocol(self._reactor)
        stream = await client.connect(self._collector, factory, timeout=CONNECT_TIMEOUT)
        assert isinstance(stream, SenderProtocol) and stream.transport is not None
        self._stream = stream
        try:
            for path in waiting:
                answer = await self._send_one(stream, path)
                if answer is not None and answer.kind is Kind.LATER:
                    raise SendError(f"the collector cannot accept files now: {answer.why}")
                self._failures = 0
        finally:
            self._stream = None
            stream.transport.loseConnection()

    async def _send_one(self, stream: SenderProtocol, path: Path) -> Answer | None:
        try:
            file = open(path, "rb")
        except FileNotFoundError:
            return None  # The file is gone: the spool has removed it to make room, or another process has sent it.
        except OSError as error:
            self._postpone(path, f"cannot be read: {error.strerror}")
            return None
        with file:
            offer = await in_thread(self._reactor, _offer_of, path, file)
            if offer is None:
                answer = Answer(Kind.REFUSED, f"it is empty, or has more than {FILE_LIMIT} bytes")
            else:
                answer = await stream.offer(offer, file)
        if answer.kind is Kind.KEPT and offer is not None:
            self.sent.delivered += 1
            self.sent.delivered_bytes += offer.size
            self.sent.waiting -= 1
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._postpone(path, f"is with the collector, but cannot be removed: {error.strerror}")
            if not self._taking:
                self._taking = True
                _log.info("the collector {collector} accepts files of events now", collector=str(self._collector))
        elif answer.kind is Kind.REFUSED:
            self.sent.refused += 1
            self._postpone(path, f"is refused by the collector and stays: {answer.why}")
        return answer

    def _postpone(self, path: Path, reason: str) -> None:
        """Do not send this file for :data:`REFUSED_INTERVAL` seconds. Other files are sent meanwhile."""
        self._refused[path.name] = self._reactor.seconds() + REFUSED_INTERVAL
        if (more := self._log_throttle.suffix(reason)) is not None:
            self._on_warning(f"{path.name} {reason}{more}")


def _offer_of(path: Path, file: BufferedReader) -> Offer | None:
    """Return the offer for a file; None if the file is empty or too large."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = file.tell()
    file.seek(0)
    return Offer(path.name, size, digest, voucher_for(path)) if 0 < size <= FILE_LIMIT else None
