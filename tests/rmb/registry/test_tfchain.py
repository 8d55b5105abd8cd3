"""The adapter for tfchain, against a stand-in for a node: its layout and hashes, not the chain."""

from __future__ import annotations

import json
from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.rmb.errors import RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.service import open_registry
from dmsg.rmb.registry.tfchain import ScaleError, decode_twin, storage_key, twox128
from dmsg.rmb.twins.identity import Identity, parse_account
from dmsg.rmb.twins.twin import Twin
from tests.ports import port_of
from tests.support import asynchronous

ALICE = Identity("//Alice").account
# This is twin 1 of the main net, which upstream's tests use, too.
FIRST = parse_account("5Eh2stFNQX4khuKoh2a1jQBVE91Lv3kyJiVP2Y5webontjRe")


def vector(data: bytes) -> bytes:
    size = len(data)
    return ((size << 2).to_bytes(1, "little") if size < 64 else (size << 2 | 1).to_bytes(2, "little")) + data


def encode_twin(number: int, account: bytes, relay: str | None, pk: bytes | None, entities: int = 0) -> bytes:
    """SCALE, as a node has it."""

    def option(data: bytes | None) -> bytes:
        return b"\0" if data is None else b"\1" + vector(data)

    proofs = b"".join(n.to_bytes(4, "little") + vector(b"s" * 64) for n in range(entities))
    text = None if relay is None else relay.encode()
    return number.to_bytes(4, "little") + account + option(text) + bytes([entities << 2]) + proofs + option(pk)


class LayoutTests(SynchronousTestCase):
    def test_storage_keys_equal_the_published_keys(self) -> None:
        """Keys that are known of every chain of the kind: System.Account of //Alice."""
        self.assertEqual("26aa394eea5630e07c48ae0c9558cef7", twox128("System").hex())
        self.assertEqual("b99d880ec681799c0cf30e8886371da9", twox128("Account").hex())
        self.assertEqual(
            "26aa394eea5630e07c48ae0c9558cef7b99d880ec681799c0cf30e8886371da9"
            "de1e86a9a8c739864cf3cc5ec2bea59f" + ALICE.hex(),
            storage_key("System", "Account", ALICE).hex(),
        )

    def test_twins_of_every_layout_decode(self) -> None:
        """Twins have a relay, key and entities, or not; shorter and longer data have another layout."""
        for twin in (
            Twin(1, FIRST),
            Twin(55, ALICE, "r1.example_r2.example", b"\2" * 33),
            Twin(2**32 - 1, ALICE, "x" * 1024),
        ):
            for entities in (0, 3):
                data = encode_twin(twin.id, twin.account, twin.relay, twin.pk, entities)
                self.assertEqual(twin, decode_twin(data))
                for wrong in (data[:-1], data + b"\0", data[:36] + b"\2" + data[37:]):
                    self.assertRaises(ScaleError, decode_twin, wrong)

    @given(st.binary(max_size=120))
    def test_random_bytes_are_a_twin_or_an_error(self, data: bytes) -> None:
        """A twin, or ScaleError."""
        try:
            decode_twin(data)
        except ScaleError:
            pass


class Node(Resource):
    """Answers state_getStorage."""

    isLeaf = True

    def __init__(self, storage: dict[bytes, bytes]) -> None:
        super().__init__()
        self.storage = storage
        self.answer: bytes | None = None

    def render_POST(self, request: Any) -> bytes:
        question = json.loads(request.content.read())
        if self.answer is not None:
            return self.answer
        assert question["method"] == "state_getStorage"
        found = self.storage.get(bytes.fromhex(question["params"][0][2:]))
        result = None if found is None else "0x" + found.hex()
        return json.dumps({"jsonrpc": "2.0", "id": question["id"], "result": result}).encode()


class NodeTests(TestCase):
    """twin::substrate: by number, by account, with a node that is none."""

    async def make(self) -> None:
        def twins(number: int) -> bytes:
            return storage_key("TfgridModule", "Twins", number.to_bytes(4, "little"))

        self.node = Node(
            {
                twins(1): encode_twin(1, FIRST, None, None),
                twins(2): encode_twin(2, ALICE, "relay.example", b"\2" * 33, 1),
                twins(4): encode_twin(5, ALICE, None, None),
                storage_key("TfgridModule", "TwinIdByAccountID", ALICE): (2).to_bytes(4, "little"),
            }
        )
        port = reactor.listenTCP(0, cast(Any, Site(self.node)), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        self.registry = open_registry(f"tfchain:ws://127.0.0.1:{port_of(port)}", reactor)
        self.addCleanup(self.registry.close)

    @asynchronous
    async def test_a_twin_is_read_by_number_and_account(self) -> None:
        """Twin 1 of upstream has this account, no relay and no key."""
        await self.make()
        self.assertEqual(Twin(1, FIRST), await self.registry.get(1))
        self.assertEqual("relay.example", (await self.registry.get(2)).relay)
        self.assertEqual(2, await self.registry.id_by_account(ALICE))
        self.assertEqual([1, 2], [twin.id for twin in await self.registry.twins(0, 10)])
        await self.assertFailure(self.registry.get(3), TwinNotFound)
        await self.assertFailure(self.registry.id_by_account(FIRST), TwinNotFound)
        await self.assertFailure(self.registry.get(4), RegistryUnavailable)
        await self.assertFailure(self.registry.put(Twin(1, FIRST)), RegistryRefused)

    @asynchronous
    async def test_an_unusable_node_is_registry_unavailable(self) -> None:
        """The error is one line; it does not say that the twin does not exist."""
        await self.make()
        for answer in (b"", b"{}", b"[]", b'{"result": 5}', b'{"result": "0xzz"}', b'{"result": "0x00"}', b"null"):
            self.node.answer = answer
            error = await self.assertFailure(self.registry.get(1), RegistryUnavailable)
            self.assertNotIn("\n", str(error))
        nowhere = open_registry("tfchain:ws://127.0.0.1:1", reactor)
        await self.assertFailure(nowhere.get(1), RegistryUnavailable)
