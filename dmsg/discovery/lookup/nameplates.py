"""Client for discovery's nameplates: claims, renews, releases and looks up numbers."""

from __future__ import annotations

import json

from dmsg.discovery.entries.nameplates import LARGEST_NAMEPLATE, Release
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError, KeyFormatError, NobodyThere
from dmsg.keys import PubKey, SecKey

PATH = "/discovery/nameplates"
UNKNOWN_STATUSES = (404, 405, 501)
"""HTTP status codes of a discovery that does not support nameplates, or does not have the requested one."""
CLAIMS_PER_LIFETIME = 4
"""Number of claims within the lifetime of a nameplate. It is larger than 1, so that the nameplate survives failed
claims.
"""


class NoSuchNameplate(DiscoveryError, NobodyThere):
    """Error: none of the discoveries has the nameplate."""


class Nameplate:
    """Nameplate that one discovery maps to a key of this program.

    :ivar number: number of the nameplate; the smallest is 1.
    """

    def __init__(self, lookup: Lookup, key: SecKey, number: int, lasts: float) -> None:
        self._lookup = lookup
        self._key = key
        self.number = number
        self._lasts = lasts

    @property
    def renew_every(self) -> float:
        """Seconds between two renewals of the nameplate."""
        return self._lasts / CLAIMS_PER_LIFETIME

    async def renew(self) -> bool:
        """Extend the lifetime of the nameplate. Return False if the nameplate had expired, so that its number no longer
        stands for the key.

        :raises DiscoveryError: the discovery did not answer.
        """
        number, self._lasts = await _claim(self._lookup, self._key.public)
        if number == self.number:
            return True
        # Discovery has assigned a new number. It is useless, because people know the old one, so it is released at
        # once.
        await self._release(number)
        return False

    async def release(self) -> None:
        """Release the nameplate, because it is no longer needed.

        :raises DiscoveryError: the discovery did not answer; then the nameplate stays until it expires.
        """
        await self._release(self.number)

    async def _release(self, number: int) -> None:
        release = Release(number, self._key.public.hex()).sign(self._key)
        try:
            await self._lookup.ask("DELETE", f"{PATH}/{number}", release.to_json())
        except DiscoveryError as error:
            if error.status != 404:  # Status 404 is no error: the nameplate has expired already.
                raise


async def claim(lookups: Lookups, key: SecKey) -> Nameplate:
    """Claim a nameplate for ``key`` at the first discovery that assigns one.

    :raises DiscoveryError: no discovery assigned one.
    """
    failed: DiscoveryError | None = None
    for lookup in lookups.lookups:
        try:
            return Nameplate(lookup, key, *await _claim(lookup, key.public))
        except DiscoveryError as error:
            failed = failed or error
    assert failed is not None
    if failed.status in UNKNOWN_STATUSES:
        raise DiscoveryError(
            f"discovery {lookups.lookups[0].shown_url} has no nameplates, which codes need: it runs an older version"
        )
    raise failed


async def find(lookups: Lookups, number: int) -> PubKey:
    """Return the key of a nameplate, from the first discovery that knows the number.

    This function cannot check whether the key is the right one; the handshake with the words of the code does.

    :raises NoSuchNameplate: no discovery has the number.
    :raises DiscoveryError: a discovery failed to answer, and no other has the number.
    """
    failed: DiscoveryError | None = None
    for lookup in lookups.lookups:
        try:
            answer = await lookup.ask("GET", f"{PATH}/{number}")
            return PubKey.from_hex(str(_member(lookup, answer, "static")))
        except KeyFormatError as error:
            failed = failed or DiscoveryError(f"discovery {lookup.shown_url}: {error}")
        except DiscoveryError as error:
            if error.status not in UNKNOWN_STATUSES:
                failed = failed or error
    raise failed or NoSuchNameplate(
        f"nobody waits with a code that begins with {number}: it was mistyped, is used up, or its sender has ended"
    )


async def _claim(lookup: Lookup, key: PubKey) -> tuple[int, float]:
    answer = await lookup.ask("POST", PATH, json.dumps({"static": key.hex()}).encode())
    number, lasts = _member(lookup, answer, "nameplate"), _member(lookup, answer, "lasts")
    if (
        type(number) is not int
        or not 1 <= number <= LARGEST_NAMEPLATE
        or type(lasts) is not int
        or not 1 <= lasts <= 86400
    ):
        raise DiscoveryError(f"discovery {lookup.shown_url}: its answer is malformed")
    return number, float(lasts)


def _member(lookup: Lookup, answer: object, name: str) -> object:
    if not isinstance(answer, dict) or name not in answer:
        raise DiscoveryError(f"discovery {lookup.shown_url}: its answer is malformed")
    return answer[name]
