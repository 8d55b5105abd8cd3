"""Servers that lie: each lie is one, and the measure of what bystanders feel of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason
from dmsg.testing.bystanders import HARBOUR, Bystanders, check_blame
from dmsg.testing.lab import Lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.plan import LIES, Lie, Step, draw
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.stream_places import parties_of
from dmsg.testing.walk import Walk, follow, walk
from dmsg.testing.walk_coverage import NO_PARTY
from dmsg.testing.walk_kinds import draw_plan
from dmsg.v2019.core.wire import CLOSE, FWD, PONG, REQUEST, Frame, FrameBuffer
from tests.mutation.by_hand import INVISIBLE, MUTANTS
from tests.mutation.by_walks import changed
from tests.mutation.mutants import ROOT
from tests.support import Accepting

SEED = 200
"""Seed of the walk with lies of an ordinary run; ``make long WHICH=lab`` takes others for minutes."""
REPORTED = 201
"""Seed of a walk with lies in its first 20 seconds."""


class LieTests(SynchronousTestCase):
    """Lies of one server to two clients with a stream."""

    def setUp(self) -> None:
        self.lab = Lab(4)
        self.server = self.lab.add_server("server-1")
        self.alice, self.bob = (self.lab.add_client(name, min_servers=1) for name in ("alice", "bob"))
        self.lab.settle()
        self.liar = Liar(self.lab.network.host("server-1"), self.server, Alliance(), KINDS)
        self.accepting = Accepting()
        self.bob.listen(self.accepting, 7)
        self.stream = self.lab.result(self.alice.connect(self.bob.public_key, Accepting(), port=7)).transport
        self.lab.result(self.stream.send(b"before"))
        self.lab.result(self.alice.connect(self.bob.public_key, Accepting(), port=7))
        self.lab.network.run(0.1)

    def test_every_lie_changes_what_some_client_gets(self) -> None:
        sent: list[tuple[bytes, Frame]] = []
        for peer in self.liar.peers:
            frames = FrameBuffer()
            port: Any = self.liar.port_of(peer).port

            def note(data: bytes, frames: FrameBuffer = frames, key: bytes = bytes(peer.key)) -> None:
                sent.extend((key, frame) for frame in frames.feed(data))

            self.patch(port, "send", note)
        peer = next(peer for peer in self.liar.peers if peer.key == self.bob.public_key)
        port = self.liar.port_of(peer)
        own_id = next(iter(peer.routes))
        self.liar.alliance.seen[CLOSE].append(b"\x0bold")
        payload = bytes(self.alice.public_key) + bytes(self.bob.public_key) + bytes(200)
        for number, (kind, (types, _)) in enumerate(KINDS.items()):
            with self.subTest(kind):
                frame = Frame(min(types), own_id, payload + bytes((number,)))
                sent.clear()
                self.liar.tell((Lie(kind, 0, 1),))
                following = Frame(PONG, 0, b"")
                port.send(frame.encode() + following.encode())
                self.assertNotEqual(sent, [(bytes(peer.key), frame), (bytes(peer.key), following)])
                self.assertEqual(self.liar.alliance.told[kind], 1)
                port.to_drop.clear()
                port.held.clear()
                port.swapped.clear()
                port.postponed.clear()

    def test_a_lie_is_told_after_some_frames_and_again_after_others(self) -> None:
        self.liar.tell((Lie("repeat", 2, 1), Lie("no such peer", 0, 1), Lie("cut", 1, 1, again=2)))
        frame = Frame(FWD, 9, b"x")
        told = []
        for _ in range(9):
            one = self.liar.due(frame)
            told.append("" if one is None else one.lie.kind)
        self.assertEqual(told, ["", "cut", "repeat", "", "cut", "", "", "cut", ""])
        asked = self.liar.due(Frame(REQUEST, 9, b""))
        assert asked is not None
        self.assertEqual(asked.lie.kind, "no such peer")

    def test_what_was_held_is_sent_when_the_server_is_honest_again(self) -> None:
        self.liar.tell((Lie("hold", 0, 1),))
        sending = self.stream.send(b" and after")
        self.lab.network.run(0.01)
        self.assertNoResult(sending)
        self.liar.stop_lying()
        self.lab.result(sending)
        self.assertEqual(self.accepting.built[0].data, b"before and after")

    def test_a_cut_frame_ends_the_transport_and_the_stream_goes_on(self) -> None:
        """The frame after it proves that one is missing; the data are sent again."""
        for number in range(5):
            self.liar.tell((Lie("cut", 0, number),))
            self.lab.result(self.stream.send(b"x" * 1000))
        self.assertEqual(self.accepting.built[0].data, b"before" + b"x" * 5000)
        self.assertGreater(self.alice.streams.resumed, 0)


class MeasureTests(SynchronousTestCase):
    """Bystanders."""

    def setUp(self) -> None:
        self.lab = Lab(5)
        self.bystanders = Bystanders(self.lab)
        self.lab.settle()
        self.bystanders.start()
        self.bystanders.check()

    def test_slowed_more_than_three_times(self) -> None:
        path = self.lab.network.path(self.lab.network.host("carol"), self.lab.network.host(HARBOUR))
        path.delay *= 2
        self.bystanders.say()
        self.lab.network.run(1)
        self.bystanders.check()
        path.delay *= 10
        self.bystanders.say()
        self.lab.network.run(1)
        self.assertRaisesRegex(PromiseBroken, r"takes 0\.\d+ s instead of 0\.04", self.bystanders.check)

    def test_waiting_counts_and_a_clock_that_jumps_does_not(self) -> None:
        self.bystanders.say()
        self.bystanders.forgive()
        self.lab.clock.advance(60)
        self.lab.network.run(1)
        self.bystanders.check()
        self.lab.network.host(HARBOUR).pause()
        self.bystanders.say()
        self.lab.network.run(1)
        self.assertRaisesRegex(PromiseBroken, "a piece that the bystanders exchange takes", self.bystanders.check)

    def test_a_cut_connection(self) -> None:
        self.lab.network.host("dave").reset()
        self.lab.network.run(5)
        self.assertRaisesRegex(PromiseBroken, "a connection of the bystanders was cut", self.bystanders.check)

    def test_blame(self) -> None:
        servers = self.lab.servers
        check_blame(servers.items())
        servers[HARBOUR].factory.relay.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        check_blame(servers.items())
        servers[HARBOUR].factory.relay.drops[DropReason.FLOOD] += 1
        self.assertRaisesRegex(
            PromiseBroken, r"honest harbour has charged a fault .*'flood': 1", check_blame, servers.items()
        )


class WalkTests(SynchronousTestCase):
    """Walks with lies, and their plans."""

    def test_a_walk_with_lies(self) -> None:
        """Programs of 2019 take part in it. The walk counts each lie, and each fault that happens beside streams."""
        counted: set[str] = set()
        original = Walk._make

        def recorded(walk: Walk, step: Step) -> Sequence[str]:
            has_streams = bool(walk._places())
            hosts = original(walk, step)
            if has_streams and step.fault != LIES and (hosts or NO_PARTY in parties_of(step.fault)):
                counted.add(step.fault)
            return hosts

        self.patch(Walk, "_make", recorded)
        plan = draw_plan(SEED, lies=True)
        done = follow(replace(plan, shape=replace(plan.shape, old=True)))
        self.assertGreater(done.lies.total(), 10)
        assert done.old_programs is not None and done.old_party is not None
        self.assertGreater(min(done.old_programs.finished, *done.old_party.finished), 0)
        happened = done.coverage.kinds
        self.assertGreater(len(counted), 5)
        self.assertLessEqual(counted, happened)
        self.assertTrue(any(kind.startswith("lie: ") for kind in happened), happened)

    def test_the_report_of_a_walk_says_which_lies_were_told(self) -> None:
        def failing(bystanders: Bystanders) -> None:
            if bystanders._lab.clock.seconds() > 20:
                raise PromiseBroken("as told")

        self.patch(Bystanders, "check", failing)
        error = self.assertRaises(PromiseBroken, walk, REPORTED, lies=True)
        self.assertRegex(str(error), r"^seed 201: as told; faults: .*lies.*; lies: .*[a-zA-Z] \d+.*; the last events:")

    def test_every_mutant_for_walks_fits_the_code(self) -> None:
        """Otherwise the long test of them would stop at it."""
        self.assertLessEqual(set(INVISIBLE), set(MUTANTS))
        for name, (module, changes) in MUTANTS.items():
            with self.subTest(name):
                source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
                mutant = changed(source, changes)
                self.assertNotEqual(source, mutant)
                compile(mutant, name, "exec")

    def test_a_plan_follows_from_its_seed(self) -> None:
        one, again, other = (draw(seed, 30, ("reset",), list(KINDS)) for seed in (1, 1, 2))
        self.assertEqual(one, again)
        self.assertNotEqual(one.steps, other.steps)
        self.assertTrue(one.lies and one.lying)
        self.assertEqual(draw(1, 30, ("reset",)).lies, [])
