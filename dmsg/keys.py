"""secp256k1 keys, recoverable signatures and key files.

Lengths: :class:`PubKey` 33 bytes (compressed point), :class:`SecKey` 32 bytes (big endian), :class:`Signature` 65 bytes
``r(32) || s(32) || recid(1)``, all as Skycoin's ``cipher`` package writes them. JSON and files have them in lower-case
hexadecimal. People see public keys in the form of :attr:`PubKey.text`, and may write either form.

A value of these types is always valid: the constructors raise :class:`~dmsg.errors.KeyFormatError` for everything else.
This includes the null key, and keys with which the reference of 2019 panics (x >= p).
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

from dmsg.directory_checks import UnsafeDirectory, check_state_path, make_directory
from dmsg.errors import KeyFileError, KeyFormatError, SignatureError
from dmsg.renames import rename_to_new

PUBKEY_SIZE = 33
PUBKEY_TEXT_SIZE = 53
"""Number of characters of a public key in base32. They fit into a DNS label, which has at most 63."""
SECKEY_SIZE = 32
SIGNATURE_SIZE = 65
KEY_FILE_MODE = 0o600

MAX_CACHED_POINTS = 64
"""Maximum number of keys whose decompressed points are cached; the least recently used is evicted. The number is small:
most keys are used for one handshake only, and many long-lived objects would fragment the heap.
"""
MAX_CACHED_SECRETS = 1024
"""Maximum number of public keys whose shared secrets a secret key caches; the least recently used is evicted."""
_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 hash of ``data``, 32 bytes."""
    return hashlib.sha256(data).digest()


def _from_hex(text: str, size: int, name: str) -> bytes:
    if len(text) != size * 2:
        raise KeyFormatError(f"{name} must be {size * 2} hexadecimal characters, not {len(text)}")
    try:
        # The characters are checked first, because bytes.fromhex() accepts blanks.
        if not text.isalnum():
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise KeyFormatError(f"{name} is not hexadecimal") from None


@lru_cache(maxsize=MAX_CACHED_POINTS)
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
        """Return the key of these bytes. To save memory, recent calls with the same bytes return the same object."""
        return _shared_key(data)

    @classmethod
    def from_hex(cls, text: str) -> PubKey:
        """Parse a hexadecimal key.

        :param text: 66 hexadecimal characters, upper or lower case.
        """
        return cls(_from_hex(text, PUBKEY_SIZE, "public key"))

    @classmethod
    def from_text(cls, text: str) -> PubKey:
        """Parse a key that a person wrote.

        :param text: 53 characters of base32 (:attr:`text`) or 66 hexadecimal characters, upper or lower case.
        :raises KeyFormatError: the text is neither, or its last character of base32 has a spare bit that is not 0.
            Base32 has one bit more than a key, so two texts would otherwise stand for the same key.
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
        # The base32 text has one bit more than the key, so two texts decode to each key. Only the text whose additional
        # bit is zero is valid.
        if key.text != text.lower():
            raise KeyFormatError("public key is not valid base32: the last character has a spare bit set")
        return key

    @property
    def text(self) -> str:
        """Key as people read and write it, and as a host name: 53 lower-case characters of base32 (RFC 4648), without
        padding.
        """
        return base64.b32encode(self).decode("ascii").rstrip("=").lower()

    def verify(self, payload: bytes, signature: Signature) -> None:
        """Verify a signature over the SHA-256 hash of ``payload``.

        :raises SignatureError: the signature was not made with this key.
        """
        if signature.recover(payload) != self:
            raise SignatureError("signature was not made by this key")

    @property
    def short(self) -> str:
        """First 8 characters of :attr:`text`, as logs, messages and pages show the key."""
        # Five bytes are exactly 8 characters of base32.
        return base64.b32encode(self[:5]).decode("ascii").lower()

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"PubKey({self.hex()})"


@lru_cache(maxsize=MAX_CACHED_POINTS)
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
        """Parse a hexadecimal signature.

        :param text: 130 hexadecimal characters, upper or lower case.
        """
        return cls(_from_hex(text, SIGNATURE_SIZE, "signature"))

    def recover(self, payload: bytes) -> PubKey:
        """Return the public key with whose secret key this signature over the SHA-256 hash of ``payload`` was made.

        :raises SignatureError: see :meth:`recover_digest`.
        """
        return self.recover_digest(sha256(payload))

    def recover_digest(self, digest: bytes) -> PubKey:
        """Return the public key with whose secret key this signature over the 32 bytes ``digest`` was made.

        :raises SignatureError: recid is above 3 (also 27 and more, as some programs count), the top bit of s is set, r
            or s is out of range, r is not the coordinate of a point, or the key would be the point at infinity.
            Skycoin's ``cipher`` forbids the top bit of s, because the negated s would also be valid. The reference of
            2019 accepts infinity.
        """
        if self[64] > 3:
            raise SignatureError("recovery id is greater than 3")
        if self[32] & 0x80:
            raise SignatureError("the signature's s is above half of the curve's order")
        try:
            point = coincurve.PublicKey.from_signature_and_message(bytes(self), digest, hasher=None)
            return bytes.__new__(PubKey, point.format())
        except Exception:  # For some signatures, coincurve raises Exception itself.
            raise SignatureError("no public key can be recovered from the signature") from None

    def __str__(self) -> str:
        return self.hex()


class _PrivateKey(coincurve.PrivateKey):
    """Private key of coincurve without the key for Schnorr signatures, whose computation would double the time to
    create it.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.context = coincurve.context.GLOBAL_CONTEXT
        self.public_key = coincurve.PublicKey.from_valid_secret(secret)


class SecKey:
    """Secret key. Only :meth:`hex` and :meth:`to_bytes` reveal it; ``str()`` and ``repr()`` do not, so that no log
    shows it by accident.
    """

    __slots__ = ("_key", "_shared", "public")

    public: PubKey
    """Public key that belongs to the secret key."""

    def __init__(self, data: bytes) -> None:
        """:raises KeyFormatError: the data are not 32 bytes, are zero, or are not less than the order of the curve."""
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
        """Parse a hexadecimal key.

        :param text: 64 hexadecimal characters, upper or lower case.
        """
        return cls(_from_hex(text, SECKEY_SIZE, "secret key"))

    @classmethod
    def from_seed(cls, seed: bytes) -> SecKey:
        """Derive a key from a seed as Skycoin does (``cipher.GenerateDeterministicKeyPair``).

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
        """Sign the SHA-256 hash of ``payload``. The signature is deterministic (RFC 6979) and has a low s.

        The reference of 2019 uses a random nonce; for verifiers this makes no difference.
        """
        return Signature(self._key.sign_recoverable(payload))

    def ecdh(self, public: PubKey) -> bytes:
        """Return the shared secret of this key and ``public``: 32 bytes, the SHA-256 hash of the compressed product
        point (``cipher.ECDH``).
        """
        secret = ffi.new("unsigned char [32]")
        # These lines do the same as coincurve's ecdh(), but get the decompressed point from a cache.
        lib.secp256k1_ecdh(
            self._key.context.ctx, secret, _point(public).public_key, self._key.secret, ffi.NULL, ffi.NULL
        )
        return bytes(ffi.buffer(secret, 32))

    def lasting_ecdh(self, public: PubKey) -> bytes:
        """Return the same as :meth:`ecdh` from a cache. It is meant for static keys, because every connection between
        two clients needs the secret of the same two keys again.
        """
        shared = self._shared.pop(public, None)
        if shared is None:
            shared = self.ecdh(public)
            if len(self._shared) >= MAX_CACHED_SECRETS:
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
    """Write a new file for a secret, with mode 0600.

    The file appears complete or not at all, and after an error, such as a full disk, no temporary file is left.

    :raises KeyFileError: the file exists or cannot be written, or another user, who could replace the file, has put its
        directory into a shared directory.
    """
    target = Path(path)
    temporary = None
    try:
        if os.path.lexists(target):
            raise FileExistsError
        check_state_path(target)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            os.fchmod(file.fileno(), KEY_FILE_MODE)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        rename_to_new(temporary, target)
        temporary = None
    except FileExistsError:
        raise KeyFileError(f"{path}: this file exists already") from None
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
        raise KeyFileError(f"{path}: this is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
    if not text:
        raise KeyFileError(f"{path}: this file is empty, so it is not a key file")
    fields = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2)
    try:
        key = SecKey.from_hex(fields["secret"].strip())
    except (KeyError, KeyFormatError):
        raise KeyFileError(f"{path}: not a key file") from None
    # The mode is checked after the content, so that the advice to change the mode is not given for a file that has no
    # key.
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(f"{path}: is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    if "public" in fields and fields["public"].strip().lower() != key.public.hex():
        raise KeyFileError(f"{path}: its public key does not belong to its secret key")
    return key


def load_or_create_key(path: str | os.PathLike[str], *, create: bool = True) -> SecKey:
    """Read the key file, or create it with a new key if it is absent.

    :param create: whether to create an absent file; otherwise it is an error, because its name may be mistyped.
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
    """Return the user's default key from the file ``path`` in the directory of settings. Create file and directory if
    they are absent.

    :raises KeyFileError: as in :func:`load_or_create_key`.
    """
    try:
        make_directory(Path(path).parent)
    except UnsafeDirectory as error:
        raise KeyFileError(str(error.strerror)) from None
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    return load_or_create_key(path)
