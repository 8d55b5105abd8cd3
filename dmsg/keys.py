"""secp256k1 keys, recoverable signatures and key files.

Lengths: :class:`PubKey` 33 bytes (compressed point), :class:`SecKey` 32 bytes
(big endian), :class:`Signature` 65 bytes ``r(32) || s(32) || recid(1)``, all
as Skycoin's ``cipher`` package writes them.  On the wire, in JSON and in files they are lower-case hexadecimal; people
see public keys in :attr:`PubKey.text`, and may write either.

A value of these types is always valid: the constructors raise
:class:`~dmsg.errors.KeyFormatError` for everything else, which includes keys
that make the 2019 reference panic (x >= p) and the null key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

import coincurve
import coincurve.context
from coincurve._libsecp256k1 import ffi, lib

from dmsg.directories import UnsafeDirectory, make_directory
from dmsg.errors import KeyFileError, KeyFormatError, SignatureError

PUBKEY_SIZE = 33
PUBKEY_TEXT_SIZE = 53
"""Number of characters of a public key in base32, which fits into a DNS label of at most 63."""
SECKEY_SIZE = 32
SIGNATURE_SIZE = 65
KEY_FILE_MODE = 0o600

POINTS = 64
"""Number of most recently used keys whose points are cached, for the handshakes under way.  Most keys are used for one
handshake, and cached objects that live longer would fragment the heap."""
SHARED = 1024
"""Number of most recently used keys with which a secret key caches its shared secret."""
_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of data, 32 bytes."""
    return hashlib.sha256(data).digest()


def _from_hex(text: str, size: int, name: str) -> bytes:
    if len(text) != size * 2:
        raise KeyFormatError(f"{name} must be {size * 2} hexadecimal characters, not {len(text)}")
    try:
        # The characters are checked first, because bytes.fromhex() would accept a key with blanks in it.
        if not text.isalnum():
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise KeyFormatError(f"{name} is not hexadecimal") from None


@lru_cache(maxsize=POINTS)
def _point(data: bytes) -> coincurve.PublicKey:
    """Return the decompressed point of a key, from a cache.

    Decompression takes a tenth of the time of a key agreement, and a handshake needs the same point two or three times.

    :raises ValueError: the key is no point of the curve.
    """
    return coincurve.PublicKey(data)


class PubKey(bytes):
    """Public key: 33 bytes, compressed, on the curve."""

    __slots__ = ()

    def __new__(cls, data: bytes) -> PubKey:
        """:raises KeyFormatError: wrong length, prefix, x >= p, or not on the curve."""
        if len(data) != PUBKEY_SIZE:
            raise KeyFormatError(f"public key must be {PUBKEY_SIZE} bytes, not {len(data)}")
        try:
            _point(bytes(data))
        except ValueError:
            raise KeyFormatError("public key is not a point of the curve") from None
        return super().__new__(cls, data)

    @classmethod
    def shared(cls, data: bytes) -> PubKey:
        """Return an equal key that all callers share, if it was used recently, to save memory."""
        return _shared_key(data)

    @classmethod
    def from_hex(cls, text: str) -> PubKey:
        """Return the key in a hexadecimal text.

        :param text: 66 hexadecimal characters of either case.
        """
        return cls(_from_hex(text, PUBKEY_SIZE, "public key"))

    @classmethod
    def from_text(cls, text: str) -> PubKey:
        """Return the key in a text that a person wrote.

        :param text: 53 characters of base32 (:attr:`text`) or 66 of hexadecimal, of either case.
        :raises KeyFormatError: the text is neither, or another base32 text stands for the same key.
        """
        if len(text) != PUBKEY_TEXT_SIZE:
            if len(text) != PUBKEY_SIZE * 2:
                sizes = f"{PUBKEY_TEXT_SIZE} characters, or {PUBKEY_SIZE * 2} in hexadecimal"
                raise KeyFormatError(f"a public key has {sizes}, not {len(text)}")
            return cls.from_hex(text)
        try:
            data = base64.b32decode(text.upper() + "===")
        except (binascii.Error, ValueError):
            raise KeyFormatError("public key is not base32") from None
        key = cls(data)
        # The text is compared with the key's own, because the last character has one bit more than the key, so that two
        # texts could stand for one key.
        if key.text != text.lower():
            raise KeyFormatError("public key is not valid base32: the last character has a spare bit set")
        return key

    @property
    def text(self) -> str:
        """Text of the key for people and as a host name: 53 lower-case characters of base32 (RFC 4648) without
        padding."""
        return base64.b32encode(self).decode("ascii").rstrip("=").lower()

    def verify(self, payload: bytes, signature: Signature) -> None:
        """Check a signature over SHA-256 of ``payload``.

        :raises SignatureError: the signature was not made with this key.
        """
        if signature.recover(payload) != self:
            raise SignatureError("signature was not made by this key")

    @property
    def short(self) -> str:
        """First 8 hexadecimal digits of the key, the form for logs."""
        return self[:4].hex()

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"PubKey({self.hex()})"


@lru_cache(maxsize=POINTS)
def _shared_key(data: bytes) -> PubKey:
    return PubKey(data)


class Signature(bytes):
    """Recoverable signature: 65 bytes ``r || s || recid``."""

    __slots__ = ()

    def __new__(cls, data: bytes) -> Signature:
        """:raises KeyFormatError: the data have not 65 bytes."""
        if len(data) != SIGNATURE_SIZE:
            raise KeyFormatError(f"signature must be {SIGNATURE_SIZE} bytes, not {len(data)}")
        return super().__new__(cls, data)

    @classmethod
    def from_hex(cls, text: str) -> Signature:
        """Return the signature in a hexadecimal text.

        :param text: 130 hexadecimal characters of either case.
        """
        return cls(_from_hex(text, SIGNATURE_SIZE, "signature"))

    def recover(self, payload: bytes) -> PubKey:
        """Return the key that made this signature over SHA-256 of ``payload``."""
        return self.recover_digest(sha256(payload))

    def recover_digest(self, digest: bytes) -> PubKey:
        """Return the key that made this signature over the 32 bytes ``digest``.

        :raises SignatureError: recid is above 3 (27-style ids too), the top bit of s is set, r or s is out of range,
            there is no such point, or recovery gives infinity, which the 2019 reference accepts.  The top bit is
            Skycoin's rule for a high s (specs of ``cipher``); a flipped signature always has it.
        """
        if self[64] > 3:
            raise SignatureError("recovery id is greater than 3")
        if self[32] & 0x80:
            raise SignatureError("the signature's s is above half of the curve's order")
        try:
            point = coincurve.PublicKey.from_signature_and_message(bytes(self), digest, hasher=None)
            return bytes.__new__(PubKey, point.format())
        except Exception:  # Exception is caught, because coincurve raises a bare Exception in one case.
            raise SignatureError("no public key can be recovered from the signature") from None

    def __str__(self) -> str:
        return self.hex()


class _PrivateKey(coincurve.PrivateKey):
    """Private key without the x-only key of Schnorr signatures, which would double the time of its construction."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.context = coincurve.context.GLOBAL_CONTEXT
        self.public_key = coincurve.PublicKey.from_valid_secret(secret)


class SecKey:
    """Secret key.  Its only text form is :meth:`hex`, so that no log shows it by accident."""

    __slots__ = ("_key", "_shared", "public")

    public: PubKey
    """Public key that belongs to the secret key."""

    def __init__(self, data: bytes) -> None:
        """:raises KeyFormatError: the data have not 32 bytes, are zero, or not below the order of the curve."""
        if len(data) != SECKEY_SIZE:
            raise KeyFormatError(f"secret key must be {SECKEY_SIZE} bytes, not {len(data)}")
        if not 0 < int.from_bytes(data, "big") < _ORDER:
            raise KeyFormatError("secret key is out of range")
        self._key = _PrivateKey(bytes(data))
        self._shared: dict[PubKey, bytes] = {}
        self.public = bytes.__new__(PubKey, self._key.public_key.format())

    @classmethod
    def generate(cls) -> SecKey:
        """Return a new random key."""
        while True:
            try:
                return cls(os.urandom(SECKEY_SIZE))
            except KeyFormatError:  # pragma: no cover (one in 2**128)
                continue

    @classmethod
    def from_hex(cls, text: str) -> SecKey:
        """Return the key in a hexadecimal text.

        :param text: 64 hexadecimal characters of either case.
        """
        return cls(_from_hex(text, SECKEY_SIZE, "secret key"))

    @classmethod
    def from_seed(cls, seed: bytes) -> SecKey:
        """Return Skycoin's deterministic key of a seed (``cipher.GenerateDeterministicKeyPair``).

        :raises KeyFormatError: the seed is empty.
        """
        if not seed:
            raise KeyFormatError("seed is empty")

        def generate(data: bytes) -> bytes:
            while True:
                data = sha256(data)
                if 0 < int.from_bytes(data, "big") < _ORDER:
                    return data

        first = sha256(seed)
        point = cls(generate(sha256(first))).public
        product = coincurve.PublicKey(point).multiply(generate(first)).format()
        return cls(generate(sha256(seed + sha256(first + product))))

    def sign(self, payload: bytes) -> Signature:
        """Return a signature over SHA-256 of ``payload``, with low s, deterministic (RFC 6979).

        The 2019 reference takes a random nonce; verifiers cannot tell the difference.
        """
        return Signature(self._key.sign_recoverable(payload))

    def ecdh(self, public: PubKey) -> bytes:
        """Return the shared secret: SHA-256 of the compressed product point, 32 bytes (``cipher.ECDH``)."""
        secret = ffi.new("unsigned char [32]")
        # This does the same as coincurve's ecdh(), but without decompressing the point at each call.
        lib.secp256k1_ecdh(
            self._key.context.ctx, secret, _point(public).public_key, self._key.secret, ffi.NULL, ffi.NULL
        )
        return bytes(ffi.buffer(secret, 32))

    def lasting_ecdh(self, public: PubKey) -> bytes:
        """Return the same shared secret from a cache, for two lasting keys that agree again with each connection."""
        shared = self._shared.pop(public, None)
        if shared is None:
            shared = self.ecdh(public)
            if len(self._shared) >= SHARED:
                del self._shared[next(iter(self._shared))]
        self._shared[public] = shared
        return shared

    def hex(self) -> str:
        """Return the secret key as 64 hexadecimal characters."""
        return self._key.secret.hex()

    def to_bytes(self) -> bytes:
        """Return the secret key as 32 bytes, big endian."""
        return self._key.secret

    def __repr__(self) -> str:
        return f"<SecKey of {self.public.short}>"


def write_key_file(path: str | os.PathLike[str], key: SecKey) -> None:
    """Write a new key file, mode 0600.

    The file has two lines, ``secret HEX`` and ``public HEX``.

    :raises KeyFileError: the file exists or cannot be written.
    """
    write_new(path, f"secret {key.hex()}\npublic {key.public}\n")


def write_new(path: str | os.PathLike[str], text: str) -> None:
    """Write a new file with a secret, mode 0600.

    The file appears complete or not at all; a full disk leaves nothing behind.

    :raises KeyFileError: the file exists or cannot be written.
    """
    target = Path(path)
    temporary = None
    try:
        if os.path.lexists(target):
            raise FileExistsError
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            os.fchmod(file.fileno(), KEY_FILE_MODE)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            # The name is made by a hard link, which, unlike a rename, never replaces a file.
            os.link(temporary, target)
        except PermissionError:  # A rename is used instead, because the file system has no hard links.
            os.rename(temporary, target)
            temporary = None
    except FileExistsError:
        raise KeyFileError(f"{path}: exists already") from None
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def read_key_file(path: str | os.PathLike[str]) -> SecKey:
    """Read a key file.

    :raises KeyFileError: the file is missing or malformed, has two keys that do not belong together, or is readable by
        group or others.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would block until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).decode("ascii", "replace") if stat.S_ISREG(mode) else ""
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise KeyFileError(f"{path}: {'is a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    if not text:
        raise KeyFileError(f"{path}: is empty, not a key file")
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2)
    try:
        key = SecKey.from_hex(fields["secret"].strip())
    except (KeyError, KeyFormatError):
        raise KeyFileError(f"{path}: not a key file") from None
    # The mode is checked only now, so that nobody is told to change the mode of a file that is no key.
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(f"{path}: is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    if "public" in fields and fields["public"].strip().lower() != key.public.hex():
        raise KeyFileError(f"{path}: its public key does not belong to its secret key")
    return key


def load_or_create_key(path: str | os.PathLike[str], *, create: bool = True) -> SecKey:
    """Read the key file, or create it with a new key if it is absent.

    :param create: whether to create it; otherwise an absent file is an error, for example because its name was
        mistyped.
    :raises KeyFileError: as in :func:`read_key_file` and :func:`write_key_file`.
    """
    if os.path.lexists(path):
        return read_key_file(path)
    if not create:
        raise KeyFileError(f"{path}: there is no such key file; make it with --create, or: dmsg key new {path}")
    key = SecKey.generate()
    write_key_file(path, key)
    return key


def default_key(path: str | os.PathLike[str]) -> SecKey:
    """Return the default key, from a file in the directory of settings that is created with its directory if absent.

    :raises KeyFileError: as in :func:`load_or_create_key`.
    """
    try:
        make_directory(Path(path).parent)
    except UnsafeDirectory as error:
        raise KeyFileError(str(error.strerror)) from None
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    return load_or_create_key(path)
