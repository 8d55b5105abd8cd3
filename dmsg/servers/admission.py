"""Who may connect to a server: lists of keys in files, and a question over HTTP.

A list has one key a line, 53 characters, or 66 in hexadecimal; what follows ``#`` is a
comment.  With an allow list only its keys are admitted; keys of the deny list
never are.  A list that cannot be read, or has a line that is no key, changes
nothing and is logged: what was true before stays true.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from treq.client import HTTPClient
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.base.options import ACCESS, SECONDS, Choice, Text, option
from dmsg.base.printable import shortened
from dmsg.base.urls import check_url
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.isolate import isolated
from dmsg.net.reactor import cancel_call
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool

if TYPE_CHECKING:
    from treq._types import _ITreqReactor

LIST_LIMIT = 16 * 1024 * 1024
"""Bytes of a list: some 240,000 keys."""
LOOK_INTERVAL = 2.0
"""Seconds between looks whether a list was changed."""
HOOK_TIMEOUT = 5.0
"""Seconds for the hook's answer, by default."""
HOOK_CACHE_TIME = 30.0
"""Seconds that the hook's answer is used again."""
HOOK_CACHE_SIZE = 65536
MAX_ANSWER = 64 * 1024
"""Bytes of an answer of the hook, which are not looked at."""

_log = Logger()


class ListError(DmsgError):
    """A list that cannot be used."""


def read_keys(path: str | os.PathLike[str]) -> frozenset[PubKey]:
    """The keys in a list.

    :raises ListError: unreadable, too long, or with a line that is no key.
    """
    try:
        with Path(path).open() as file:
            text = file.read(LIST_LIMIT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ListError(f"{path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    if len(text) > LIST_LIMIT:
        raise ListError(f"{path}: longer than {LIST_LIMIT} bytes")
    keys = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if word:
            try:
                keys.add(PubKey.from_text(word))
            except KeyFormatError as error:
                raise ListError(f"{path}, line {number}: {error}") from None
    return frozenset(keys)


class KeyList:
    """One list in a file, read again when the file changed.

    :raises ListError: it cannot be used now.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp = self._stat()
        self.keys = read_keys(path)

    def _stat(self) -> tuple[int, int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns

    def look(self, *, force: bool = False) -> bool:
        """Whether the keys are others than before."""
        stamp = self._stat()
        if stamp == self._stamp and not force:
            return False
        self._stamp = stamp
        try:
            keys = read_keys(self.path)
        except ListError as error:
            _log.error("the list was not reloaded: {error}", error=str(error))
            return False
        changed = keys != self.keys
        self.keys = keys
        return changed


class Hook:
    """Asks an HTTP service: POST ``{"key": HEX}``; 200 admits, 403 refuses.

    :param when_down: what is answered when it gives no such answer in time.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        url: str,
        *,
        timeout: float = HOOK_TIMEOUT,
        when_down: bool = False,
        http: HTTPClient | None = None,
    ) -> None:
        """:raises ValueError: not a URL."""
        self.url = check_url(url)
        self._reactor = reactor
        self._timeout = timeout
        self._when_down = when_down
        self._http = http or WebClient(reactor, make_pool(reactor, persistent=False), timeout)
        self._known: dict[PubKey, tuple[float, bool]] = {}
        self.unanswered = 0

    def ask(self, key: PubKey) -> bool | Deferred[bool]:
        """Whether ``key`` is admitted."""
        known = self._known.get(key)
        if known is not None and known[0] > self._reactor.seconds():
            return known[1]
        return Deferred.fromCoroutine(self._ask(key))

    async def _ask(self, key: PubKey) -> bool:
        answer = None
        try:
            response = await self._http.post(
                self.url, json={"key": key.hex()}, timeout=self._timeout, reactor=cast("_ITreqReactor", self._reactor)
            )
            await read_body(response, MAX_ANSWER).addTimeout(self._timeout, self._reactor)
            answer = {200: True, 403: False}.get(response.code)
            problem = f"status {response.code}"
        except Exception as error:  # whatever HTTP, DNS and TCP may raise means the same here
            problem = shortened(str(error)) or type(error).__name__
        if answer is None:
            self.unanswered += 1
            _log.warn(
                "admission hook gives no answer, {what}: {problem}",
                what="admitted" if self._when_down else "refused",
                problem=problem,
            )
            return self._when_down
        self._known[key] = (self._reactor.seconds() + HOOK_CACHE_TIME, answer)
        if len(self._known) > HOOK_CACHE_SIZE:
            del self._known[next(iter(self._known))]
        return answer


class Admission:
    """Whom a server admits; everybody, if nothing is said."""

    def __init__(self, allow: KeyList | None = None, deny: KeyList | None = None, hook: Hook | None = None) -> None:
        self.allow = allow
        self.deny = deny
        self.hook = hook
        self._call: IDelayedCall | None = None

    def listed(self, key: PubKey) -> bool | None:
        """What the lists say; None: nothing, the hook decides, or nobody does."""
        if self.deny is not None and key in self.deny.keys:
            return False
        if self.allow is not None:
            return key in self.allow.keys
        return None

    def check(self, key: PubKey) -> bool | Deferred[bool]:
        """Whether ``key`` may connect: the lists first, then the hook.

        Where there is an allow list it has the last word, and the hook is asked about nobody.
        """
        said = self.listed(key)
        if said is not None:
            return said
        return True if self.hook is None else self.hook.ask(key)

    def look(self, *, force: bool = False) -> bool:
        """Read lists that were changed; whether one has other keys now."""
        lists = [one for one in (self.allow, self.deny) if one is not None]
        changed = [one.look(force=force) for one in lists]
        return any(changed)

    def watch(self, reactor: IReactorTime, changed: Callable[[], None]) -> None:
        """Look at the files from now on, and tell of a change."""
        if self.allow is None and self.deny is None:
            return

        def look_and_tell() -> None:
            if self.look():
                changed()

        def look() -> None:
            isolated(look_and_tell)
            self._call = reactor.callLater(LOOK_INTERVAL, look)

        self._call = reactor.callLater(LOOK_INTERVAL, look)

    def stop(self) -> None:
        """Look no more."""
        cancel_call(self._call)


def _list_in(path: str) -> KeyList | None:
    return KeyList(path) if path else None


def _checked_hook(url: str) -> str | None:
    return check_url(url) if url else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """What an operator says of whom a server admits."""

    allow: KeyList | None = option(
        None,
        "File with the keys to admit, one per line, read again when it changes; without a file all keys are admitted",
        Text("file", _list_in),
        group=ACCESS,
    )
    deny: KeyList | None = option(
        None,
        "File with the keys to refuse, one per line, read again when it changes",
        Text("file", _list_in),
        group=ACCESS,
    )
    hook: str | None = option(
        None,
        "URL to ask whether to admit a key that --allow and --deny do not decide: status 200 admits, 403 refuses",
        Text("URL", _checked_hook),
        name="admission-hook",
        group=ACCESS,
    )
    timeout: float = option(
        HOOK_TIMEOUT,
        "Seconds to wait for the answer of the admission hook",
        SECONDS,
        name="admission-timeout",
        group=ACCESS,
    )
    when_down: bool = option(
        False,
        "Whether to refuse or admit clients while the admission hook does not answer",
        Choice({"refuse": False, "admit": True}),
        name="admission-down",
        group=ACCESS,
    )

    def admission(self, reactor: IReactorTime) -> Admission:
        """Whom to admit."""
        hook = None
        if self.hook is not None:
            hook = Hook(reactor, self.hook, timeout=self.timeout, when_down=self.when_down)
        return Admission(self.allow, self.deny, hook)
