"""A client of 2019 and a client of today in a lab: their messages arrive, and differences are noticed."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.lab import Lab
from dmsg.testing.old_party import HEAD, SIZES, STALL_TIMEOUT, Conversation, OldParty
from dmsg.testing.promise import Pattern, PromiseBroken

SERVER = "server-1"
WITHIN = 60.0
"""Maximum seconds of the lab's time for a conversation of each kind without faults."""


class OldPartyTests(SynchronousTestCase):
    """Conversations over one server."""

    def start(self, *, is_old: bool = False, is_steady: bool = True) -> OldParty:
        self.lab = Lab(9)
        if is_old:
            self.lab.old_servers.add(SERVER)
        self.lab.add_server(SERVER)
        party = OldParty(self.lab, SERVER, 1, is_steady=is_steady)
        self.lab.settle()
        return party

    def finish_more(self, party: OldParty, seconds: float = WITHIN) -> None:
        """Wait until a further conversation of each kind has finished."""
        before = list(party.finished)
        self.lab.network.run_until(lambda: party.is_ahead_of(before), seconds)

    def test_both_begin_conversations_over_servers_of_both_kinds(self) -> None:
        for is_old in (False, True):
            with self.subTest(is_old=is_old):
                party = self.start(is_old=is_old)
                for _ in range(2 * len(SIZES)):
                    self.finish_more(party)
                party.check()

    def test_conversations_begin_again_after_faults(self) -> None:
        party = self.start(is_steady=False)
        self.finish_more(party)
        self.lab.kill(SERVER)
        self.lab.network.run(1)
        party.proceed()
        self.lab.add_server(SERVER)
        self.finish_more(party, 4 * STALL_TIMEOUT)
        for path in self.lab.network.both_ways(self.lab.network.host("old-c"), self.lab.network.host(SERVER)):
            path.cut_since = self.lab.clock.seconds()
        self.lab.network.run(1)
        party.proceed()
        self.lab.network.run(STALL_TIMEOUT)
        for path in self.lab.network.both_ways(self.lab.network.host("old-c"), self.lab.network.host(SERVER)):
            path.cut_since = None
        self.finish_more(party, 4 * STALL_TIMEOUT)

    def test_an_interruption_is_noticed_at_a_steady_server(self) -> None:
        party = self.start()
        self.finish_more(party)
        ours = party._ours
        assert ours is not None
        self.lab.network.run_until(lambda: ours.is_open)
        ours.returned = 0
        ours.is_lost = True
        self.assertRaisesRegex(PromiseBroken, "has ended", party.check)

    def test_a_number_that_nobody_sent_is_noticed(self) -> None:
        self.assertRaisesRegex(PromiseBroken, "at the beginning", self.start().find, 5)


class ConversationTests(SynchronousTestCase):
    """Differences that a conversation notices."""

    def setUp(self) -> None:
        self.conversation = Conversation(3, 100, 0.0)
        self.data = self.conversation.data()[HEAD:]

    def test_wrong_bytes(self) -> None:
        self.assertEqual(self.data, Pattern(3).take(100))
        self.conversation.arrive(self.data[:50], 1.0)
        self.assertRaisesRegex(PromiseBroken, "arrived .* byte 50", self.conversation.arrive, b"x" * 10, 1.0)
        self.conversation.come_back(self.data[:20], 1.0)
        self.assertRaisesRegex(PromiseBroken, "came back .* byte 20", self.conversation.come_back, b"x" * 10, 1.0)

    def test_bytes_that_never_arrived(self) -> None:
        conversation = self.conversation
        conversation.arrive(self.data[:50], 1.0)
        conversation.acknowledged = HEAD + 50
        conversation.check()
        conversation.acknowledged += 1
        self.assertRaisesRegex(PromiseBroken, "51 were acknowledged", conversation.check)
        conversation.acknowledged = 0
        conversation.returned = 51
        self.assertRaisesRegex(PromiseBroken, "51 came back", conversation.check)
