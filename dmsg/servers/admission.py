"""Admission of clients to a server, by lists of keys in files and by an HTTP hook.

A list has one key per line, in 53 characters or 66 hexadecimal digits. Text after ``#`` is a comment. If there is an
allow list, only its keys are admitted. Keys on the deny list are never admitted. If a changed list cannot be read, or
has an invalid line, an error is logged and the previous list remains in force.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.base.options import ACCESS, SECONDS, Choice, Text, option
from dmsg.base.printable import shorten
from dmsg.base.urls import check_url
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey
from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.reactor import cancel_call

if TYPE_CHECKING:
    from treq._types import _ITreqReactor
    from treq.client import HTTPClient

LIST_LIMIT = 16 * 1024 * 1024
"""Maximum size of a list in bytes, enough for some 240,000 keys."""
CHECK_INTERVAL = 2.0
"""Seconds between two checks whether a list has changed."""
HOOK_TIMEOUT = 5.0
"""Default number of seconds to wait for the answer of the hook."""
HOOK_CACHE_TIME = 30.0
"""Seconds for which an answer of the hook is cached."""
HOOK_CACHE_SIZE = 65536
"""Maximum number of cached answers."""
MAX_ANSWER = 64 * 1024
"""Maximum size in bytes of the body of an answer. The content of the body is ignored."""

_log = Logger()


class ListError(DmsgError):
    """Error: a list of keys cannot be read, is too long, or has an invalid line."""


def read_keys(path: str | os.PathLike[str]) -> frozenset[PubKey]:
    """Return the keys in the file of an allow or deny list.

    :raises ListError: the file cannot be read, is too long, or has a line that is not a key.
    """
    try:
        with Path(path).open() as file:
            # Reading stops after one character more than allowed, which shows that the file is too long.
            text = file.read(LIST_LIMIT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ListError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if len(text) > LIST_LIMIT:
        raise ListError(f"{path}: this file has more than {LIST_LIMIT} bytes")
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
    """List of keys in a file. The file is read again when it changes.

    :raises ListError: the file cannot be read or is invalid when the object is created.
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

    def reload(self, *, force: bool = False) -> bool:
        """Read the list again if its file has changed; return whether the keys have changed.

        :param force: read the list again even if its file has not changed.
        """
        stamp = self._stat()
        if stamp == self._stamp and not force:
            return False
        # The stamp is stored even if the list cannot be read, so that the error is logged only once.
        self._stamp = stamp
        try:
            keys = read_keys(self.path)
        except ListError as error:
            _log.error("the list cannot be used; the one loaded before stays in use: {error}", error=str(error))
            return False
        changed = keys != self.keys
        self.keys = keys
        return changed


class Hook:
    """Admission hook: an HTTP service of the operator that decides about keys.

    The request is a POST of ``{"key": HEX}``. Status 200 admits the key, status 403 refuses it.

    :param when_down: whether to admit a client if the service gives neither of these answers in time.
    :ivar unanswered: number of requests without such an answer.
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
        """:raises ValueError: ``url`` is not a URL."""
        self.url = check_url(url)
        self._reactor = reactor
        self._timeout = timeout
        self._when_down = when_down
        # The import is here, because servers without a hook do not need these modules.
        from dmsg.net.web.fetch import WebClient, make_pool

        self._http = http or WebClient(reactor, make_pool(reactor, persistent=False), timeout)
        self._known: dict[PubKey, tuple[float, bool]] = {}
        self.unanswered = 0

    def ask(self, key: PubKey) -> bool | Deferred[bool]:
        """Return whether the hook admits ``key``. The answer comes from the cache, or from a request."""
        known = self._known.get(key)
        # An expired answer stays in the cache, unused, until it is replaced or evicted.
        if known is not None and known[0] > self._reactor.seconds():
            return known[1]
        return Deferred.fromCoroutine(self._ask(key))

    async def _ask(self, key: PubKey) -> bool:
        from dmsg.net.web.body import read_body

        answer = None
        try:
            asking = self._http.post(self.url, json={"key": key.hex()}, reactor=cast("_ITreqReactor", self._reactor))
            response = await add_fair_timeout(asking, self._timeout, self._reactor)
            await add_fair_timeout(read_body(response, MAX_ANSWER), self._timeout, self._reactor)
            answer = {200: True, 403: False}.get(response.code)
            problem = f"status {response.code}"
        except Exception as error:
            # HTTP, DNS and TCP raise exceptions of many types, and all of them mean that there is no answer.
            problem = shorten(str(error)) or type(error).__name__
        if answer is None:
            self.unanswered += 1
            _log.warn(
                "the admission hook did not answer, so a client was {what} (--admission-down): {problem}",
                what="admitted" if self._when_down else "refused",
                problem=problem,
            )
            # A missing answer is not cached, so that the next connection queries the hook again.
            return self._when_down
        self._known[key] = (self._reactor.seconds() + HOOK_CACHE_TIME, answer)
        if len(self._known) > HOOK_CACHE_SIZE:
            del self._known[next(iter(self._known))]
        return answer


class Admission:
    """Admission policy of a server. Without lists and without a hook, all clients are admitted."""

    def __init__(self, allow: KeyList | None = None, deny: KeyList | None = None, hook: Hook | None = None) -> None:
        self.allow = allow
        self.deny = deny
        self.hook = hook
        self._call: IDelayedCall | None = None

    def listed(self, key: PubKey) -> bool | None:
        """Return whether the allow and deny lists admit ``key``; None if they leave the decision to the admission
        hook."""
        # The deny list takes precedence, so that an operator can exclude a key that is still on the allow list.
        if self.deny is not None and key in self.deny.keys:
            return False
        if self.allow is not None:
            return key in self.allow.keys
        return None

    def check(self, key: PubKey) -> bool | Deferred[bool]:
        """Return whether ``key`` may connect. If the lists do not decide, query the hook.

        An allow list decides about every key, so the hook is not used if there is one.
        """
        said = self.listed(key)
        if said is not None:
            return said
        return True if self.hook is None else self.hook.ask(key)

    def reload(self, *, force: bool = False) -> bool:
        """Read changed lists again; return whether any keys have changed.

        :param force: read all lists again, even unchanged ones.
        """
        lists = [one for one in (self.allow, self.deny) if one is not None]
        changed = [one.reload(force=force) for one in lists]
        return any(changed)

    def watch(self, reactor: IReactorTime, on_change: Callable[[], None]) -> None:
        """Check the files of the lists periodically, and call ``on_change`` when keys have changed."""
        if self.allow is None and self.deny is None:
            return

        def look_and_tell() -> None:
            if self.reload():
                on_change()

        def look() -> None:
            # The next check is scheduled even if this one raises an exception. Otherwise the server would use an
            # outdated list for ever.
            call_isolated(look_and_tell)
            self._call = reactor.callLater(CHECK_INTERVAL, look)

        self._call = reactor.callLater(CHECK_INTERVAL, look)

    def stop(self) -> None:
        """Stop checking the files."""
        cancel_call(self._call)


def _list_in(path: str) -> KeyList | None:
    return KeyList(path) if path else None


def _checked_hook(url: str) -> str | None:
    return check_url(url) if url else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Settings of an operator for the admission of clients."""

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
        """Return the admission policy of these settings."""
        hook = None
        if self.hook is not None:
            hook = Hook(reactor, self.hook, timeout=self.timeout, when_down=self.when_down)
        return Admission(self.allow, self.deny, hook)
