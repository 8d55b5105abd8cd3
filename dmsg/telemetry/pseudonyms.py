"""Pseudonyms (tags) for clients and networks in events.

A tag is the first 8 bytes of HMAC-SHA256 over the name, keyed with a secret in the spool's directory (mode 0600). In
the events of one writer, a client always has the same tag. Two writers with different secrets use different tags for
the same client, so their events cannot be correlated. Without the secret, nobody can find out which key a tag stands
for, even with a list of all keys. Servers of one operator may share a secret; then a client has the same tag at all of
them. The tag of a network changes each day (UTC).
"""

from __future__ import annotations

import hmac
import os
import stat
from collections import OrderedDict
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from pathlib import Path

from dmsg.errors import DmsgError
from dmsg.renames import rename_to_new

SECRET_NAME = "secret"  # noqa: S105  # the name of a file
SECRET_SIZE = 32
TAG_SIZE = 8
CACHE_SIZE = 4096
"""Maximum number of tags in the cache."""
IPV4_PREFIX = 24
IPV6_PREFIX = 48


def load_or_create_secret(directory: Path) -> bytes:
    """Return the 32 bytes of the secret in ``directory``, and create it if it is absent.

    :raises DmsgError: the file has a wrong size, or others can access it.
    :raises OSError: the file cannot be read or made.
    """
    path = directory / SECRET_NAME
    try:
        # The file gets its final name only when it is complete, so that two processes that start at the same time use
        # the same secret.
        fresh = directory / f".{SECRET_NAME}-{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(SECRET_SIZE))
            rename_to_new(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except FileExistsError:
        pass
    return read_secret(directory)


def read_secret(directory: Path) -> bytes:
    """Return the 32 bytes of the secret in ``directory``.

    :raises DmsgError: the file has a wrong size, or others can access it.
    :raises OSError: the file cannot be read.
    """
    return read_secret_file(directory / SECRET_NAME)


def read_secret_file(path: Path) -> bytes:
    """Return the 32 bytes of a secret file.

    :raises DmsgError: the file has a wrong size, or others can access it.
    :raises OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        secret = file.read(SECRET_SIZE + 1)
    if len(secret) != SECRET_SIZE:
        size = "more" if len(secret) > SECRET_SIZE else str(len(secret))
        raise DmsgError(f"{path} must hold {SECRET_SIZE} bytes, not {size}")
    # The mode is checked after the size. Otherwise the error would advise a user to change the mode of a file that
    # contains no secret.
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DmsgError(f"{path} is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    return secret


class Pseudonyms:
    """Generator of tags.

    :param clear: True to return public keys instead of tags for clients. Networks always get tags.
    """

    def __init__(self, secret: bytes, *, clear: bool = False) -> None:
        self._secret = secret
        self.clear = clear
        self._tags: OrderedDict[bytes, str] = OrderedDict()

    def _tag(self, purpose: bytes, value: bytes) -> str:
        return hmac.digest(self._secret, purpose + value, "sha256")[:TAG_SIZE].hex()

    def client(self, key: bytes) -> str:
        """Return the tag of a client (16 hex digits), or its public key in hex if ``clear`` is set."""
        if self.clear:
            return key.hex()
        tag = self._tags.get(key)
        if tag is None:
            tag = self._tags[key] = self._tag(b"client", key)
            if len(self._tags) > CACHE_SIZE:
                self._tags.popitem(last=False)
        return tag

    def network(self, host: str, day: int) -> str | None:
        """Return the tag (16 hex digits) of an address's network on a day; None if ``host`` is not an IP address.

        :param day: days since 1970; the tags of two days cannot be correlated.
        """
        prefix: bytes
        try:
            prefix = IPv4Address(host).packed[: IPV4_PREFIX // 8]
        except AddressValueError:
            try:
                address = IPv6Address(host.partition("%")[0])
            except AddressValueError:
                return None
            mapped = address.ipv4_mapped
            prefix = address.packed[: IPV6_PREFIX // 8] if mapped is None else mapped.packed[: IPV4_PREFIX // 8]
        return self._tag(b"network" + day.to_bytes(4, "big"), prefix)

    def name(self) -> str:
        """Return a name of 8 hex digits for a producer without a key."""
        return self._tag(b"producer", b"")[:8]

    def space(self) -> str:
        """Return an id (8 hex digits) of the secret from which the tags are computed, or ``clear`` if clients are named
        by their keys. Tags of two writers can be compared if their ids are equal."""
        return "clear" if self.clear else self._tag(b"space", b"")[:8]
