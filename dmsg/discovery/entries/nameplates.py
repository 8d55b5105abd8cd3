"""Nameplates: short numbers for keys that people tell each other by voice. No I/O.

A nameplate is a number that leads to a key for some minutes. It is not secret, and nobody has to trust it.
The words of the code reveal a wrong key (``docs/protocol/word-codes.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from dmsg.discovery.entries.entry import EntryInvalid, EntrySignatureError
from dmsg.discovery.entries.gojson import NULL_KEY, STRICT, EntryDecodeError, string_of
from dmsg.errors import EntryNotFound, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

LARGEST = 99_999_999
"""Largest nameplate; the smallest is 1."""
MAX_NAMEPLATES = 100_000
"""Maximum number of nameplates that one discovery stores."""
LASTS = 600.0
"""Seconds for which a nameplate is kept; when its key claims it again, they start anew."""
OF_PLACE = 32
"""Maximum number of nameplates claimed from one public address; wider address blocks may have this number times their
factor."""
MISSED = 20
"""Cost, in requests, of a look-up that finds nothing, so that nobody can find all nameplates by trying numbers."""
LOOK_BURST, LOOK_RATE = 20.0, 0.1
"""Rate limit of look-ups of one public address, successful or not: burst, and number per second. A person needs only
one look-up.
"""
BESIDE = 10
"""Factor of this rate limit for addresses that are not public, because many clients may share one."""
DIGITS = (4, 6, 8)
"""Lengths of nameplates in digits."""
TRIED = 16
"""Number of random numbers of each length that are tried; the key gets the first free one."""
DENSE = 0.05
"""Share of the numbers of one length in use above which new numbers are longer, so that guessing finds few."""
ATTACK_MISSES, ATTACK_FORGOTTEN = 50.0, 0.5
"""Number of failed look-ups from which on new numbers are longer, and how many of them are forgotten per second. The
effect lasts ten minutes at most.
"""

RELEASE_ACT = "release"
NONE_FREE = 0
"""Result in place of a number: all numbers that were tried are in use."""
TOO_MANY = -1
"""Result in place of a number: the address block has its maximum number of nameplates."""


def length(in_use: int, is_attacked: bool) -> int:
    """Return the index in ``DIGITS`` of new numbers: longer ones when there are many, or somebody is guessing
    numbers."""
    found = 0
    # New numbers must stay sparse in their range, as a defence against guessing: most guesses then find no nameplate,
    # and failed look-ups are expensive.
    while found < len(DIGITS) - 1 and in_use > DENSE * 10 ** DIGITS[found]:
        found += 1
    return min(len(DIGITS) - 1, found + is_attacked)


def candidates(random: Random, at_least: int = 0) -> list[int]:
    """Return random numbers to try; those with ``DIGITS[at_least]`` digits come first."""
    return [
        number for digits in DIGITS[at_least:] for number in random.sample(range(10 ** (digits - 1), 10**digits), TRIED)
    ]


@dataclass(frozen=True, slots=True)
class StoredNameplate:
    """Nameplate in a store.

    :ivar place: address block of the last claim.
    :ivar ends: time at which the nameplate expires, in seconds since 1970.
    """

    number: int
    static: str
    place: str
    ends: float


def decide_claim(known: StoredNameplate | None, place: str, held: int, limit: float, free: Iterable[int]) -> int:
    """Return the number that a key gets: the one that it has, otherwise the first free one; or ``TOO_MANY`` or
    ``NONE_FREE``.

    :param known: the key's nameplate, unless it has ended.
    :param place: address block from which the claim comes; it has ``held`` nameplates and may have ``limit``.
    :param free: candidates that no key has, read only as far as needed.
    """
    # A new claim of a key from the same block only extends its nameplate, so the limit does not apply.
    if (known is None or known.place != place) and held >= limit:
        return TOO_MANY
    # The candidates are read lazily, because a store has to look up each of them.
    return next(iter(free), NONE_FREE) if known is None else known.number


def check_stored(stored: StoredNameplate | None, now: float, static: str | None = None) -> StoredNameplate:
    """Return ``stored`` if it has not expired, and leads to ``static`` if that is given.

    :raises EntryNotFound: the nameplate is missing, expired or of another key.
    """
    if stored is None or stored.ends <= now or static not in (None, stored.static):
        raise EntryNotFound
    return stored


def decode_claim(body: bytes) -> str:
    """Parse a claim: return the key that a nameplate is wanted for, 66 lower-case hexadecimal characters.

    Whether the key is a point of the curve is not checked here; programs that connect to the key check it.

    :raises EntryDecodeError, EntryInvalid: the claim has no key.
    """
    members = STRICT.members(STRICT.parse(body), frozenset({"static"}), "claim")
    if members.get("static") is None:
        raise EntryDecodeError("claim of a nameplate has no key (static)")
    static = STRICT.key(members["static"], "static")
    if static == NULL_KEY:
        raise EntryInvalid("static is the null key, which nobody holds")
    return static


@dataclass(frozen=True, slots=True)
class Release:
    """Signed statement that a nameplate is no longer needed. Its field ``act`` names the operation, so that no other
    signed text can be taken for a release."""

    nameplate: int
    static: str
    signature: str = ""

    def signing_json(self) -> bytes:
        """Return the JSON of the release that its signature covers."""
        return f'{{"act":"{RELEASE_ACT}","nameplate":{self.nameplate},"static":"{self.static}"}}'.encode()

    def to_json(self) -> bytes:
        """Return the body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Release:
        """Return a copy of the release with the signature of ``key``."""
        return replace(self, signature=key.sign(self.signing_json()).hex())


def decode_release(body: bytes) -> Release:
    """Parse a release and verify its signature.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: the release is malformed or not signed by its key.
    """
    names = ("act", "nameplate", "static", "signature")
    members = STRICT.members(STRICT.parse(body), frozenset(names), "release")
    for name in names:
        if members.get(name) is None:
            raise EntryDecodeError(f"release has no {name}")
    if members["act"] != RELEASE_ACT:
        raise EntryDecodeError(f'act is not "{RELEASE_ACT}"')
    release = Release(
        nameplate=STRICT.integer(members["nameplate"], 0, LARGEST + 1, "nameplate"),
        static=STRICT.key(members["static"], "static"),
        signature=string_of(members["signature"], "signature").lower(),
    )
    if release.static == NULL_KEY:
        raise EntryInvalid("static is the null key, which nobody holds")
    try:
        PubKey.from_hex(release.static).verify(release.signing_json(), Signature.from_hex(release.signature))
    except (KeyFormatError, SignatureError) as error:
        raise EntrySignatureError from error
    return release
