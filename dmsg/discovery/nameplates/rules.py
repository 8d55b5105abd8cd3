"""What is said of nameplates, and by whom.  No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from dmsg.discovery.entry import EntryInvalid, EntrySignatureError
from dmsg.discovery.gojson import NULL_KEY, STRICT, EntryDecodeError, string_of
from dmsg.errors import KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature

LARGEST = 9999
"""Nameplates are numbers from 1 on; so many are there at a time at most."""
LASTS = 600.0
"""Seconds for which a nameplate is kept; who claims it again keeps it for as long again."""
OF_PLACE = 32
"""Nameplates that one public address, or /48 of IPv6, may have at a time."""
MISSED = 20
"""Requests that a look counts for where no nameplate is: who tries one number after the other would find them all."""
TRIES = ((1, 9, 9), (10, 99, 24), (100, 999, 32), (1000, LARGEST, 64))
"""First and last number of each length, and how many of them are tried: a short one if there is one."""

RELEASE_ACT = "release"
NONE_FREE = 0
"""Instead of a number: all that were tried are in use."""
TOO_MANY = -1
"""Instead of a number: the place has as many as it may."""


def candidates(random: Random) -> list[int]:
    """Numbers to try, those of one digit first."""
    return [number for first, last, some in TRIES for number in random.sample(range(first, last + 1), some)]


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
