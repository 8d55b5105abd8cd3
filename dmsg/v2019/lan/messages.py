"""Messages on the local network: the question of a code's receiver, and the answer of the code's sender. No I/O, no
clock.

The question asks for the TXT record of a name::

    HASH . KEY . _dmsg-code . _tcp . local

``KEY`` is the receiver's ephemeral key (33 bytes). ``HASH`` is the BLAKE2b hash (16 bytes) of the nameplate, keyed with
``KEY``. Both are in base32, in lower case and without padding. The text of the answer is ``version(1) = 1 || port(2) ||
key(33)``, big endian: the port at which the sender listens, and its ephemeral key.

A sender sends nothing until it is asked for its nameplate. The hash does not hide the nameplate from an attacker who
tries all nameplates, because a nameplate has only a few digits.
"""

from __future__ import annotations

from base64 import b32decode, b32encode
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey
from dmsg.net.mdns.packets import Name

SERVICE: Name = (b"_dmsg-code", b"_tcp", b"local")
PROTOCOL = b"dmsg lan 1"
VERSION = 1
HASH_SIZE = 16
MIN_PORT = 1024
"""Smallest port that an answer may name, because smaller ports are reserved for services of the system."""
_TEXT_SIZE = 1 + 2 + PUBKEY_SIZE


class LanDrop(Enum):
    """Reason for which a packet on the network was ignored."""

    RATE_LIMITED = "rate_limited"
    MALFORMED = "malformed"
    OTHER_NAME = "other_name"
    OTHER_CODE = "other_code"
    OFF_LINK = "off_link"
    OTHER_PORT = "other_port"
    TOO_MANY = "too_many"
    REPEATED = "repeated"


class BadMessage(DmsgError):
    """Error: a question for a code, or an answer to it, is malformed."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Content of the answer with which the code's sender announces itself to a receiver.

    :ivar key: ephemeral key of the code's sender.
    :ivar port: TCP port at which the sender listens, at the address from which the answer came.
    """

    key: PubKey
    port: int

    def encode(self) -> bytes:
        """Return the text of the TXT record."""
        return bytes((VERSION,)) + self.port.to_bytes(2, "big") + self.key

    @classmethod
    def parse(cls, text: bytes) -> Announcement:
        """Parse the text of the TXT record.

        :raises BadMessage: the text is malformed, has another version, or names a port below ``MIN_PORT``.
        """
        if len(text) != _TEXT_SIZE or text[0] != VERSION:
            raise BadMessage("the answer is malformed or of another version")
        port = int.from_bytes(text[1:3], "big")
        if port < MIN_PORT:
            raise BadMessage(f"the answer names port {port}")
        try:
            return cls(PubKey(text[3:]), port)
        except KeyFormatError:
            raise BadMessage("the answer has no valid key") from None


def name_for(receiver: PubKey, nameplate: int) -> Name:
    """Return the name whose TXT record a receiver asks for.

    :param receiver: ephemeral key of the receiver.
    """
    return _base32(_hash(receiver, nameplate)), _base32(receiver), *SERVICE


def is_for_codes(name: Name) -> bool:
    """Whether a name belongs to a question for a code, with any number."""
    return len(name) == 2 + len(SERVICE) and name[2:] == SERVICE


def receiver_of(name: Name, nameplate: int) -> PubKey | None:
    """Return the receiver's key, which is a part of the name that the receiver asks for. Return None if the name is not
    for the code with the number ``nameplate``.

    :raises BadMessage: the name is malformed.
    """
    try:
        found, key = (b32decode(_padded(label)) for label in name[:2])
    except ValueError:
        raise BadMessage("the name is not base32") from None
    if len(found) != HASH_SIZE or len(key) != PUBKEY_SIZE:
        raise BadMessage("hash or key has a wrong length")
    # The hash is compared before the key is parsed, because most questions are for other codes.
    if found != _hash(key, nameplate):
        return None
    try:
        return PubKey(key)
    except KeyFormatError:
        raise BadMessage("the name has no valid key") from None


def shared_secret(own: SecKey, *, sender: PubKey, receiver: PubKey) -> bytes:
    """Return 32 bytes that only sender and receiver can compute, as the secret for the tags of their link.

    :param own: ephemeral key of this end.
    """
    other = receiver if own.public == sender else sender
    return blake2b(PROTOCOL + receiver + sender, digest_size=32, key=own.ecdh(other)).digest()


def _hash(receiver: bytes, nameplate: int) -> bytes:
    return blake2b(PROTOCOL + b" %d" % nameplate, digest_size=HASH_SIZE, key=receiver).digest()


def _base32(data: bytes) -> bytes:
    return b32encode(data).rstrip(b"=").lower()


def _padded(label: bytes) -> bytes:
    return label.upper() + b"=" * (-len(label) % 8)
