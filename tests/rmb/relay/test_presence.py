"""Sessions of a relay that are connected, make place for others, or are awaited, by plain calls."""

from __future__ import annotations

from dmsg.rmb.relay import presence
from dmsg.rmb.relay.sessions import RelaySession
from dmsg.rmb.twins.address import Session
from tests.rmb.relay.test_switch import NOBODY, A, B, SwitchCase


class PlaceTests(SwitchCase):
    """A full relay ends a session of the twin that has most, for a twin that has fewer."""

    def setUp(self) -> None:
        super().setUp()
        self.presence = self.switch.presence

    def connect_many(self, twin: int, number: int) -> list[RelaySession]:
        return [self.connect(twin, f"{twin}-{one}")[0] for one in range(number)]

    def test_place_is_made_for_a_twin_that_would_still_have_fewer(self) -> None:
        """The new session may not make its twin the one with most sessions: two twins would end each other's."""
        self.connect_many(A, 7)
        for own, makes_place in ((4, True), (5, True), (6, False), (7, False)):
            self.connect_many(B, own)
            self.assertIs(self.presence.can_make_place(B), makes_place, own)
            self.assertIs(self.presence.make_place(B) is not None, makes_place, own)

    def test_an_empty_relay_evicts_no_session(self) -> None:
        self.assertIsNone(self.presence.make_place(B))

    def test_few_sessions_are_never_ended_for_others(self) -> None:
        self.connect_many(A, presence.FEW_SESSIONS)
        self.assertIsNone(self.presence.make_place(B))

    def test_the_newest_idle_session_is_ended(self) -> None:
        """A session that reconnected counts as new."""
        sessions = self.connect_many(A, presence.FEW_SESSIONS + 1)
        self.assertIs(self.presence.make_place(B), sessions[-1])
        again, _ = self.connect(A, sessions[0].session.sid)
        self.assertIs(self.presence.make_place(B), again)
        for busy in (again, *sessions[1:]):
            busy.unfinished = 1
        self.assertIsNone(self.presence.make_place(B))
        sessions[2].unfinished = 0
        self.assertIs(self.presence.make_place(B), sessions[2])

    def test_the_twin_with_most_sessions_gives_one(self) -> None:
        self.connect_many(A, 5)
        many = self.connect_many(B, 6)
        self.assertIs(self.presence.make_place(NOBODY), many[-1])
        for one in many:
            one.lost("gone")
        self.assertEqual(self.presence.of_twin, {A: 5})
        found = self.presence.make_place(NOBODY)
        self.assertEqual(found and found.owner, A)


class RemoveTests(SwitchCase):
    def test_the_queue_hears_of_the_last_connection_of_a_session_only(self) -> None:
        """Other processes on the same queue may deliver to an absent session; a replaced connection is not absent."""
        absent: list[str] = []
        self.patch(self.queue, "note_absent", absent.append)
        old, _ = self.connect(A, "s")
        new, _ = self.connect(A, "s")
        old.lost("gone")
        self.assertEqual((absent, self.switch.sessions), ([], {Session(A, "s"): new}))
        new.lost("gone")
        self.assertEqual((absent, self.switch.sessions), ([str(Session(A, "s"))], {}))


class StopTests(SwitchCase):
    def test_a_stopping_relay_fails_waiting_presence_checks(self) -> None:
        """Whoever waits for a session learns that the session does not come."""
        here = self.switch.presence
        here._started = self.clock.seconds()
        waiting = [here.wait_for_session(Session(twin)) for twin in (A, A, B)]
        waiting[0].cancel()
        waiting[0].addErrback(lambda _: None)
        here.stop()
        self.assertEqual([self.successResultOf(one) for one in waiting[1:]], [False, False])
        here.stop()
