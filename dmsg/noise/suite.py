"""Cryptographic functions for ``noiseprotocol``: secp256k1, SHA-256 and ChaCha20-Poly1305.

The rules for secp256k1 are those of the 2019 reference implementation (``noise/dh.go``). DHLEN is 33, the length of a
public key. A shared secret has 32 bytes; one zero byte is appended, and MixKey gets all 33 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from noise.backends.default import DefaultNoiseBackend
from noise.backends.default.ciphers import ChaCha20Cipher
from noise.backends.default.hashes import SHA256Hash
from noise.functions.dh import DH
from noise.functions.hash import hkdf
from noise.functions.keypair import KeyPair

from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey

DH_SIZE = PUBKEY_SIZE


class LastingKey(PubKey):
    """Static public key of the other side that was known before the handshake. The local secret key caches its
    Diffie-Hellman secret with such a key."""

    __slots__ = ()


class Secp256k1KeyPair(KeyPair):  # type: ignore[misc]  # noiseprotocol has no types
    """Key pair in the form that the library ``noiseprotocol`` expects. ``private`` is a :class:`SecKey` or None,
    ``public`` is a :class:`PubKey`."""

    @classmethod
    def from_private_bytes(cls, private_bytes: bytes) -> Secp256k1KeyPair:
        return cls.of(SecKey(private_bytes))

    @classmethod
    def from_public_bytes(cls, public_bytes: bytes) -> Secp256k1KeyPair:
        # PubKey refuses a point that is not on the curve, so no Diffie-Hellman is computed with such a point. The
        # reference implementation panics instead.
        key = PubKey(bytes(public_bytes))
        return cls(public=key, public_bytes=bytes(key))

    @classmethod
    def of(cls, key: SecKey) -> Secp256k1KeyPair:
        return cls(private=key, public=key.public, public_bytes=bytes(key.public))

    @classmethod
    def of_remote(cls, key: PubKey) -> Secp256k1KeyPair:
        """Wrap a remote static key that is known before the handshake."""
        return cls(public=bytes.__new__(LastingKey, key), public_bytes=bytes(key))


class Secp256k1(DH):  # type: ignore[misc]
    """Diffie-Hellman on secp256k1 with DHLEN 33."""

    @property
    def klass(self) -> type[Secp256k1KeyPair]:
        return Secp256k1KeyPair

    @property
    def dhlen(self) -> int:
        return DH_SIZE

    def generate_keypair(self) -> Secp256k1KeyPair:
        return Secp256k1KeyPair.of(SecKey.generate())

    def dh(self, private_key: SecKey, public_key: PubKey) -> bytes:
        # The local static key caches no secrets with remote ephemeral keys, because every handshake of a stranger would
        # add one. A local ephemeral key also caches its secrets, but it is freed with its handshake.
        lasting = type(public_key) is LastingKey
        return (private_key.lasting_ecdh(public_key) if lasting else private_key.ecdh(public_key)) + b"\0"


class _SHA256(SHA256Hash):  # type: ignore[misc]
    """SHA-256 by ``hashlib``. The class of ``noiseprotocol`` needs ten times as long to set up each call."""

    def hash(self, data: bytes) -> bytes:
        return sha256(data).digest()


class _ChaChaPoly(ChaCha20Cipher):  # type: ignore[misc]
    """ChaCha20-Poly1305 that makes a cipher object for each message, because most keys of a handshake encrypt at most
    one message."""

    def initialize(self, key: bytes) -> None:
        """Do nothing, because each call gets the key as an argument."""

    def encrypt(self, k: bytes, n: int, ad: bytes, plaintext: bytes) -> bytes:
        return ChaCha20Poly1305(k).encrypt(self.format_nonce(n), plaintext, ad)

    def decrypt(self, k: bytes, n: int, ad: bytes, ciphertext: bytes) -> bytes:
        return ChaCha20Poly1305(k).decrypt(self.format_nonce(n), ciphertext, ad)


_BLOCK = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


def _hkdf(
    chaining_key: bytes, input_key_material: bytes, num_outputs: int, hmac_hash_fn: Callable[..., bytes]
) -> tuple[bytes, ...]:
    """Derive keys by HKDF (Noise specification, section 4.3). HMAC-SHA-256 (RFC 2104) is computed here from plain
    SHA-256.

    Each end of a handshake derives keys four times. OpenSSL's HMAC would add 40 us to the 250 us of a handshake. The
    code relies on two facts: the keys are shorter than a block of SHA-256, and the last two HMACs have the same key.
    """
    if num_outputs != 2:
        # Any other number of keys is left to ``noiseprotocol``. Noise derives three keys only in patterns with a
        # pre-shared key, which dmsg does not use.
        derived: tuple[bytes, ...] = hkdf(chaining_key, input_key_material, num_outputs, hmac_hash_fn)
        return derived
    key = chaining_key.ljust(_BLOCK, b"\0")
    temporary = sha256(key.translate(_OUTER) + sha256(key.translate(_INNER) + input_key_material).digest()).digest()
    key = temporary.ljust(_BLOCK, b"\0")
    inner, outer = key.translate(_INNER), key.translate(_OUTER)
    first = sha256(outer + sha256(inner + b"\1").digest()).digest()
    return first, sha256(outer + sha256(inner + first + b"\2").digest()).digest()


class Secp256k1Backend(DefaultNoiseBackend):  # type: ignore[misc]
    """Backend of the library ``noiseprotocol`` that adds ``Secp256k1`` and allows only the hash SHA256 and the cipher
    ChaChaPoly."""

    def __init__(self) -> None:
        super().__init__()
        self.diffie_hellmans["Secp256k1"] = Secp256k1
        self.keypairs["Secp256k1"] = Secp256k1KeyPair
        self.hashes = {"SHA256": _SHA256}
        self.ciphers = {"ChaChaPoly": _ChaChaPoly}
        self.hkdf = _hkdf


BACKEND = Secp256k1Backend()
