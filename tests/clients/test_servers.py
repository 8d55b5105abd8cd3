"""A server that leaves names others: which of them are believed, when, and for how long."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.candidates import AVOID_FOR, HINTS_FOR, MAX_HINTS
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.servers import ServerSet, ServerUses
from dmsg.clients.session import Session as ClientSession
from dmsg.discovery.entries.entry import VERSION, Entry, ServerMeta
from dmsg.discovery.lookup.server_list import ServerList
from dmsg.keys import PubKey, SecKey
from dmsg.v2019.core.events import Draining
from tests.v2019.secure_support import SecureCase

KEYS = [SecKey.from_seed(b"server %d" % number) for number in range(20)]


class Servers:
    """Every server has an entry; those of ``listed`` are in the list."""

    def __init__(self, listed: list[SecKey]) -> None:
        self._entries = {
            key.public: Entry(VERSION, 0, 1, key.public.hex(), server=ServerMeta("127.0.0.1:9", 5)).sign(key)
            for key in KEYS
        }
        self._listed = listed
        self.asked: list[PubKey] = []

    def entry(self, key: PubKey) -> Deferred[Any]:
        self.asked.append(key)
        return succeed(self._entries[key])

    def available_servers(self) -> Deferred[Any]:
        return succeed(ServerList(self._entries[key.public] for key in self._listed))


class Session:
    """Session with a server, as a client uses it."""

    leaving = False
    connected = True
    why_lost = ""
    refused_extension = False
    is_doubtful = False
    was_reached = True
    unreachable = ""
    round_trip: float | None = None
    transports = 0
    streams: tuple[Any, ...] = ()

    def __init__(self, server: PubKey) -> None:
        self.server = server
        self.lost: Deferred[None] = Deferred()
        self.keeper: Any = None

    def check_reachability(self) -> None:
        """Do nothing: the server sends all requests."""

    def close(self) -> None:
        self.connected = False
        if not self.lost.called:
            self.lost.callback(None)


class HintTests(SynchronousTestCase):
    """Servers that a DRAIN frame names."""

    def set_up(self, *, only: list[PubKey] | None = None) -> None:
        self.clock = Clock()
        self.lookups = Servers([KEYS[0]])
        self.sessions: dict[PubKey, Session] = {}

        def opener(entry: Entry) -> Any:
            class Opening:
                def open(_) -> Deferred[Any]:
                    session = self.sessions[entry.key] = Session(entry.key)
                    return succeed(session)

            return Opening()

        lookups: Any = self.lookups
        choice = ServerChoice(min_servers=1, only=only or [])
        self.set = ServerSet(self.clock, lookups, Random(0), choice, ServerUses(opener=opener))
        self.set.start()
        self.clock.pump([0, 0.1, 0.1])
        self.addCleanup(self.set.stop)

    def leave(self, server: PubKey, others: list[SecKey]) -> None:
        session = self.sessions[server]
        session.keeper.server_leaves(session, 8, [one.public for one in others])

    def test_a_hint_of_a_connected_server_is_ignored(self) -> None:
        self.set_up()
        self.assertEqual(list(self.set.links), [KEYS[0].public])
        self.leave(KEYS[0].public, KEYS[1:])
        self.sessions[KEYS[0].public].leaving = True
        self.clock.pump([0, 0.1, 0.1])
        self.assertEqual(self.lookups.asked, [one.public for one in KEYS[1 : 1 + MAX_HINTS]])
        self.assertTrue(any(one.public in self.set.links for one in KEYS[1:]))
        # After a time, the hint no longer counts.
        self.lookups.asked.clear()
        self.clock.advance(HINTS_FOR)
        for link in list(self.set.links.values()):
            link.leaving = True
        self.set.search_soon(0)
        self.clock.pump([0, 0.1])
        self.assertEqual(self.lookups.asked, [])

    def test_a_server_outside_only_is_never_used(self) -> None:
        self.set_up(only=[KEYS[0].public])
        self.lookups.asked.clear()
        self.leave(KEYS[0].public, KEYS[1:])
        self.clock.pump([0] + [1] * 30)
        self.assertEqual(set(self.lookups.asked) - {KEYS[0].public}, set())
        self.assertEqual(set(self.set.links) - {KEYS[0].public}, set())

    def test_of_a_visit(self) -> None:
        self.set_up()
        self.successResultOf(self.set.session(KEYS[5].public))
        self.lookups.asked.clear()
        self.leave(KEYS[5].public, KEYS[10:])
        self.clock.pump([0, 0.1, 0.1])
        self.assertEqual(self.lookups.asked, [])

    def test_servers_that_have_worked_are_tried_first(self) -> None:
        """Discovery lists nothing but others from now on: a client that loses its server tries that one again too."""
        self.set_up()
        mine = KEYS[0].public
        self.assertEqual(list(self.set.links), [mine])
        self.lookups._listed = KEYS[1:]
        self.set.links[mine].leaving = True
        self.set.search_soon(0)
        self.clock.pump([0, 0.1, 0.1])
        self.assertNotIn(mine, self.set.links)
        other = next(iter(self.set.links))
        self.clock.advance(AVOID_FOR)
        self.set.links[other].leaving = True
        self.set.search_soon(0)
        found = self.successResultOf(Deferred.fromCoroutine(self.set._candidates.find()))
        self.assertEqual([entry.key for entry in found][:2], [other, mine])
        self.clock.pump([0, 0.1, 0.1])
        self.assertIn(mine, self.set.links)

    def test_full_servers_are_tried_last(self) -> None:
        self.set_up()
        full = Entry(VERSION, 1, 2, KEYS[0].public.hex(), server=ServerMeta("127.0.0.1:9", 0)).sign(KEYS[0])
        self.lookups._entries[KEYS[0].public] = full
        self.lookups._listed = KEYS[:3]
        found = self.successResultOf(Deferred.fromCoroutine(self.set._candidates.find()))
        self.assertEqual(found[-1], full)


class Keeper:
    """Notes in how many seconds servers leave."""

    def __init__(self, told: list[int]) -> None:
        self._told = told

    def server_leaves(self, session: ClientSession, seconds: int, servers: list[PubKey]) -> None:
        self._told.append(seconds)

    def key_shared(self, address: str) -> None:
        """Accept the call; no test checks it."""

    def reachability_changed(self, session: ClientSession) -> None:
        """Accept the call; no test checks it."""


class OnceTests(SecureCase):
    """A server may say once that it leaves."""

    def test_a_server_that_leaves_again_and_again_is_left_once(self) -> None:
        told: list[int] = []
        self.b.keeper = Keeper(told)
        for seconds in (8, 7, 6):
            self.b._on_draining(Draining(seconds, []))
        self.assertEqual(told, [8])
