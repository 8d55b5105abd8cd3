"""Operator's ranking of servers, which decides which of the listed servers discovery returns first.

``dmsg analytics rank`` computes the ranking from the pipeline's results and signs it. Discovery reads the file again
when it changes. A ranking only changes the order of servers: it can neither add a server that is not listed nor exclude
one that is. A ranking that is expired, malformed or signed by another key is logged and ignored. Servers are then drawn
as if there were no ranking.

The file is JSON: ``generated_at`` and ``valid_until`` (seconds since 1970), ``servers`` (``static``, ``weight``,
``reasons``), ``operator`` (a public key) and ``signature``. The signature covers the SHA-256 hash of the same object
without the signature, encoded with sorted keys and without spaces.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey, Signature
from dmsg.net.isolate import call_isolated

CHECK_INTERVAL = 5.0
"""Seconds between two checks for changes of the ranking file."""
FILE_LIMIT = 4 * 1024 * 1024
"""Maximum size of the ranking file in bytes."""
MAX_RANKED = 10_000
"""Maximum number of servers in a ranking."""
KNOWN_LIMIT = 1024
"""Maximum number of entries for which the key in their JSON is cached."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Minimum and maximum weight of a server in a ranking file. A server without a weight has the minimum."""

_log = Logger()
_Drawn = TypeVar("_Drawn")


class RankingError(DmsgError):
    """Error: the ranking file is malformed, or not signed by the operator."""


@dataclass(frozen=True)
class Ranking:
    """Weights of servers, valid for a time.

    :ivar weights: weight of each server, from 0.001 to 1000, by its key in hexadecimal.
    :ivar generated_at: seconds since 1970.
    :ivar valid_until: seconds since 1970.
    """

    weights: dict[str, float]
    generated_at: float
    valid_until: float


def _signed_bytes(document: Mapping[str, object]) -> bytes:
    rest = {name: value for name, value in document.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def sign_ranking(servers: Sequence[Mapping[str, object]], key: SecKey, generated_at: int, valid_until: int) -> bytes:
    """Return the content of a ranking file.

    :param servers: ``static``, ``weight`` and ``reasons`` of each server.
    """
    document: dict[str, object] = {
        "generated_at": generated_at,
        "valid_until": valid_until,
        "servers": list(servers),
        "operator": key.public.hex(),
    }
    document["signature"] = key.sign(_signed_bytes(document)).hex()
    return json.dumps(document, indent=1).encode() + b"\n"


def read_ranking(data: bytes, operator: PubKey) -> Ranking:
    """Parse a ranking file and verify its signature.

    :raises RankingError: the file is malformed, or not signed by ``operator``.
    """
    try:
        document = json.loads(data)
        signature = Signature.from_hex(document["signature"])
        generated_at, valid_until = float(document["generated_at"]), float(document["valid_until"])
        servers = document["servers"]
        if len(servers) > MAX_RANKED:
            raise RankingError(f"the file has more than {MAX_RANKED} servers")
        weights = {PubKey.from_hex(one["static"]).hex(): float(one["weight"]) for one in servers}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RankingError(f"the file is malformed: {error}") from None
    try:
        operator.verify(_signed_bytes(document), signature)
    except DmsgError:
        raise RankingError("the file is not signed by the operator's key") from None
    if not all(MIN_WEIGHT <= weight <= MAX_WEIGHT for weight in weights.values()):
        raise RankingError(f"the weight of a server is not between {MIN_WEIGHT} and {MAX_WEIGHT:.0f}")
    return Ranking(weights, generated_at, valid_until)


class RankingFile:
    """Ranking from a file, which is read again when it changes.

    :param operator: public key of the operator. A ranking that another key has signed is ignored.
    """

    def __init__(self, path: Path, operator: PubKey, random: Random | None = None) -> None:
        self._path = path
        self._operator = operator
        self._random = random or SystemRandom()
        self._ranking: Ranking | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._last_problem = ""
        self._keys: dict[bytes, str] = {}
        self._reactor: IReactorTime | None = None
        self._call: IDelayedCall | None = None

    def watch(self, reactor: IReactorTime) -> None:
        """Read the file now, and check every few seconds whether it has changed."""
        self._reactor = reactor
        self._check_again()

    def stop(self) -> None:
        """Stop watching the file."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _check_again(self) -> None:
        assert self._reactor is not None
        call_isolated(self.reload)
        self._call = self._reactor.callLater(CHECK_INTERVAL, self._check_again)

    def reload(self) -> None:
        """Read the file if it has changed."""
        try:
            with open(self._path, "rb") as file:
                stat = os.fstat(file.fileno())
                stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if stamp == self._stamp:
                    return
                self._stamp = stamp
                if stat.st_size > FILE_LIMIT:
                    raise RankingError(f"the file is longer than {FILE_LIMIT} bytes")
                ranking = read_ranking(file.read(FILE_LIMIT + 1), self._operator)
        except (OSError, RankingError) as error:
            if isinstance(error, OSError):
                self._stamp = None
            self._ranking = None
            self._say(f"the ranking is not used: {error}")
            return
        self._ranking = ranking
        self._say("")
        _log.info("the ranking was loaded: {count} servers", count=len(ranking.weights))

    def _say(self, problem: str) -> None:
        if problem and problem != self._last_problem:
            _log.warn("{what}", what=problem)
        self._last_problem = problem

    def current(self, now: float) -> Ranking | None:
        """Return the ranking if it is valid at the time ``now``, else None.

        :param now: seconds since 1970.
        """
        ranking = self._ranking
        if ranking is not None and not ranking.generated_at - 300 <= now < ranking.valid_until:
            self._say("the ranking is not used: it is not valid now")
            return None
        return ranking

    def _key_of(self, body: bytes) -> str:
        key = self._keys.get(body)
        if key is None:
            if len(self._keys) >= KNOWN_LIMIT:
                self._keys.clear()
            key = self._keys[body] = str(json.loads(body).get("static", ""))
        return key

    def choose(self, servers: Sequence[bytes], limit: int, now: float) -> list[bytes]:
        """Draw at most ``limit`` of the servers at random without replacement, with probabilities by weight.

        The method is that of Efraimidis and Spirakis, which sorts by ``u ** (1 / weight)`` with a random ``u`` per
        server. A server of twice the weight comes first twice as often. Unranked servers have the lowest weight,
        because anybody can create many of them.
        """
        ranking = self.current(now)
        weights = {} if ranking is None else ranking.weights
        return self._draw([(weights.get(self._key_of(body), MIN_WEIGHT), body) for body in servers], limit)

    def draw(self, limit: int, now: float) -> list[str]:
        """Draw the keys of at most ``limit`` servers of the ranking at random, with probabilities by weight."""
        ranking = self.current(now)
        if ranking is None:
            return []
        if len(ranking.weights) <= limit:
            return list(ranking.weights)
        return self._draw([(weight, static) for static, weight in ranking.weights.items()], limit)

    def _draw(self, weighted: Sequence[tuple[float, _Drawn]], limit: int) -> list[_Drawn]:
        lucky = sorted(weighted, key=lambda one: math.log(1.0 - self._random.random()) / one[0], reverse=True)
        return [one for _, one in lucky[:limit]]
