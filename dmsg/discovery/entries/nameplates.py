"""Nameplates: short numbers that stand for keys, so that people can say them to each other. No I/O.

Discovery maps a nameplate to a key for some minutes. A nameplate is not secret, and nobody has to trust the mapping:
the handshake with the words of the code fails if the key is wrong (``docs/protocol/word-codes.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from dmsg.discovery.entries.entry import EntryInvalid, SignedRequest, parse_request
from dmsg.discovery.entries.gojson import NULL_KEY, STRICT, EntryDecodeError, string_of
from dmsg.errors import EntryNotFound

LARGEST_NAMEPLATE = 99_999_999
"""Largest nameplate; the smallest is 1."""
MAX_NAMEPLATES = 100_000
"""Maximum number of nameplates that one discovery stores."""
NAMEPLATE_LIFETIME = 600.0
"""Seconds until a nameplate expires, counted from the last claim by its key."""
MAX_PER_ADDRESS = 32
"""Maximum number of nameplates that clients at one public address may have. For a wider address block, the number is
multiplied by the factor of the block.
"""
FAILED_LOOKUP_COST = 20
"""Number of requests for which a failed look-up counts in the rate limit, so that nobody can find nameplates by trying
numbers.
"""
LOOK_BURST, LOOK_RATE = 20.0, 0.1
"""Rate limit for look-ups from one public address, successful or not: burst, and number per second. It can be low,
because a person needs only one look-up.
"""
PRIVATE_FACTOR = 10
"""Factor by which the rate limit for look-ups is higher for an address that is not public, because many clients may
share such an address.
"""
DIGITS = (4, 6, 8)
"""Lengths of nameplates in digits."""
CANDIDATES_PER_LENGTH = 16
"""Number of random nameplates of each length that a claim tries; the key gets the first free one."""
MAX_DENSITY = 0.05
"""Fraction of the numbers of one length that may be in use. Above this fraction new nameplates are longer, so that most
guesses find nothing.
"""
ATTACK_MISSES, ATTACK_FORGOTTEN = 50.0, 0.5
"""Number of recent failed look-ups above which new nameplates are longer, and number of failed look-ups that are
forgotten per second. At the latest ten minutes after the last failed look-up, new nameplates have their normal length
again.
"""

RELEASE_ACT = "release"
NONE_FREE = 0
"""Result of a claim that got no nameplate, because all numbers that were tried are in use."""
TOO_MANY = -1
"""Result of a claim that got no nameplate, because the address block already has its maximum number of nameplates."""


def length(in_use: int, is_attacked: bool) -> int:
    """Return the index in ``DIGITS`` of the length of new nameplates. They are longer if many are in use, or if
    somebody is guessing numbers.
    """
    found = 0
    # New nameplates become longer when more than a small share of the numbers of a length is in use. So most guesses
    # fail. The rate limit soon stops the guesser, because each failed look-up counts as many requests.
    while found < len(DIGITS) - 1 and in_use > MAX_DENSITY * 10 ** DIGITS[found]:
        found += 1
    return min(len(DIGITS) - 1, found + is_attacked)


def candidates(random: Random, at_least: int = 0) -> list[int]:
    """Return random numbers for a claim to try, the shortest first. All have at least ``DIGITS[at_least]`` digits."""
    return [
        number
        for digits in DIGITS[at_least:]
        for number in random.sample(range(10 ** (digits - 1), 10**digits), CANDIDATES_PER_LENGTH)
    ]


@dataclass(frozen=True, slots=True)
class StoredNameplate:
    """Nameplate in a store.

    :ivar place: address block of the client that last claimed the nameplate.
    :ivar ends: time at which the nameplate expires, in seconds since 1970.
    """

    number: int
    static: str
    place: str
    ends: float


def decide_claim(known: StoredNameplate | None, place: str, held: int, limit: float, free: Iterable[int]) -> int:
    """Return the number for a claim: the number that the key already has, otherwise the first free one.

    :param known: nameplate that the key already has; None if it has none, or an expired one.
    :param place: address block from which the claim comes; it has ``held`` nameplates and may have ``limit``.
    :param free: numbers that no key has.
    :returns: a number, ``TOO_MANY`` or ``NONE_FREE``.
    """
    # If the key has a nameplate that was claimed from the same block, the claim only extends it. So the limit does not
    # apply.
    if (known is None or known.place != place) and held >= limit:
        return TOO_MANY
    # Only the first free number is read, because the store has to look up each one.
    return next(iter(free), NONE_FREE) if known is None else known.number


def check_stored(stored: StoredNameplate | None, now: float, static: str | None = None) -> StoredNameplate:
    """Return ``stored`` if it has not expired and belongs to the key ``static``. With ``static`` None, any key is
    accepted.

    :raises EntryNotFound: the nameplate is missing, expired or of another key.
    """
    if stored is None or stored.ends <= now or static not in (None, stored.static):
        raise EntryNotFound
    return stored


def decode_claim(body: bytes) -> str:
    """Parse a claim. Return the key that wants a nameplate, as 66 lower-case hexadecimal characters.

    It is not checked whether the key is a point of the curve: a program that connects to the key checks that.

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
class Release(SignedRequest):
    """Signed statement that a nameplate is no longer needed."""

    nameplate: int
    static: str
    signature: str = ""

    def signing_json(self) -> bytes:
        return f'{{"act":"{RELEASE_ACT}","nameplate":{self.nameplate},"static":"{self.static}"}}'.encode()


def decode_release(body: bytes) -> Release:
    """Parse a release and verify its signature.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: the release is malformed or not signed by its key.
    """
    members = parse_request(body, "release", RELEASE_ACT, "release a nameplate", ("nameplate",))
    release = Release(
        nameplate=STRICT.integer(members["nameplate"], 0, LARGEST_NAMEPLATE + 1, "nameplate"),
        static=STRICT.key(members["static"], "static"),
        signature=string_of(members["signature"], "signature").lower(),
    )
    if release.static == NULL_KEY:
        raise EntryInvalid("static is the null key, which nobody holds")
    release.verify()
    return release
