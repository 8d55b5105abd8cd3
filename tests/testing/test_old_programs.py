"""Programs of 2019 in a lab: they do what was recorded, and notice what differs from it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.bystanders import BLAMING_REASONS
from dmsg.testing.lab import Lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.old_exchanges import EXCHANGES, RUDE_EXCHANGES
from dmsg.testing.old_programs import EXCHANGE_TIMEOUT, KEYS as OLD_KEYS, OldPair, recorded
from dmsg.testing.plan import Lie
from dmsg.testing.promise import PromiseBroken
from dmsg.v2019.core.wire import Frame
from tests.support import KEYS, Accepting, vectors


def recorded_frames(scenario: dict[str, Any], client: str) -> Iterator[tuple[bool, Frame]]:
    """Yield the frames that a client sends or receives in the recording of a scenario."""
    for event in scenario["events"]:
        source, target = event["hop"].split("->")
        if client in (source, target):
            for one in event.get("frames") or []:
                yield source == client, Frame(one["type"], one["id"], bytes.fromhex(one["payload"]))


class ExchangeTests(SynchronousTestCase):
    """The exchanges of the lab, and two clients that repeat them."""

    def setUp(self) -> None:
        self.lab = Lab(9)

    def test_exchanges_are_the_recorded_ones(self) -> None:
        self.assertEqual([OLD_KEYS[name].public for name in "AB"], [KEYS[name].public for name in "AB"])
        scenarios = {one["name"]: one for name in ("sessions", "server_rules") for one in vectors(name)["scenarios"]}
        for name, text in EXCHANGES.items():
            for client in OLD_KEYS:
                with self.subTest(name, client=client):
                    found = [(one.is_sent, one.frame) for one in recorded(text, client)]
                    self.assertEqual(found, list(recorded_frames(scenarios[name], client)))
        self.assertGreater(sum(len(text.splitlines()) for text in EXCHANGES.values()), 90)

    def exchange(self, name: str, *, is_steady: bool = True) -> OldPair:
        """Let the clients do one exchange over a running server, and check that no further frame arrives."""
        pair = OldPair(self.lab, "server-1", 1, is_steady=is_steady)
        self.patch(Random, "choice", lambda random, names: name if name in names else names[0])
        pair.proceed()
        self.lab.network.run(3)
        return pair

    def test_every_exchange_over_a_server_of_today_and_of_2019(self) -> None:
        for is_old in (False, True):
            for name in EXCHANGES:
                with self.subTest(name, is_old=is_old):
                    self.lab = Lab(9)
                    self.lab.old_servers = {"server-1"} if is_old else set()
                    self.lab.add_server("server-1")
                    pair = self.exchange(name, is_steady=name not in RUDE_EXCHANGES)
                    pair.proceed()
                    self.assertEqual((pair.finished, pair.interrupted), (1, 0))

    def test_a_server_blames_the_clients_only_in_rude_exchanges(self) -> None:
        for name in EXCHANGES:
            with self.subTest(name):
                self.lab = Lab(9)
                server = self.lab.add_server("server-1")
                self.exchange(name, is_steady=False).proceed()
                self.assertEqual(BLAMING_REASONS.isdisjoint(server.factory.relay.drops), name not in RUDE_EXCHANGES)

    def test_a_frame_that_was_not_recorded_breaks_the_promise(self) -> None:
        for kind in ("flip", "repeat"):
            with self.subTest(kind):
                self.lab = Lab(9)
                server = self.lab.add_server("server-1")
                liar = Liar(self.lab.network.host("server-1"), server, Alliance(), KINDS)
                liar.tell((Lie(kind, 12, 3),))
                pair = self.exchange("session_basic", is_steady=False)
                self.assertRaisesRegex(PromiseBroken, "was received in place of", pair.check)

    def test_an_exchange_begins_again_after_an_interruption(self) -> None:
        self.patch(Random, "choice", lambda random, names: names[0])
        for cut in ("kill", "pause"):
            with self.subTest(cut):
                self.lab = Lab(9)
                self.lab.add_server("server-1")
                host = self.lab.network.host("server-1")
                pair = OldPair(self.lab, "server-1", 1, is_steady=False)
                pair.proceed()
                self.lab.network.run(0.5)
                if cut == "kill":
                    self.lab.kill("server-1")
                    self.lab.add_server("server-1")
                    self.lab.network.run(0.1)  # The clients learn of it.
                else:
                    host.pause()
                    self.lab.network.run(EXCHANGE_TIMEOUT + 10)
                pair.proceed()
                self.assertEqual((pair.finished, pair.interrupted), (0, 1))
                host.resume()
                self.lab.network.run_until(lambda pair=pair: pair.is_ahead_of(0), 30)  # type: ignore[misc]

    def test_an_old_program_that_was_left_sends_nothing_more(self) -> None:
        """It was left before it was connected to the server."""
        self.lab.add_server("server-1")
        pair = OldPair(self.lab, "server-1", 1, is_steady=False)
        pair._begin("session_basic")
        left = list(pair._clients)
        pair._begin("session_basic")
        self.lab.network.run(3)
        pair.proceed()
        self.assertEqual((pair.finished, [client.closed for client in left]), (1, [True] * len(left)))

    def test_a_steady_server_must_not_interrupt_an_exchange(self) -> None:
        pair = OldPair(self.lab, "server-1", 1, is_steady=True)
        pair.proceed()
        self.lab.network.run(3)
        self.assertRaisesRegex(PromiseBroken, "was interrupted", pair.proceed)


class OldServerTests(SynchronousTestCase):
    """Servers with the rules of 2019 in a lab."""

    def test_an_old_server_is_old_again_after_a_kill(self) -> None:
        lab = Lab(10)
        lab.old_servers.add("server-1")
        for _ in range(2):
            server: Any = lab.add_server("server-1")
            alice, bob = (lab.add_client(name, min_servers=1) for name in ("alice", "bob"))
            lab.settle()
            entry = lab.result(alice.entry(lab.key("server-1").public))
            self.assertEqual(entry.version, "0.0.1")
            bob.listen(Accepting(), 7)
            self.assertTrue(lab.result(alice.connect(bob.public_key, Accepting(), 7)).transport.secure)
            self.assertEqual(server.factory.relay.pings, 0)
            for name in ("alice", "bob", "server-1"):
                lab.kill(name)
                lab.network.host(name).revive()
