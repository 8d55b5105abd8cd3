"""secp256k1 as a Diffie-Hellman function for the ``noiseprotocol`` package.

The rules are those of the 2019 reference (``noise/dh.go``): DHLEN is 33, the
length of a public key, so the 32 bytes of the shared secret get one zero byte
appended; all 33 go into MixKey.

The product's own handshakes do not use it (:mod:`dmsg.noise.handshake`): it is here for programs
that need another pattern, and for the tests, which compare the two.
"""

from __future__ import annotations

import hashlib
from typing import Any

from noise.backends.default import DefaultNoiseBackend
from noise.backends.default.hashes import SHA256Hash
from noise.functions.dh import DH
from noise.functions.keypair import KeyPair

from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey

DH_SIZE = PUBKEY_SIZE


class Secp256k1KeyPair(KeyPair):  # type: ignore[misc]  # noiseprotocol has no types
    """``private`` is a :class:`SecKey` or None, ``public`` a :class:`PubKey`."""

    @classmethod
    def from_private_bytes(cls, private_bytes: bytes) -> Secp256k1KeyPair:
        return cls.of(SecKey(private_bytes))

    @classmethod
    def from_public_bytes(cls, public_bytes: bytes) -> Secp256k1KeyPair:
        # a point off the curve is refused here, before any DH (reference: panic)
        key = PubKey(bytes(public_bytes))
        return cls(public=key, public_bytes=bytes(key))

    @classmethod
    def of(cls, key: SecKey) -> Secp256k1KeyPair:
        return cls(private=key, public=key.public, public_bytes=bytes(key.public))


class Secp256k1(DH):  # type: ignore[misc]
    """DH of length 33."""

    @property
    def klass(self) -> type[Secp256k1KeyPair]:
        return Secp256k1KeyPair

    @property
    def dhlen(self) -> int:
        return DH_SIZE

    def generate_keypair(self) -> Secp256k1KeyPair:
        return Secp256k1KeyPair.of(SecKey.generate())

    def dh(self, private_key: SecKey, public_key: PubKey) -> bytes:
        return private_key.ecdh(public_key) + b"\0"


class _FastSHA256(SHA256Hash):  # type: ignore[misc]
    """The same SHA-256 through hashlib: a tenth of the set-up cost per call."""

    def hash(self, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()


_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_BLOCK = 64


def _hmac_sha256(key: bytes, data: bytes, algorithm: Any) -> bytes:
    """RFC 2104 for keys of at most one block, which all keys of Noise are.

    ``hmac.digest`` looks its hash up by name each time: half of its cost here,
    and a handshake needs it a dozen times.
    """
    sha = hashlib.sha256
    key = key.ljust(_BLOCK, b"\0")
    return sha(key.translate(_OUTER) + sha(key.translate(_INNER) + data).digest()).digest()


class Secp256k1Backend(DefaultNoiseBackend):  # type: ignore[misc]
    """The library's default backend plus ``Secp256k1``; SHA256 is the only hash."""

    def __init__(self) -> None:
        super().__init__()
        self.diffie_hellmans["Secp256k1"] = Secp256k1
        self.keypairs["Secp256k1"] = Secp256k1KeyPair
        self.hashes = {"SHA256": _FastSHA256}
        self.hmac = _hmac_sha256


BACKEND = Secp256k1Backend()
