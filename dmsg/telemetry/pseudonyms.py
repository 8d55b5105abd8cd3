"""Names for clients and networks that say nothing to others.

A tag is the first 8 bytes of HMAC-SHA256 over what it stands for, keyed with a
secret that stays in the spool's directory (0600): events of one writer can be
put together, those of two cannot, and nobody without the secret can find out
which key a tag is, not even with a list of all keys.  Servers of one operator
may have one secret together: then a client has the same tag at all of them.
Tags of networks change each day (UTC).
"""

from __future__ import annotations

import hmac
import os
import stat
from collections import OrderedDict
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from pathlib import Path

from dmsg.errors import DmsgError

SECRET_NAME = "secret"  # noqa: S105  # a file's name
SECRET_SIZE = 32
TAG_SIZE = 8
CACHE_SIZE = 4096
"""Tags that are remembered."""
IPV4_PREFIX = 24
IPV6_PREFIX = 48


def load_or_create_secret(directory: Path) -> bytes:
    """The 32 bytes that are kept in ``directory``.

    :raises DmsgError: the file there holds something else.
    :raises OSError: it cannot be read or made.
    """
    path = directory / SECRET_NAME
    try:
        # complete before it has its name, so that two processes that start at once agree
        fresh = directory / f".{SECRET_NAME}-{os.getpid()}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(SECRET_SIZE))
            os.link(fresh, path)
        finally:
            fresh.unlink()
    except FileExistsError:
        pass
    return read_secret(directory)


def read_secret(directory: Path) -> bytes:
    """The 32 bytes that are kept in ``directory``.

    :raises DmsgError: the file there holds something else.
    :raises OSError: it cannot be read.
    """
    return read_secret_file(directory / SECRET_NAME)


def read_secret_file(path: Path) -> bytes:
    """The 32 bytes of a file.

    :raises DmsgError: it holds something else, or others may read it.
    :raises OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        secret = file.read(SECRET_SIZE + 1)
    if len(secret) != SECRET_SIZE:
        size = "more" if len(secret) > SECRET_SIZE else str(len(secret))
        raise DmsgError(f"{path} must hold {SECRET_SIZE} bytes, not {size}")
    # only of what is a secret: nobody is told to change the mode of another file
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DmsgError(f"{path} is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    return secret


class Pseudonyms:
    """Makes tags.

    :param clear: name clients by their keys; networks never are.
    """

    def __init__(self, secret: bytes, *, clear: bool = False) -> None:
        self._secret = secret
        self.clear = clear
        self._tags: OrderedDict[bytes, str] = OrderedDict()

    def _tag(self, purpose: bytes, value: bytes) -> str:
        return hmac.digest(self._secret, purpose + value, "sha256")[:TAG_SIZE].hex()

    def client(self, key: bytes) -> str:
        """A tag of 16 hex digits, or the key in hex."""
        if self.clear:
            return key.hex()
        tag = self._tags.get(key)
        if tag is None:
            tag = self._tags[key] = self._tag(b"client", key)
            if len(self._tags) > CACHE_SIZE:
                self._tags.popitem(last=False)
        return tag

    def network(self, host: str, day: int) -> str | None:
        """A tag of the network of an address; None for what is no IP address.

        :param day: days since 1970.
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
        """Eight hex digits for who has no key of its own."""
        return self._tag(b"producer", b"")[:8]

    def space(self) -> str:
        """Eight hex digits that all have whose tags can be put together; ``clear`` if those are keys."""
        return "clear" if self.clear else self._tag(b"space", b"")[:8]
