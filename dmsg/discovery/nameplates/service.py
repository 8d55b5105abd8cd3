"""What discovery answers about nameplates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest

from dmsg.discovery.entry import EntryInvalid
from dmsg.discovery.nameplates.rules import (
    LASTS,
    MISSED,
    NONE_FREE,
    OF_PLACE,
    TOO_MANY,
    candidates,
    decode_claim,
    decode_release,
)
from dmsg.discovery.store.measured import MeasuredStore
from dmsg.errors import EntryNotFound
from dmsg.net.addresses import IPV6_SITE, block_of, is_public
from dmsg.net.web.site import answer

NO_SUCH = "there is no such nameplate"


class NameplatesInUse(Exception):
    """A nameplate cannot be had now; ``status`` says whose fault that is."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Nameplates:
    """Claims, looks and releases.

    :param store: asks what provides :class:`~dmsg.discovery.nameplates.interface.INameplates`.
    :param wall_clock: seconds since 1970.
    """

    def __init__(self, store: MeasuredStore, wall_clock: Callable[[], float], random: Random | None = None) -> None:
        self._store = store
        self._now = wall_clock
        self._random = random or Random()

    def claim(self, request: IRequest, poster: str) -> Deferred[bytes]:
        """A number for a key, or the one that it has for longer.  :param poster: the address of who asks."""
        static = decode_claim(request.content.read())
        now = self._now()
        # who is beside discovery may be a proxy, or everybody
        most = OF_PLACE if is_public(poster) else math.inf
        # there are few numbers: whoever has a network of his own, and all its blocks, counts as one
        place = block_of(poster, IPV6_SITE)
        numbers = candidates(self._random)

        def claimed(number: int) -> bytes:
            if number == TOO_MANY:
                raise NameplatesInUse(429, f"{place} has {OF_PLACE} nameplates")
            if number == NONE_FREE:
                raise NameplatesInUse(503, "all nameplates are in use")
            return _json(request, {"nameplate": number, "lasts": int(LASTS)})

        asked = self._store.ask("claim", static, numbers, place, most, now, now + LASTS)
        return asked.addCallback(claimed)

    def look(self, request: IRequest, text: str, charge: Callable[[IRequest, float], None]) -> Deferred[bytes]:
        """The key behind a number.  :param charge: told how many requests a look counts for that finds nothing."""
        number = _number(text)

        def found(static: str) -> bytes:
            return _json(request, {"nameplate": number, "static": static})

        def missed(failure: Failure) -> bytes:
            failure.trap(EntryNotFound)
            charge(request, MISSED)
            return answer(request, 404, NO_SUCH)

        return self._store.ask("look", number, self._now()).addCallbacks(found, missed)

    def release(self, request: IRequest, text: str) -> Deferred[bytes]:
        """A number is needed no more, as its key says."""
        release = decode_release(request.content.read())
        if release.nameplate != _number(text):
            raise EntryInvalid("nameplate is not that of the path")

        def absent(failure: Failure) -> bytes:
            failure.trap(EntryNotFound)
            return answer(request, 404, NO_SUCH)

        asked = self._store.ask("release", release.nameplate, release.static, self._now())
        return asked.addCallbacks(lambda _: answer(request, 200, "released the nameplate"), absent)


def _number(text: str) -> int:
    # one that is too long is none, and is not counted
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise EntryInvalid("a nameplate is a number of one to four digits")
    return int(text)


def _json(request: IRequest, value: dict[str, Any]) -> bytes:
    request.setResponseCode(200)
    request.setHeader(b"content-type", b"application/json")
    request.setHeader(b"cache-control", b"no-store")
    return json.dumps(value).encode()
