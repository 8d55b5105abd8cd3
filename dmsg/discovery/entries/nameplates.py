"""Nameplates: short numbers for keys that somebody is to be told by voice.  No I/O.

A nameplate is a number that leads to a key for some minutes.  Nothing in it is secret, and nobody need believe it: who
takes a number for the wrong key finds out by the words of the code (``docs/protocol/word-codes.md``).
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
"""Nameplates are numbers from 1 on."""
MAX_NAMEPLATES = 100_000
"""Nameplates that one discovery gives at a time."""
LASTS = 600.0
"""Seconds for which a nameplate is kept; who claims it again keeps it for as long again."""
OF_PLACE = 32
"""Nameplates that one public address may have at a time; blocks around it as many times as many as their factor."""
MISSED = 20
"""Requests that a look counts for where no nameplate is: who tries one number after the other would find them all."""
LOOK_BURST, LOOK_RATE = 20.0, 0.1
"""Looks of one public address at once, and in a second, whether they find something or not: a person looks once."""
BESIDE = 10
"""How many times as often an address may look that is not public: all may come from there."""
DIGITS = (4, 6, 8)
"""Digits of numbers."""
TRIED = 16
"""Numbers of each length that are tried, by chance: the first of them that is free is given."""
DENSE = 0.05
"""Part of the numbers of one length that are in use, from which new ones are longer: who looks at numbers finds few."""
ATTACK_MISSES, ATTACK_FORGOTTEN = 50.0, 0.5
"""Looks in vain from which new numbers are longer, for ten minutes at most; so many a second are forgotten."""

RELEASE_ACT = "release"
NONE_FREE = 0
"""Instead of a number: all that were tried are in use."""
TOO_MANY = -1
"""Instead of a number: the place has as many as it may."""


def length(in_use: int, is_attacked: bool) -> int:
    """Return the index in ``DIGITS`` of new numbers: longer ones when there are many, or somebody tries numbers."""
    found = 0
    while found < len(DIGITS) - 1 and in_use > DENSE * 10 ** DIGITS[found]:
        found += 1
    return min(len(DIGITS) - 1, found + is_attacked)


def candidates(random: Random, at_least: int = 0) -> list[int]:
    """Numbers to try, all by chance; those of the length ``DIGITS[at_least]`` first."""
    return [
        number for digits in DIGITS[at_least:] for number in random.sample(range(10 ** (digits - 1), 10**digits), TRIED)
    ]


@dataclass(frozen=True, slots=True)
class Kept:
    """Nameplate in a store.

    :ivar place: address block of the last claim.
    :ivar ends: time from which it leads nowhere, in seconds since 1970.
    """

    number: int
    static: str
    place: str
    ends: float


def decide_claim(known: Kept | None, place: str, held: int, most: float, free: Iterable[int]) -> int:
    """Return the number that a key gets: the one it has, or else the first free one; or ``TOO_MANY``, ``NONE_FREE``.

    :param known: the key's nameplate, unless it has ended.
    :param place: address block of the claim, which has ``held`` nameplates and may have ``most``.
    :param free: candidates that no key has, read only as far as needed.
    """
    if (known is None or known.place != place) and held >= most:
        return TOO_MANY
    return next(iter(free), NONE_FREE) if known is None else known.number


def check_kept(kept: Kept | None, now: float, static: str | None = None) -> Kept:
    """Return ``kept`` if it leads to a key now, and to ``static`` if that is given.

    :raises EntryNotFound: it does not.
    """
    if kept is None or kept.ends <= now or static not in (None, kept.static):
        raise EntryNotFound
    return kept


def decode_claim(body: bytes) -> str:
    """The key that a nameplate is wanted for, 66 lower-case hexadecimal characters.

    Whether it is a point of the curve is looked at by who wants to reach it.

    :raises EntryDecodeError, EntryInvalid: there is none.
    """
    members = STRICT.members(STRICT.parse(body), frozenset({"static"}), "claim")
    if members.get("static") is None:
        raise EntryDecodeError("claim has no static")
    static = STRICT.key(members["static"], "static")
    if static == NULL_KEY:
        raise EntryInvalid("static is nil")
    return static


@dataclass(frozen=True, slots=True)
class Release:
    """A signed statement that a nameplate is needed no more; it names the act, so that nothing else can pass for it."""

    nameplate: int
    static: str
    signature: str = ""

    def signing_json(self) -> bytes:
        """What is signed."""
        return f'{{"act":"{RELEASE_ACT}","nameplate":{self.nameplate},"static":"{self.static}"}}'.encode()

    def to_json(self) -> bytes:
        """The body of the DELETE request."""
        return self.signing_json()[:-1] + f',"signature":"{self.signature}"}}'.encode()

    def sign(self, key: SecKey) -> Release:
        """This statement with the signature of ``key``."""
        return replace(self, signature=key.sign(self.signing_json()).hex())


def decode_release(body: bytes) -> Release:
    """A release whose signature holds.

    :raises EntryDecodeError, EntryInvalid, EntrySignatureError: it does not.
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
        raise EntryInvalid("static is nil")
    try:
        PubKey.from_hex(release.static).verify(release.signing_json(), Signature.from_hex(release.signature))
    except (KeyFormatError, SignatureError) as error:
        raise EntrySignatureError from error
    return release
