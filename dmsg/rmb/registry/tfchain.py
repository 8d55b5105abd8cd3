"""Registry of tfchain, the blockchain that the reference implementation uses. **Read only, and tested only against a
fake node.**

This registry reads the storage of the pallet ``TfgridModule`` by ``state_getStorage`` over HTTP. The maps are ``Twins``
(number -> twin) and ``TwinIdByAccountID`` (account -> number), both hashed with ``Blake2_128Concat``. The layout of the
records is that of the pallet at commit 33046d6; the metadata of the node is not read.

Twins are created and changed with the tools of the chain, and peers run with ``--no-update``. There is no feed of
changes, so only the cache in front of this registry limits for how long an entry is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers
from zope.interface import implementer

from dmsg.base.printable import without_userinfo
from dmsg.base.urls import check_url
from dmsg.errors import needs_extra
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool
from dmsg.net.web.response import parse_json
from dmsg.rmb.errors import RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.twins.twin import Twin

TIMEOUT = 10.0
"""Timeout of one request in seconds."""
MAX_ANSWER = 1024 * 1024
"""Maximum size of an answer in bytes."""
PALLET, TWINS, BY_ACCOUNT = "TfgridModule", "Twins", "TwinIdByAccountID"


class ScaleError(ValueError):
    """Error: the data do not have the expected layout."""


class Scale:
    """Reader of those SCALE types that occur in the record of a twin."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes.

        :raises ScaleError: fewer bytes are left.
        """
        if self._at + size > len(self._data):
            raise ScaleError("the record of the twin ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def u32(self) -> int:
        """Read an unsigned number of four bytes, little endian."""
        return int.from_bytes(self.take(4), "little")

    def compact(self) -> int:
        """Read a length in SCALE's compact encoding. The two lowest bits of its first byte give the number of bytes of
        the length."""
        first = self.take(1)
        mode = first[0] & 3
        if mode == 3:
            raise ScaleError("the data has a length of more than four bytes")
        return int.from_bytes(first + self.take((0, 1, 3)[mode]), "little") >> 2

    def data(self) -> bytes:
        """Read a byte string that is preceded by its length."""
        return self.take(self.compact())

    def optional(self) -> bytes | None:
        """Read an optional byte string; None if it is absent."""
        mark = self.take(1)
        if mark not in (b"\0", b"\1"):
            raise ScaleError("the data has an optional value whose first byte is neither 0 nor 1")
        return self.data() if mark == b"\1" else None

    def end(self) -> None:
        """Check that all bytes were read.

        :raises ScaleError: there are unread bytes.
        """
        if self._at != len(self._data):
            raise ScaleError("bytes follow the end of the data")


def twox128(text: str) -> bytes:
    """Return the TwoX hash of ``text``, 16 bytes: its xxHash64 with seed 0, then the one with seed 1, each little
    endian."""
    import xxhash

    return b"".join(xxhash.xxh64(text.encode(), seed=seed).intdigest().to_bytes(8, "little") for seed in (0, 1))


def storage_key(pallet: str, item: str, key: bytes) -> bytes:
    """Return the storage key of an entry of a map.

    It consists of the 16-byte hashes of both names, the 16-byte BLAKE2b hash of ``key``, and ``key`` itself.
    """
    return twox128(pallet) + twox128(item) + hashlib.blake2b(key, digest_size=16).digest() + key


def decode_twin(data: bytes) -> Twin:
    """Decode the record of a twin on the chain: ``id, account, relay, entities, pk``.

    :raises ScaleError: the record has another layout.
    """
    scale = Scale(data)
    number, account, relay = scale.u32(), scale.take(32), scale.optional()
    for _ in range(scale.compact()):
        scale.u32()
        scale.data()
    pk = scale.optional()
    scale.end()
    try:
        text = None if relay is None else relay.decode()
    except UnicodeDecodeError:
        raise ScaleError("the name of a relay is not text in UTF-8") from None
    return Twin(number, account, text, pk)


@implementer(TwinRegistry)
class TfchainRegistry:
    """Read-only registry of the twins of tfchain, which queries one of its nodes.

    :param url: URL of the node, such as ``wss://tfchain.grid.tf:443``. The node also answers HTTP at this port.
    """

    def __init__(self, reactor: IReactorTime, url: str) -> None:
        """:raises ValueError: ``url`` is not a URL.
        :raises RegistryUnavailable: the required extra packages are not installed.
        """
        try:
            import xxhash  # noqa: F401
        except ImportError:
            raise RegistryUnavailable(f"tfchain: {needs_extra('rmb,tfchain')}") from None
        self.url = check_url(node_url(url))
        self.shown_url = without_userinfo(self.url)
        self._reactor = reactor
        self._pool = make_pool(reactor)
        self._http = WebClient(reactor, self._pool, TIMEOUT)

    async def _storage(self, item: str, key: bytes) -> bytes | None:
        question = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "state_getStorage",
            "params": ["0x" + storage_key(PALLET, item, key).hex()],
        }
        headers = Headers({"content-type": ["application/json"]})
        try:
            asking = self._http.post(self.url, data=json.dumps(question).encode(), headers=headers)
            response = await add_fair_timeout(asking, TIMEOUT, self._reactor)
            body = await add_fair_timeout(read_body(response, MAX_ANSWER), TIMEOUT, self._reactor)
            if response.code != 200:
                raise RegistryUnavailable(
                    f"{self.shown_url}: the node answered with HTTP status {response.code} and {len(body)} bytes"
                )
            answer = parse_json(body)
            result = answer["result"]
            return None if result is None else bytes.fromhex(result.removeprefix("0x"))
        except (CancelledError, RegistryUnavailable):
            raise
        except TimeoutError:
            raise RegistryUnavailable(f"{self.shown_url}: the node did not answer within {TIMEOUT:g} s") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RegistryUnavailable(f"{self.shown_url}: not an answer of a tfchain node") from None
        # When a connection is lost, Twisted raises exceptions of many types. So all types are caught.
        except Exception as error:
            reasons = getattr(error, "reasons", None)
            why = reasons[-1].value if reasons else error
            raise RegistryUnavailable(f"{self.shown_url}: {why or type(why).__name__}") from None

    async def _get(self, number: int) -> Twin:
        data = await self._storage(TWINS, number.to_bytes(4, "little"))
        if data is None:
            raise TwinNotFound(f"twin not found {number}")
        try:
            twin = decode_twin(data)
        except ScaleError as error:
            raise RegistryUnavailable(
                f"{self.shown_url}: the node stores twins in an unknown layout: {error}"
            ) from None
        if twin.id != number:
            raise RegistryUnavailable(f"{self.shown_url}: the node answered with a twin that was not requested")
        return twin

    def get(self, twin: int) -> Deferred[Twin]:
        return Deferred.fromCoroutine(self._get(twin))

    async def _by_account(self, account: bytes) -> int:
        data = await self._storage(BY_ACCOUNT, account)
        if data is None:
            raise TwinNotFound("there is no twin with this account")
        if len(data) != 4:
            raise RegistryUnavailable(f"{self.shown_url}: the node stores numbers of twins in an unknown layout")
        return int.from_bytes(data, "little")

    def id_by_account(self, account: bytes) -> Deferred[int]:
        return Deferred.fromCoroutine(self._by_account(account))

    def put(self, statement: Twin) -> Deferred[Twin]:
        return fail(RegistryRefused("twins of tfchain are changed with its own tools; run peers with --no-update"))

    async def _page(self, after: int, limit: int) -> list[Twin]:
        twins: list[Twin] = []
        for number in range(after + 1, after + 1 + min(limit, 50)):
            try:
                twins.append(await self._get(number))
            except TwinNotFound:
                break
        return twins

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        return Deferred.fromCoroutine(self._page(after, limit))

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        """Do nothing, because tfchain has no feed of changes. The cache in front of this registry asks again when
        entries expire."""

    def close(self) -> Deferred[None]:
        result: Deferred[None] = self._pool.closeCachedConnections()
        return result


def node_url(url: str) -> str:
    """Return the ``http:`` or ``https:`` URL of a node for its ``ws:`` or ``wss:`` URL; both use the same port."""
    for scheme, plain in (("wss://", "https://"), ("ws://", "http://")):
        if url.startswith(scheme):
            return plain + url.removeprefix(scheme)
    return url
