"""Registry in one JSON file, ``{"twins": [...]}``, which is read again when it has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.net.isolate import call_isolated
from dmsg.rmb.errors import RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import PAGE, TwinRegistry, follow
from dmsg.rmb.twins.twin import Twin
from dmsg.shared_files import FileBusy, exclusive_change, replace_file

POLL = 2.0
"""Seconds between two checks whether the file has changed, if a caller watches the registry."""
MAX_FILE = 64 * 1024 * 1024
"""Maximum size of the file in bytes."""

_log = Logger()


@implementer(TwinRegistry)
class FileRegistry:
    """Registry in a file that an operator may edit.

    Entries in the file need no signature: whoever may write the file may change the registry anyway. Statements that
    are stored through :meth:`put` must be signed.
    """

    def __init__(self, path: str | os.PathLike[str], reactor: IReactorTime) -> None:
        """:raises RegistryUnavailable: the file exists but cannot be read or parsed."""
        self.path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._twins: dict[int, Twin] = {}
        self._accounts: dict[bytes, int] = {}
        self._watchers: list[Callable[[Twin], None]] = []
        self._poll = LoopingCall(self._check_file)
        self._poll.clock = reactor
        self._load()

    def _load(self) -> None:
        """Read the file if it has changed since it was last read."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_mtime_ns, status.st_size)
                if seen == self._seen:
                    return
                content = file.read(MAX_FILE + 1)
        except FileNotFoundError:
            self._twins, self._accounts, self._seen = {}, {}, None
            return
        except OSError as error:
            raise RegistryUnavailable(f"{self.path}: {error.strerror}") from None
        twins = self._parse(content)
        before, self._twins, self._seen = self._twins, twins, seen
        self._accounts = {twin.account: twin.id for twin in twins.values()}
        for twin in twins.values():
            if before.get(twin.id) != twin:
                for changed in self._watchers:
                    call_isolated(changed, twin)

    def _parse(self, content: bytes) -> dict[int, Twin]:
        if len(content) > MAX_FILE:
            raise RegistryUnavailable(f"{self.path}: this file has more than {MAX_FILE} bytes")
        twins: dict[int, Twin] = {}
        try:
            for one in json.loads(content)["twins"]:
                twin = Twin.from_dict(one)
                if not twin.id or twin.id in twins:
                    raise RegistryRefused(f"id {twin.id} is not allowed, or occurs twice")
                twins[twin.id] = twin
        except RegistryRefused as error:
            raise RegistryUnavailable(f"{self.path}: {error}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RegistryUnavailable(f'{self.path}: this file is not {{"twins": [...]}}') from None
        return twins

    def _check_file(self) -> None:
        try:
            self._load()
        except RegistryUnavailable as error:
            _log.warn(
                "the changed file of twins cannot be used; the registry keeps the twins it has: {error}",
                error=str(error),
            )

    def get(self, twin: int) -> Deferred[Twin]:
        try:
            self._load()
        except RegistryUnavailable:
            return fail()
        found = self._twins.get(twin)
        return fail(TwinNotFound(f"twin not found {twin}")) if found is None else succeed(found)

    def id_by_account(self, account: bytes) -> Deferred[int]:
        try:
            self._load()
        except RegistryUnavailable:
            return fail()
        found = self._accounts.get(account)
        return fail(TwinNotFound("no twin with this account")) if found is None else succeed(found)

    def put(self, statement: Twin) -> Deferred[Twin]:
        try:
            return succeed(self._put(statement))
        except (RegistryRefused, RegistryUnavailable):
            return fail()
        except FileBusy as error:
            return fail(RegistryUnavailable(str(error)))
        except OSError as error:
            return fail(RegistryUnavailable(f"{self.path}: {error.strerror}"))

    def _put(self, statement: Twin) -> Twin:
        with exclusive_change(self.path):
            self._load()
            number = self._accounts.get(statement.account)
            follow(None if number is None else self._twins[number], statement)
            stored = replace(statement, id=number or max(self._twins, default=0) + 1)
            twins = {**self._twins, stored.id: stored}
            body = json.dumps({"twins": [twin.as_dict() for _, twin in sorted(twins.items())]}, indent=1)
            # Everybody may read the file, because a registry is public.
            replace_file(self.path, body + "\n", mode=0o644)
            self._load()
        return stored

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        try:
            self._load()
        except RegistryUnavailable:
            return fail()
        ids = sorted(number for number in self._twins if number > after)
        return succeed([self._twins[number] for number in ids[: min(limit, PAGE)]])

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        self._watchers.append(on_change)
        if not self._poll.running:
            self._poll.start(POLL, now=False)

    def close(self) -> Deferred[None]:
        if self._poll.running:
            self._poll.stop()
        return succeed(None)
