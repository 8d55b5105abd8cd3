"""Signing key of a twin, derived from words or a seed; signatures of 65 bytes; accounts as text.

A secret is a Substrate URI: 12 to 24 English words, or ``0x`` and 64 hexadecimal digits, then ``//hard`` and ``/soft``
junctions, then ``///password``.  If there are no words, Substrate's well-known development words are used.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Protocol

import base58
import sr25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from mnemonic import Mnemonic
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

from dmsg.rmb.errors import IdentityError, SignatureInvalid

ACCOUNT_SIZE = 32
SIGNATURE_SIZE = 65
"""Size of a signature in bytes: one byte for the kind of key, and 64 bytes of signature."""
KEY_TYPES = ("sr25519", "ed25519")
ED25519, SR25519 = 0x65, 0x73
MAX_ACCOUNT_TEXT = 66
"""Maximum length of an account as text, in characters: ``0x`` and 64 hexadecimal digits."""
SS58_PREFIX = 42
DEV_WORDS = "bottom drive obey lake curtain smoke basket hold race lonely fit walk"

_URI = re.compile(r"(?P<phrase>[^/]*)(?P<path>(?://?[^/]+)*)(?:///(?P<password>.*))?", re.DOTALL)
_JUNCTION = re.compile(r"(//?)([^/]+)")
_WORDS = Mnemonic("english")


class Signer(Protocol):
    """Interface of an object that signs for a twin."""

    account: bytes
    """Public key, 32 bytes."""

    def sign(self, message: bytes) -> bytes:
        """Sign ``message`` itself, not a hash of it.

        :returns: 65 bytes: one byte for the kind of key, then the signature.
        """


def entropy_of(words: str) -> bytes:
    """Return the 16 to 32 bytes that BIP-39 words encode.

    :raises IdentityError: these are not English words of BIP-39, or their checksum is wrong.
    """
    try:
        return bytes(_WORDS.to_entropy(unicodedata.normalize("NFKD", words).split()))
    except (ValueError, LookupError):
        raise IdentityError("invalid words: 12 to 24 English words of BIP-39 are needed") from None


def mini_secret(words: str, password: str = "") -> bytes:
    """Derive a 32-byte secret from words as substrate-bip39 does: PBKDF2 over their entropy, not over the words
    themselves."""
    salt = b"mnemonic" + unicodedata.normalize("NFKD", password).encode()
    return hashlib.pbkdf2_hmac("sha512", entropy_of(words), salt, 2048)[:32]


def hex_seed(text: str) -> bytes:
    """Decode ``0x`` and 64 hexadecimal digits to 32 bytes.

    :raises IdentityError: the text is anything else.
    """
    try:
        seed = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        seed = b""
    if len(seed) != 32 or len(text) != 66:
        raise IdentityError("invalid seed: 0x and 64 hexadecimal digits are needed")
    return seed


def _chain_code(junction: str) -> bytes:
    """Return the chain code of a junction, 32 bytes.

    A junction is one step of Substrate's key derivation: the name after ``/`` or ``//`` in the text of the secret.
    A number is encoded as 8 bytes little endian. A text is encoded in SCALE, Substrate's binary format. An encoding of
    more than 32 bytes is hashed, and a shorter one is padded with zeros.
    """
    if junction.isascii() and junction.isdigit() and int(junction) < 2**64:
        data = int(junction).to_bytes(8, "little")
    else:
        text = junction.encode()
        data = _compact(len(text)) + text
    if len(data) > 32:
        return hashlib.blake2b(data, digest_size=32).digest()
    return data.ljust(32, b"\0")


def _compact(number: int) -> bytes:
    """Encode a length in SCALE's compact form."""
    if number < 2**6:
        return (number << 2).to_bytes(1, "little")
    if number < 2**14:
        return (number << 2 | 1).to_bytes(2, "little")
    return (number << 2 | 2).to_bytes(4, "little")


class Identity:
    """Signing key of a twin.

    :param key_type: ``sr25519``, the default of the reference implementation, or ``ed25519``.
    :raises IdentityError: the secret is malformed.
    :ivar account: public key, 32 bytes.
    """

    def __init__(self, secret: str, key_type: str = "sr25519") -> None:
        if key_type not in KEY_TYPES:
            raise IdentityError(f"key type {key_type!r} is neither sr25519 nor ed25519")
        match = _URI.fullmatch(secret.strip())
        if match is None:
            raise IdentityError("invalid secret: expected words, or 0x and a seed, optionally followed by //junctions")
        phrase, password = match["phrase"].strip(), match["password"] or ""
        seed = hex_seed(phrase) if phrase.startswith("0x") else mini_secret(phrase or DEV_WORDS, password)
        junctions = [(mark == "//", name) for mark, name in _JUNCTION.findall(match["path"])]
        self.key_type = key_type
        if key_type == "ed25519":
            for hard, name in junctions:
                if not hard:
                    raise IdentityError("ed25519 has no /soft junctions")
                data = _compact(len(b"Ed25519HDKD")) + b"Ed25519HDKD" + seed + _chain_code(name)
                seed = hashlib.blake2b(data, digest_size=32).digest()
            self._ed = Ed25519PrivateKey.from_private_bytes(seed)
            self.account = self._ed.public_key().public_bytes_raw()
            return
        public, private = sr25519.pair_from_seed(seed)
        for hard, name in junctions:
            derive = sr25519.hard_derive_keypair if hard else sr25519.derive_keypair
            _, public, private = derive((_chain_code(name), public, private), b"")
        self._sr = (bytes(public), bytes(private))
        self.account = bytes(public)

    @property
    def address(self) -> str:
        """Account as text, in SS58 with prefix 42."""
        return ss58(self.account)

    def sign(self, message: bytes) -> bytes:
        """Sign ``message`` itself, not a hash of it.

        :returns: 65 bytes: one byte for the kind of key, then the signature.
        """
        if self.key_type == "ed25519":
            return bytes([ED25519]) + self._ed.sign(message)
        return bytes([SR25519]) + bytes(sr25519.sign(self._sr, message))

    def __repr__(self) -> str:
        return f"<Identity {self.key_type} {self.address}>"


def verify(signature: bytes | None, message: bytes, account: bytes) -> None:
    """Verify a signature. Its first byte gives the kind of key.

    :raises SignatureInvalid: the signature is missing, malformed, or not made by ``account`` over ``message``.
    """
    if not signature:
        raise SignatureInvalid("message is not signed")
    if len(signature) != SIGNATURE_SIZE:
        raise SignatureInvalid(f"invalid signature length, expected: {SIGNATURE_SIZE}, found: {len(signature)}")
    if signature[0] == ED25519:
        try:
            VerifyKey(account).verify(message, signature[1:])
        except (BadSignatureError, ValueError):
            raise SignatureInvalid("ed25519 signature verification failed") from None
    elif signature[0] == SR25519:
        try:
            good = sr25519.verify(signature[1:], message, account)
        except Exception:  # For bytes that are not a point, the binding raises exceptions of several types.
            good = False
        if not good:
            raise SignatureInvalid("sr25519 signature verification failed")
    else:
        raise SignatureInvalid("invalid signature type (expected either sr25519 or ed25519)")


# --- addresses ---


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(b"SS58PRE" + data, digest_size=64).digest()[:2]


def ss58(account: bytes) -> str:
    """Return an account as text, in SS58 with prefix 42."""
    data = bytes([SS58_PREFIX]) + account
    text: str = base58.b58encode(data + _checksum(data)).decode()
    return text


def parse_account(text: str) -> bytes:
    """Decode an account: an SS58 address, or 64 hexadecimal digits with or without ``0x``.

    :raises IdentityError: the text has neither form.
    """
    # The time of Base58 decoding grows with the square of the length, so long texts are refused first.
    if len(text) > MAX_ACCOUNT_TEXT:
        raise IdentityError(f"{text[:20]!r}... is not an account: it has {len(text)} characters")
    bare = text.removeprefix("0x")
    if len(bare) == 2 * ACCOUNT_SIZE:
        try:
            return bytes.fromhex(bare)
        except ValueError:
            pass
    try:
        data = base58.b58decode(text)
    except ValueError:
        data = b""
    if len(data) != ACCOUNT_SIZE + 3 or data[0] != SS58_PREFIX or _checksum(data[:-2]) != data[-2:]:
        raise IdentityError(f"{text[:80]!r} is not an account: an address that begins with 5, or 64 hexadecimal digits")
    return data[1:-2]
