"""Clients of the library agree on a cipher, over servers that are lost."""

from __future__ import annotations

from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.wire import Echo
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.cipher_names import Cipher
from dmsg.streams.carrier import ClientStream
from dmsg.testing import Lab
from dmsg.v2019.client import Client

AES, CHACHA = Cipher.AES_256_GCM.value, Cipher.CHACHA20_POLY1305.value


class Answers(Protocol):
    """Collects what comes back."""

    data = b""

    def dataReceived(self, data: bytes) -> None:
        self.data += data


class CipherTests(SynchronousTestCase):
    def opened(self, mine: str, theirs: str) -> tuple[Lab, Answers, ClientStream]:
        """Return a stream from a client to another one that echoes, each with the cipher that it prefers."""
        lab = Lab(seed=1)
        lab.add_servers(2)
        alice, bob = lab.add_client("alice", cipher=mine), lab.add_client("bob", cipher=theirs)
        lab.settle()
        bob.listen(Factory.forProtocol(Echo), 7)
        answers = lab.result(alice.connect(bob.public_key, Factory.forProtocol(Answers), 7))
        assert isinstance(answers, Answers)
        stream = answers.transport
        assert isinstance(stream, ClientStream)
        return lab, answers, stream

    def test_both_prefer_aes(self) -> None:
        lab, answers, stream = self.opened(AES, AES)
        lab.result(stream.send(b"x" * 100_000))
        lab.network.run_until(lambda: len(answers.data) == 100_000)
        self.assertEqual(stream.cipher, AES)

    def test_one_that_prefers_chacha_decides(self) -> None:
        for mine, theirs in ((AES, CHACHA), (CHACHA, AES), (CHACHA, CHACHA)):
            lab, _, stream = self.opened(mine, theirs)
            lab.result(stream.send(b"hello"))
            self.assertEqual(stream.cipher, CHACHA)

    def test_the_stream_keeps_its_cipher_when_its_server_is_lost(self) -> None:
        lab, answers, stream = self.opened(AES, AES)
        lab.result(stream.send(b"before"))
        assert stream.server is not None
        lost = next(name for name in lab.servers if lab.key(name).public == stream.server)
        lab.kill(lost)
        lab.result(stream.send(b", after"))
        lab.network.run_until(lambda: answers.data == b"before, after")
        self.assertEqual(stream.cipher, AES)

    def test_a_client_refuses_an_unknown_cipher(self) -> None:
        lab = Lab(seed=1)
        self.assertRaises(ValueError, lab.add_client, "alice", cipher="rot13")

    def test_a_client_measures_by_default(self) -> None:
        lab = Lab(seed=1)
        host = lab.network.host("alice")
        client = Client(host.reactor, lab.key("alice"), lab.lookups(host))
        self.assertIsInstance(client.streams.prefers_aes, bool)
