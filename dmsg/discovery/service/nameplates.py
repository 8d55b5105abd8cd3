"""Handler of HTTP requests about nameplates: claims, look-ups and releases."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random, SystemRandom

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest

from dmsg.base.buckets import Bucket, RateLimit
from dmsg.discovery.entries.entry import EntryInvalid
from dmsg.discovery.entries.nameplates import (
    ATTACK_FORGOTTEN,
    ATTACK_MISSES,
    DIGITS,
    FAILED_LOOKUP_COST,
    LOOK_BURST,
    LOOK_RATE,
    MAX_NAMEPLATES,
    MAX_PER_ADDRESS,
    NAMEPLATE_LIFETIME,
    NONE_FREE,
    PRIVATE_FACTOR,
    TOO_MANY,
    candidates,
    decode_claim,
    decode_release,
    length,
)
from dmsg.discovery.service.responses import json_response
from dmsg.discovery.store.base import INameplates
from dmsg.discovery.store.measured import MeasuredStore
from dmsg.errors import EntryNotFound
from dmsg.net.addresses import is_public
from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.pending import detached
from dmsg.net.web.site import answer
from dmsg.telemetry.metrics import Metrics

NO_SUCH = "there is no such nameplate"


class NameplatesInUse(Exception):
    """Error: a nameplate cannot be claimed or looked up now.

    :ivar status: HTTP status of the answer: 429 if the client has reached a limit, 503 if no nameplate is free.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Nameplates:
    """Handler of claims, look-ups and releases.

    :param nameplates: store of the nameplates.
    :param wall_clock: clock, in seconds since 1970.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        nameplates: INameplates,
        metrics: Metrics,
        wall_clock: Callable[[], float],
        random: Random | None = None,
    ) -> None:
        seconds = reactor.seconds
        self._nameplates = nameplates
        self._store = MeasuredStore(reactor, nameplates, metrics)
        self._now = wall_clock
        self._seconds = seconds
        self._random = random or SystemRandom()
        self._claimed: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._of = BlockCounts()
        self._lookup_rate = RateLimit(LOOK_RATE, LOOK_BURST, blocks_of)
        self._local_lookup_rate = RateLimit(PRIVATE_FACTOR * LOOK_RATE, PRIVATE_FACTOR * LOOK_BURST)
        self._missed = Bucket(ATTACK_MISSES, seconds())

    def claim(self, request: IRequest, poster: str) -> Deferred[bytes]:
        """Assign a number to a key, or extend the lifetime of the number that it has.

        :param poster: address of the client.
        """
        static = decode_claim(request.content.read())
        now = self._now()
        # An address that is not public has no limit, because it may be a reverse proxy that forwards everybody's
        # requests.
        most = MAX_PER_ADDRESS if is_public(poster) else math.inf
        place = blocks_of(poster)[0].name
        self._forget()
        known = self._claimed.get(static)
        if (known is None or known[0] != place) and not math.isinf(most):
            crowded = self._of.crowded_block(place, most)
            if crowded:
                raise NameplatesInUse(429, f"{crowded} has {self._of[crowded]} nameplates, which is the limit")
        if known is None and len(self._claimed) >= MAX_NAMEPLATES:
            raise NameplatesInUse(503, "all nameplates are in use")
        numbers = candidates(self._random, length(len(self._claimed), self._is_attacked()))

        def claimed(number: int) -> bytes:
            if number == TOO_MANY:
                raise NameplatesInUse(429, f"{place} has {MAX_PER_ADDRESS} nameplates, which is the limit")
            if number == NONE_FREE:
                raise NameplatesInUse(503, "all nameplates are in use")
            self._drop(static)
            self._claimed[static] = place, self._seconds() + NAMEPLATE_LIFETIME
            self._of.add(place)
            return _json(request, {"nameplate": number, "lasts": int(NAMEPLATE_LIFETIME)})

        asked = self._store.ask(self._nameplates.claim, static, numbers, place, most, now, now + NAMEPLATE_LIFETIME)
        return detached(asked.addCallback(claimed))

    def _forget(self) -> None:
        """Forget expired claims. They are at the front of the dictionary, because it is ordered by time of claim and
        all claims last equally long.
        """
        now = self._seconds()
        while self._claimed:
            static, (_, ends) = next(iter(self._claimed.items()))
            if ends > now:
                return
            self._drop(static)

    def _drop(self, static: str) -> None:
        place, _ = self._claimed.pop(static, ("", 0.0))
        if place:
            self._of.remove(place)

    def _is_attacked(self) -> bool:
        """Whether more look-ups failed recently than typing errors explain, so that somebody must be guessing."""
        self._missed.fill(ATTACK_FORGOTTEN, ATTACK_MISSES, self._seconds())
        return self._missed.level < 1.0

    def find(
        self, request: IRequest, poster: str, text: str, charge: Callable[[IRequest, float], None]
    ) -> Deferred[bytes]:
        """Return the key to which a nameplate is mapped.

        :param poster: address of the client.
        :param charge: function that counts a number of additional requests against the client; called if the look-up
            fails.
        """
        number = _number(text)
        limit = self._lookup_rate if is_public(poster) else self._local_lookup_rate
        if not limit.allow(blocks_of(poster)[0].name, self._seconds()):
            raise NameplatesInUse(429, "too many nameplates were looked up from this address")

        def found(static: str) -> bytes:
            return _json(request, {"nameplate": number, "static": static})

        def missed(failure: Failure) -> bytes:
            failure.trap(EntryNotFound)
            charge(request, FAILED_LOOKUP_COST)
            self._missed.fill(ATTACK_FORGOTTEN, ATTACK_MISSES, self._seconds())
            self._missed.level = max(-NAMEPLATE_LIFETIME * ATTACK_FORGOTTEN, self._missed.level - 1.0)
            return answer(request, 404, NO_SUCH)

        return self._store.ask(self._nameplates.find, number, self._now()).addCallbacks(found, missed)

    def release(self, request: IRequest, text: str) -> Deferred[bytes]:
        """Release a nameplate. The body of the request is a release signed by the nameplate's key."""
        release = decode_release(request.content.read())
        if release.nameplate != _number(text):
            raise EntryInvalid("the nameplate differs from the one in the URL")

        def absent(failure: Failure) -> bytes:
            failure.trap(EntryNotFound)
            return answer(request, 404, NO_SUCH)

        asked = self._store.ask(self._nameplates.release, release.nameplate, release.static, self._now())

        def released(_: None) -> bytes:
            self._drop(release.static)
            return answer(request, 200, "released the nameplate")

        return detached(asked.addCallbacks(released, absent))


def _number(text: str) -> int:
    # A malformed number is refused as an error of the request. It does not count as a failed look-up, because nobody
    # can find a nameplate by such a request.
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS[-1]):
        raise EntryInvalid(f"a nameplate is a number of one to {DIGITS[-1]} digits")
    return int(text)


def _json(request: IRequest, value: Mapping[str, object]) -> bytes:
    request.setHeader(b"cache-control", b"no-store")
    return json_response(request, json.dumps(value).encode())
