"""The side of a copy that is asked, for files: see :mod:`dmsg.apps.copying`."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.apps.copying import Copier
from dmsg.apps.descriptors import open_within
from dmsg.apps.parts import IS_BUSY
from dmsg.apps.paths import inside
from dmsg.apps.pieces import PieceReader
from dmsg.apps.sources import Source
from dmsg.apps.transfer import TransferError

LEFT_AFTER = 5.0
"""Seconds without a way to who sends a file, after which another may send it: a program that was killed, and came
again without a key of its own."""


class Peer(Copier):
    """The side that is asked.

    :param root: the directory that peers see.
    :param readable: whether files may be fetched; ``writable``: sent.
    :param hidden: names that begin with a dot, too.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        root: Path,
        *,
        readable: bool = True,
        writable: bool = False,
        overwrite: bool = False,
        hidden: bool = False,
        max_size: int | None = None,
        busy: dict[Path, Peer] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(reactor, **options)
        self._root = root
        self._readable, self._writable = readable, writable
        self._overwrite = overwrite
        self._hidden = hidden
        self._max_size = max_size
        self._busy = busy if busy is not None else {}
        self._mine: Path | None = None
        self._next = self._asked

    def _asked(self, message: dict[str, Any]) -> None:
        self._began = time.monotonic()
        self._next = self._unexpected
        op = message.get("op")
        if op == "get" and self._readable:
            self._give(message, inside(self._root, message.get("path"), hidden=self._hidden))
        elif op == "put" and self._writable:
            self._accept(message, inside(self._root, message.get("path"), hidden=self._hidden))
        else:
            raise TransferError("files are not sent here" if op == "put" else "files are not fetched here")

    def _open(self, path: Path) -> Source:
        """A file below the directory; what has become a link since it was looked at is not followed.

        :raises TransferError: there is none.
        """
        base = self._root.resolve()
        try:
            at = open_within(base, path.parent)
        except OSError:
            raise TransferError(f"there is no file {path.name}") from None
        try:
            return self._open_source(path, at)
        except FileNotFoundError:
            raise TransferError(f"there is no file {path.name}") from None
        finally:
            os.close(at)

    def _give(self, message: dict[str, Any], path: Path) -> None:
        source = self._open(path)
        wanted = self._number(message, "offset")
        offset = wanted if wanted <= self._size else 0

        def hashed(digest: Any) -> None:
            same = digest.hexdigest() == message.get("sha256")
            goes_on = {"size": self._size, "offset": offset if same else 0, **source.mode_and_time}
            if message.get("pieces") is True:
                self._pieces = PieceReader()
                goes_on["pieces"] = True
            self._say(**goes_on)
            self._send_from(offset if same else 0, digest if same else hashlib.sha256())

        self._hash_prefix(source.read, offset, hashed)

    def _accept(self, message: dict[str, Any], path: Path) -> None:
        self._size = self._number(message, "size")
        self._remember(message)
        if self._max_size is not None and self._size > self._max_size:
            raise TransferError(f"file of {self._size} bytes is too large, the limit is {self._max_size}")
        if path.exists() and not self._overwrite:
            self._compare(path)
            return
        self._claim(path)
        here = self._hold(path, self._root.resolve()).size
        here = here if here <= self._size else 0

        def hashed(digest: Any) -> None:
            def chosen(answer: dict[str, Any]) -> None:
                offset = self._number(answer, "offset", here)
                if offset not in (0, here):
                    raise TransferError("offset is malformed")
                if answer.get("pieces") is True:
                    self._pieces = PieceReader()
                self._receive_from(offset, digest if offset else hashlib.sha256())

            self._next = chosen
            self._say(offset=here, sha256=digest.hexdigest(), pieces=True)

        self._hash_part(here, hashed)

    def _compare(self, path: Path) -> None:
        """It is there: perhaps the same file, whose sender missed the last word."""
        exists = TransferError(f"{path.name} exists already")
        size = self._size
        try:
            source = self._open(path)
        except (TransferError, OSError):
            raise exists from None
        if source.size != size:
            raise exists

        def hashed(digest: Any) -> None:
            def same(answer: dict[str, Any]) -> None:
                if answer.get("same") is not True:
                    raise exists
                self._offset, self._hash = self._size, digest
                self._say(ok=True)
                self._finished(close=False)

            self._next = same
            self._say(whole=True, offset=self._size, sha256=digest.hexdigest())

        self._hash_prefix(source.read, self._size, hashed)

    def _claim(self, path: Path) -> None:
        """From now on this is this connection's, until it ends.

        :raises TransferError: another one writes it, and lives.
        """
        other = self._busy.get(path)
        if other is not None:
            if not other.is_left_by(self):
                raise TransferError(f"{path.name} {IS_BUSY}")
            other.give_way()
        self._busy[path] = self
        self._mine = path

    def is_left_by(self, other: Peer) -> bool:
        """Nothing carries this stream, and its peer has come again, or it is so for long: who sent was killed."""
        since = getattr(self.transport, "away_since", None)
        if since is None:
            return False
        same = self._peer_key() is not None and self._peer_key() == other._peer_key()
        return same or self._reactor.seconds() - since > LEFT_AFTER

    def give_way(self) -> None:
        """Its part is another's from now on."""
        assert self.transport is not None
        self.transport.abortConnection()  # type: ignore[attr-defined]
        self.connectionLost(Failure(ConnectionAborted()))  # at once: the other one begins now

    def _peer_key(self) -> object:
        return None if self.transport is None else getattr(self.transport.getPeer(), "public_key", None)

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if self._mine is not None and self._busy.get(self._mine) is self:
            del self._busy[self._mine]
        super().connectionLost(reason)
