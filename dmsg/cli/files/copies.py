"""What runs ``dmsg cp``: copies that go on where they were cut."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from twisted.internet.protocol import Factory
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from dmsg.apps.copying import Copier, CopyCut, Get, Peer, Put
from dmsg.apps.paths import regular_size
from dmsg.apps.transfer import TransferError
from dmsg.apps.trees import GetTree, PutTree
from dmsg.base.units import human_size
from dmsg.cli.output import notice, say, tell
from dmsg.clients.client import CONNECT_TIMEOUT
from dmsg.clients.names import Names
from dmsg.errors import ConnectFailed, DiscoveryError, DmsgTimeout
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.internet.protocol import Protocol

    from dmsg.apps.transfer import Transferred
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


RETRY_DELAY = 1.0
"""Seconds between tries to go on with a copy."""
LOOK_INTERVAL = 0.5
"""Seconds between looks whether the peer is there."""
TELL_AFTER = 2.0
"""Seconds after which it is said that the peer is away."""


class Peers(Factory):
    """Gives each peer that is allowed an end of a copy."""

    noisy = False

    def __init__(self, make: Callable[[], Peer], allowed: Callable[[IAddress], bool]) -> None:
        self._make = make
        self.admits = self._allowed = allowed

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:

        if addr is None or not self._allowed(addr):
            return None
        peer = self._make()
        whom = str(addr).removeprefix("dmsg:")[:8]

        def ended(result: Transferred | Failure) -> None:
            if isinstance(result, Failure):
                say(f"{whom}: {result.value}", err=True)
            else:
                text = f"{whom}: {result.name}, {human_size(result.size)}, {human_size(result.rate)}/s"
                tell(text, peer=whom, name=result.name, bytes=result.size, **_hash_of(result))

        peer.done.addBoth(ended)
        return peer


def _remote(text: str) -> tuple[PubKey, str] | None:
    """KEY:PATH or NAME:PATH; None for what is of this machine."""
    who, colon, path = text.partition(":")
    if not colon or "/" in who or not who:
        return None
    return Names().find(who), path


Job = tuple[PubKey, Callable[[Any, Any], "Copier | PutTree | GetTree"]]


def _hash_of(result: Transferred) -> dict[str, str]:
    """Of a file; a directory has none."""
    return {"sha256": result.sha256} if result.sha256 else {}


def stage_of(sources: tuple[str, ...], target: str) -> Path | None:
    """Where what goes from peer to peer lies meanwhile; None: nothing does.

    It is the same for the same command, so that what was cut goes on there.
    """
    if _remote(target) is None or any(_remote(source) is None for source in sources):
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "dmsg" / "cp" / hashlib.sha256("\0".join((*sources, target)).encode()).hexdigest()[:16]


def _from_peer_to_peer(sources: tuple[str, ...], target: str, stage: Path, *, recursive: bool) -> list[Job]:
    """First to this machine, then on: each has its own connection, and goes on by itself where it was cut."""
    stage.mkdir(parents=True, exist_ok=True, mode=0o700)
    jobs = jobs_of(sources, str(stage), recursive=recursive)
    there = _remote(target)
    assert there is not None
    for source in sources:
        name = PurePosixPath(source.partition(":")[2].rstrip("/")).name
        into = not there[1] or there[1].endswith("/")
        if not into and (len(sources) > 1 or recursive):
            raise TransferError("several files, and directories, need a target that ends in : or /")
        if recursive:
            jobs.append((there[0], _tree_putter(stage / name, there[1].rstrip("/"))))
        else:
            jobs.append((there[0], _putter(stage / name, there[1] + name if into else there[1])))
    return jobs


def jobs_of(sources: tuple[str, ...], target: str, *, recursive: bool = False, stage: Path | None = None) -> list[Job]:
    """What to copy.

    :param recursive: directories of this machine, and what is fetched are directories.
    :param stage: see :func:`stage_of`.
    :raises TransferError: it makes no sense.
    """
    if stage is not None:
        return _from_peer_to_peer(sources, target, stage, recursive=recursive)

    if not sources:
        raise TransferError("nothing to copy: SOURCE... TARGET is needed")
    there = _remote(target)
    jobs: list[Job] = []
    for source in sources:
        from_peer = _remote(source)
        if (there is None) == (from_peer is None):
            raise TransferError("one of SOURCE and TARGET has to be of a peer, KEY:PATH or NAME:PATH")
        if there is not None and Path(source).is_dir():
            if not recursive:
                raise TransferError(f"{source}: is a directory; -r copies it")
            if there[1] and not there[1].endswith("/"):
                raise TransferError("a directory needs a target that ends in : or /, where it keeps its name")
            jobs.append((there[0], _tree_putter(Path(source), there[1].rstrip("/"))))
        elif there is not None:
            regular_size(Path(source))
            name = Path(source).name
            path = there[1] + name if not there[1] or there[1].endswith("/") else there[1]
            if len(sources) > 1 and path != there[1] + name:
                raise TransferError("several files need a target that ends in : or /")
            jobs.append((there[0], _putter(Path(source), path)))
        else:
            assert from_peer is not None
            if recursive:
                if not Path(target).is_dir():
                    raise TransferError(f"{target}: there is no such directory")
                jobs.append((from_peer[0], _tree_getter(from_peer[1].rstrip("/"), Path(target))))
                continue
            name = PurePosixPath(from_peer[1]).name
            if from_peer[1].endswith("/") or name in ("", ".", ".."):
                raise TransferError(f"{source}: names no file")
            local = Path(target)
            if local.is_dir():
                local /= name
            if local.is_symlink() and local.exists():
                local = local.resolve()  # as cp(1): what it leads to is written
            if local.exists() and not local.is_file():
                raise TransferError(f"{target}: not a regular file")
            if not Path(target).is_dir() and (target.endswith("/") or len(sources) > 1):
                raise TransferError(f"{target}: there is no such directory")
            if not local.parent.is_dir():
                raise TransferError(f"{local.parent}: there is no such directory")
            jobs.append((from_peer[0], _getter(from_peer[1], local)))
    return jobs


def _putter(source: Path, path: str) -> Callable[[Any, Any], Copier]:

    return lambda reactor, started: Put(reactor, source, path, started=started)


def _tree_putter(source: Path, path: str) -> Callable[[Any, Any], PutTree]:

    return lambda reactor, started: PutTree(source, path, started=started)


def _tree_getter(path: str, target: Path) -> Callable[[Any, Any], GetTree]:

    return lambda reactor, started: GetTree(path, target, started=started)


def _getter(path: str, target: Path) -> Callable[[Any, Any], Copier]:

    return lambda reactor, started: Get(reactor, path, target, started=started)


async def copy_one(
    reactor: Reactor,
    client: Client,
    peer: PubKey,
    port: int,
    make: Callable[[Any, Any], Copier | PutTree | GetTree],
    retry: float,
    timeout: float = CONNECT_TIMEOUT,
) -> None:
    """One file; goes on after the connection was lost, for ``retry`` seconds without progress."""

    from dmsg.cli.files.sending import transfer_progress

    who = Names().name_of(peer) or peer.short
    with transfer_progress() as progress:
        away = _Away(reactor, progress, who, retry)
        watching = LoopingCall(away.look)
        watching.clock = reactor
        watching.start(LOOK_INTERVAL, now=False).addErrback(lambda _: None)
        reached = False
        try:
            while True:
                copier = make(reactor, away.started)
                factory = Factory.forProtocol(lambda copier=copier: copier)  # type: ignore[misc]
                factory.noisy = False
                try:
                    connected: Any = await client.connect(peer, factory, timeout, port=port)
                    reached = True
                    away.transport = connected.transport
                    done = await copier.done
                    break
                except (ConnectFailed, DiscoveryError, DmsgTimeout, CopyCut) as error:
                    if not reached:
                        raise ConnectFailed(f"{copier.what}{error}") from None
                    if away.given_up():
                        raise CopyCut(f"{copier.what}{error}{away.where()}") from None
                away.transport = None
                await deferLater(reactor, RETRY_DELAY)
        finally:
            watching.stop()
    tell(
        f"{done.name}: {human_size(done.size)} in {done.seconds:.2f} s, {human_size(done.rate)}/s"
        + (f", sha256 {done.sha256}" if done.sha256 else ""),
        copied=done.name,
        bytes=done.size,
        seconds=done.seconds,
        **_hash_of(done),
    )


class _Away:
    """Shows where a copy is, and when its peer is away for how long and until when it is tried."""

    def __init__(self, reactor: Reactor, progress: Progress, who: str, retry: float) -> None:
        self._reactor = reactor
        self._progress = progress
        self._who = who
        self._retry = retry
        self._bar: Any = None
        self._name = ""
        self._size = self._done = 0
        self._since: float | None = None
        self._told = False
        self.transport: Any = None

    def started(self, name: str, size: int, offset: int) -> Callable[[int], None]:
        """The copy begins, or goes on; what is told of its progress."""
        if self._bar is None:
            self._bar = self._progress.add_task(name, total=size, completed=offset)
        if offset and self._since is not None:
            self._say(f"{self._who} is back, {name} goes on at {human_size(offset)} of {human_size(size)}")
        self._name, self._size, self._done = name, size, offset
        self._back()
        return self._moved

    def _moved(self, done: int) -> None:
        self._done = done
        self._progress.update(self._bar, completed=done)
        if self._since is not None:
            self._back()

    def _back(self) -> None:
        self._since, self._told = None, False
        if self._bar is not None:
            self._progress.update(self._bar, description=self._name)

    def given_up(self) -> bool:
        """The connection was lost: whether it was so for too long."""
        now = self._reactor.seconds()
        if self._since is None:
            self._since = now
        return bool(now - self._since >= self._retry)

    def where(self) -> str:
        """Where the same command would go on."""
        return (
            f"; the same command goes on at {human_size(self._done)} of {human_size(self._size)}" if self._done else ""
        )

    def look(self) -> None:
        """Time has passed."""
        stream = self.transport
        now = self._reactor.seconds()
        if stream is not None and stream.away_since is not None and self._since is None:
            self._since = stream.away_since
        if self._since is None:
            return
        gone = now - self._since
        if gone >= self._retry and stream is not None:
            stream.abortConnection()  # one limit for all ways of waiting
            return
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._retry - gone))
        text = f"{self._who} is away for {gone:.0f} s, tried until {until}"
        if self._bar is not None:
            self._progress.update(self._bar, description=f"{self._name}: {text}")
        if gone >= TELL_AFTER and not self._told:
            self._told = True
            self._say(text)

    def _say(self, text: str) -> None:
        if self._progress.disable:  # else the bar says it
            notice(text)
