"""Implementation of ``dmsg cp``: copies that resume after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from rich.progress import Progress
from twisted.internet.defer import TimeoutError
from twisted.internet.protocol import Factory
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from dmsg.apps.codes.receiver_proof import CLOSE_TIMEOUT
from dmsg.apps.copies import Copy, CopyBusy, CopyCut, Get, Put, Started
from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.exposure import has_dot
from dmsg.apps.intake import OfferRefused
from dmsg.apps.paths import regular_size
from dmsg.apps.sources import changed_text
from dmsg.apps.transfer import TransferError
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.printable import shorten
from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.base.units import human_size
from dmsg.cli.files.send_by_key import resumed_text, say_left_out
from dmsg.cli.output import notice, say, tell
from dmsg.cli.reconnect_notice import CHECK_INTERVAL, NOTICE_AFTER, clock_time
from dmsg.clients.address_book import AddressBook
from dmsg.directory_checks import UnsafeDirectory, check_not_planted
from dmsg.errors import ConnectFailed, DiscoveryError, DmsgTimeout, WrongUse
from dmsg.keys import PubKey
from dmsg.net.deadlines import no_answer
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of

if TYPE_CHECKING:
    from rich.progress import TaskID
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol

    from dmsg.apps.intake import Intake
    from dmsg.apps.parcels.walk import WalkResult
    from dmsg.apps.transfer import TransferResult
    from dmsg.cli.access import Access
    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.stream import StreamTransport
    from dmsg.v2019.client import Client


RETRY_DELAY = 1.0
"""Seconds between attempts to resume a copy."""


class CopyFactory(Factory):
    """Factory of the protocols of ``dmsg cp --listen``. Each one sends or receives what its peer asks for. The factory
    refuses peers that are not allowed, and prints the result of each copy.

    :param now: function that returns the seconds of a monotonic clock.
    """

    noisy = False

    def __init__(
        self,
        make: Callable[[], CopyPeer],
        access: Access,
        intake: Intake | None,
        now: Callable[[], float],
    ) -> None:
        self._make = make
        self._intake = intake
        self.admits = self._allowed = access
        self._lines = LogThrottle(now)
        self._last_error = ""

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:

        if addr is None or not self._allowed(addr):
            return None
        peer = self._make()
        whom = addr.public_key.short if isinstance(addr, DmsgAddress) else str(addr)
        peer_digits = str(addr).removeprefix("dmsg:")[:8]

        def ended(result: TransferResult | Failure) -> None:
            if isinstance(result, Failure) and isinstance(result.value, OfferRefused) and self._intake is not None:
                if (line := self._intake.refusal_line(result.value, whom)) is not None:
                    say(line, err=True)
            elif isinstance(result, Failure):
                error = f"{whom}: {shorten(str(result.value))}"
                # A peer that waits for another transfer tries again each second, so the same error is printed only
                # once.  A stranger could make each error another one.
                is_known = isinstance(addr, DmsgAddress) and self._allowed.is_known(addr.public_key)
                more = None if error == self._last_error else "" if is_known else self._lines.suffix()
                if more is not None:
                    say(error + more, err=True)
                self._last_error = error
            else:
                self._last_error = ""
                text = f"{whom}: {result.name}, {human_size(result.size)}, {human_size(result.rate)}/s"
                tell(text, peer=peer_digits, name=result.name, bytes=result.size, **_hash_of(result))
                if result.changed:
                    notice(f"{whom}: {changed_text(result.name)}")

        peer.done.addBoth(ended)
        return peer


def parse_remote(text: str) -> tuple[PubKey, str] | None:
    """Return the peer and the path in ``KEY:PATH`` or ``NAME:PATH``; None if the text is a local path."""
    who, colon, path = text.partition(":")
    if not colon or "/" in who or not who:
        return None
    return AddressBook().find(who), path


Make = Callable[[Started], Copy]
"""Function that creates the copy for one attempt.  It gets the callback that is invoked when content begins to flow."""


@dataclass(frozen=True)
class CopyJob:
    """One copy to or from a peer, which may take several attempts.

    :ivar peer: key of the peer.
    :ivar make: function that creates the copy for one attempt.
    """

    peer: PubKey
    make: Make


def _hash_of(result: TransferResult) -> dict[str, str]:
    """Return the field with the SHA-256 of a copied file for ``--json``; no field for a directory."""
    return {"sha256": result.sha256} if result.sha256 else {}


def _putter(source: Path, path: str, hidden: bool) -> Make:
    told: list[WalkResult] = []

    def left_out(walked: WalkResult) -> None:
        if not told:  # Each attempt leaves out the same files, so they are printed only once.
            say_left_out(walked)
        told.append(walked)

    return lambda started: Put(source, path, on_started=started, hidden=hidden, on_left_out=left_out)


def jobs_of(
    sources: tuple[str, ...],
    target: str,
    *,
    recursive: bool = False,
    stage: Path | None = None,
    hidden: bool = False,
) -> list[CopyJob]:
    """Return the copies that the arguments of the command describe.

    :param recursive: whether directories may be copied.
    :param stage: staging directory for copies from peer to peer, see :func:`~dmsg.cli.files.staging.stage_of`.
    :param hidden: whether to include names that begin with a dot.
    :raises WrongUse: the arguments do not describe copies.
    :raises TransferError: a file or directory cannot be copied.
    """
    if stage is not None:
        return [
            *jobs_of(sources, f"{stage}/", recursive=recursive, hidden=hidden),
            *_from_stage(sources, target, stage, recursive=recursive, hidden=hidden),
        ]
    if not sources:
        raise WrongUse("nothing to copy: SOURCE... TARGET is needed")
    there = parse_remote(target)
    if there is None:
        try:
            check_not_planted(Path(target))
        except UnsafeDirectory as error:
            raise WrongUse(str(error.strerror)) from None
    jobs: list[CopyJob] = []
    made: set[str] = set()
    for source in sources:
        from_peer = parse_remote(source)
        if (there is None) == (from_peer is None):
            raise WrongUse("SOURCE or TARGET must be at a peer: KEY:PATH or NAME:PATH")
        if there is not None:
            job, becomes = _plan_send(source, *there, several=len(sources) > 1, recursive=recursive, hidden=hidden)
        else:
            assert from_peer is not None
            job, becomes = _plan_fetch(
                source, *from_peer, target, several=len(sources) > 1, recursive=recursive, hidden=hidden
            )
        if becomes in made:
            raise TransferError(f"{source}: two sources have this name, and one would overwrite the other")
        made.add(becomes)
        jobs.append(job)
    return jobs


def _plan_send(
    source: str, peer: PubKey, path: str, *, several: bool, recursive: bool, hidden: bool
) -> tuple[CopyJob, str]:
    """Return the job that copies a local file or directory to a peer, and the path of the copy at the peer.

    :param path: target at the peer.
    :param several: whether the command has several sources.
    :raises TransferError: the file or directory cannot be copied.
    """
    local = Path(source)
    check_name(source, local.name, hidden=hidden)
    into = not path or path.endswith("/")
    if local.is_dir():
        if not recursive:
            raise TransferError(f"{source}: is a directory; use -r to copy it")
        if not into:
            raise TransferError(
                "a directory needs a target that ends in : or /; the copy gets the directory's name there"
            )
        becomes = path + local.resolve().name
        return CopyJob(peer, _putter(local, becomes, hidden)), becomes
    regular_size(local)
    if several and not into:
        raise TransferError("several files need a target that ends in : or /")
    becomes = path + local.name if into else path
    return CopyJob(peer, _putter(local, becomes, hidden)), becomes


def check_name(display_name: str, name: str, *, hidden: bool) -> None:
    """Check that a name does not begin with a dot, unless the user has allowed that.

    :param display_name: path as the user typed it.
    :param hidden: whether the user has allowed names that begin with a dot.
    :raises TransferError: the name begins with a dot.
    """
    if has_dot(name) and not hidden:
        raise TransferError(f"{display_name}: its name begins with a dot; use --hidden to copy it")


def _plan_fetch(
    source: str, peer: PubKey, path: str, target: str, *, several: bool, recursive: bool, hidden: bool
) -> tuple[CopyJob, str]:
    """Return the job that copies a peer's file or directory to this machine, and the local path of the copy.

    :param path: source at the peer.
    :param several: whether the command has several sources.
    :raises TransferError: the file or directory cannot be copied to the target.
    """
    name = PurePosixPath(path).name
    if (path.endswith("/") and not recursive) or name in ("", ".", ".."):
        raise TransferError(f"{source}: names no file" + (" and no directory" if recursive else ""))
    local = Path(target)
    if local.is_dir():
        local /= name
    check_name(os.fspath(local), local.name, hidden=hidden)
    if local.is_symlink() and local.exists():
        local = local.resolve()  # A copy writes to the target of a link, as cp(1) does.
    if recursive:
        if not Path(target).is_dir():
            raise TransferError(f"{target}: there is no such directory")
    elif local.exists() and not local.is_file():
        raise TransferError(f"{target}: not a regular file")
    if not Path(target).is_dir() and (target.endswith("/") or several):
        raise TransferError(f"{target}: there is no such directory")
    if not local.parent.is_dir():
        raise TransferError(f"{local.parent}: there is no such directory")

    def make(started: Started) -> Copy:
        return Get(path.rstrip("/"), local, directories=recursive, hidden=hidden, on_started=started)

    return CopyJob(peer, make), os.fspath(local)


def _from_stage(sources: tuple[str, ...], target: str, stage: Path, *, recursive: bool, hidden: bool) -> list[CopyJob]:
    """Return the copies from the staging directory to the target peer.  They run after the sources have arrived
    there.
    """
    there = parse_remote(target)
    assert there is not None
    peer, path = there
    into = not path or path.endswith("/")
    if not into and (len(sources) > 1 or recursive):
        raise TransferError("several files, or a directory, need a target that ends in : or /")
    jobs = []
    for source in sources:
        name = PurePosixPath(source.partition(":")[2].rstrip("/")).name
        becomes = path + name if into else path
        jobs.append(CopyJob(peer, _putter(stage / name, becomes, hidden)))
    return jobs


async def copy_one(
    reactor: Reactor,
    client: Client,
    job: CopyJob,
    port: int,
    retry: float,
    timeout: float = CONNECT_TIMEOUT,
) -> None:
    """Copy one file or directory.  After a lost connection, try again until there was no progress for ``retry``
    seconds.

    :param timeout: seconds that opening a stream may take.
    """

    from dmsg.cli.files.send_by_key import transfer_progress

    peer = job.peer
    who = AddressBook().name_or_short(peer)
    with transfer_progress() as progress:
        away = _CopyProgress(reactor, progress, who, retry)
        watching = LoopingCall(away.update)
        watching.clock = reactor
        watching.start(CHECK_INTERVAL, now=False).addErrback(lambda _: None)
        reached = False
        try:
            while True:
                copier = job.make(away.started)
                factory = Factory.forProtocol(lambda copier=copier: copier)  # type: ignore[misc]
                factory.noisy = False
                try:
                    connected = await client.connect(peer, factory, port, timeout=timeout)
                    reached = True
                    away.transport = stream_of(connected)
                    try:
                        done = await copier.done
                    finally:
                        if isinstance(copier, Get):
                            with suppress(TimeoutError):
                                await copier.closed.addTimeout(CLOSE_TIMEOUT, reactor, no_answer)
                    break
                except (ConnectFailed, DiscoveryError, DmsgTimeout, CopyCut) as error:
                    if not reached:
                        raise ConnectFailed(f"{copier.label}{error}", key=getattr(error, "key", "")) from None
                    if away.is_given_up(busy=isinstance(error, CopyBusy)):
                        raise CopyCut(f"{copier.label}{error}{away.resume_hint()}") from None
                away.transport = None
                await deferLater(reactor, RETRY_DELAY)
        finally:
            watching.stop()
    tell(
        f"{done.name}: {human_size(done.size)} in {done.seconds:.2f} s, {human_size(done.rate)}/s"
        + (f", sha256 {done.sha256}" if done.sha256 else "")
        + resumed_text(done.resumed),
        copied=done.name,
        bytes=done.size,
        seconds=done.seconds,
        **_hash_of(done),
    )
    if done.changed:
        notice(changed_text(done.name))


class _CopyProgress:
    """Progress of a copy: shows a bar, or how long the peer has been unreachable, and decides when to give up."""

    def __init__(self, reactor: Reactor, progress: Progress, peer_name: str, retry: float) -> None:
        self._reactor = reactor
        self._progress = progress
        self._peer_name = peer_name
        self._retry = retry
        self._bar: TaskID | None = None
        self._name = ""
        self._size = self._done = 0
        self._since: float | None = None
        self._is_reported = self._is_busy = False
        self.transport: StreamTransport | None = None

    def started(self, name: str, size: int, offset: int) -> Callable[[int], None]:
        """Show that the copy starts or resumes, and return the callback for its progress.

        :param offset: number of bytes that the target has already.
        """
        if self._bar is None:
            self._bar = self._progress.add_task(name, total=size, completed=offset)
        if offset and self._since is not None:
            self._say(f"{self._peer_name} is back, {name} resumes at {human_size(offset)} of {human_size(size)}")
        self._name, self._size, self._done = name, size, offset
        self._note_back()
        return self._on_progress

    def _on_progress(self, done: int) -> None:
        self._done = done
        assert self._bar is not None
        self._progress.update(self._bar, completed=done)
        if self._since is not None:
            self._note_back()

    def _note_back(self) -> None:
        self._since, self._is_reported, self._is_busy = None, False, False
        if self._bar is not None:
            self._progress.update(self._bar, description=self._name)

    def is_given_up(self, *, busy: bool = False) -> bool:
        """Whether there has been no progress for ``retry`` seconds.

        :param busy: whether the peer was reached, but is receiving the file over another connection.
        """
        if busy != self._is_busy:
            self._is_busy, self._is_reported = busy, False
        now = self._reactor.seconds()
        if self._since is None:
            self._since = now
        return bool(now - self._since >= self._retry)

    def resume_hint(self) -> str:
        """Return text for the end of an error message. The text says at which byte the same command would resume."""
        return (
            f"; the same command resumes at {human_size(self._done)} of {human_size(self._size)}" if self._done else ""
        )

    def update(self) -> None:
        """Update the display.  Abort the stream if the peer has been unreachable for ``retry`` seconds."""
        stream = self.transport
        now = self._reactor.seconds()
        if stream is not None and stream.away_since is not None and self._since is None:
            self._since = stream.away_since
        if self._since is None:
            return
        gone = now - self._since
        if gone >= self._retry and stream is not None:
            # The time limit is the same for a lost connection and for a busy peer.
            stream.abortConnection()
            return
        until = clock_time(self._retry - gone)
        what = "receives it from another connection" if self._is_busy else f"has been unreachable for {gone:.0f} s"
        text = f"{self._peer_name} {what}; retrying until {until}"
        if self._bar is not None:
            from dmsg.cli.files.send_by_key import WIDE

            narrow = self._progress.console.width < WIDE
            short = f"{self._peer_name} {'busy' if self._is_busy else 'away'}, until {until}"
            self._progress.update(self._bar, description=short if narrow else f"{self._name}: {text}")
        if gone >= NOTICE_AFTER and not self._is_reported:
            self._is_reported = True
            self._say(text)

    def _say(self, text: str) -> None:
        if self._progress.disable:  # The progress bar shows the text itself, so a notice is printed only without a bar.
            notice(text)
