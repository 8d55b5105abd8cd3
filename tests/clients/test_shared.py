"""Clients that endpoint strings share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.shared import SharedClients
from dmsg.filelock import LOCK_SUFFIX

URL = "http://127.0.0.1:9"


class _Client:
    """Client that counts how often it is stopped."""

    stopped = 0

    def startService(self) -> None:
        pass

    def stopService(self) -> Deferred[None]:
        self.stopped += 1
        return succeed(None)


class _Reactor:
    """Reactor with the triggers of its shutdown."""

    def __init__(self) -> None:
        self.triggers: list[Any] = []

    def addSystemEventTrigger(self, phase: str, event: str, call: Any) -> Any:
        self.triggers.append(call)
        return call

    def removeSystemEventTrigger(self, trigger: Any) -> None:
        self.triggers.remove(trigger)


class SharedClientsTests(SynchronousTestCase):
    """The table of the clients of a family."""

    def setUp(self) -> None:
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.shared.stop())))
        self.reactor: Any = _Reactor()
        self.key = str(Path(self.mktemp()).absolute())
        self.made: list[_Client] = []
        self.shared: SharedClients[Any] = SharedClients("dmsg", self.make)
        self.failure: Exception | None = None

    def make(self, *arguments: Any) -> _Client:
        if self.failure is not None:
            raise self.failure
        self.made.append(_Client())
        return self.made[-1]

    def get(self) -> Any:
        return self.shared.get(self.reactor, URL, self.key)

    @property
    def is_locked(self) -> bool:
        """Whether the key is locked; its lock file is removed with the lock."""
        return Path(self.key + LOCK_SUFFIX).exists()

    def test_a_client_is_shared_until_it_is_stopped(self) -> None:
        one = self.get()
        self.assertIs(self.get(), one)
        self.successResultOf(Deferred.fromCoroutine(self.shared.stop()))
        self.assertEqual((one.stopped, self.reactor.triggers), (1, []))
        self.assertFalse(self.is_locked)
        self.assertIsNot(self.get(), one)

    def test_the_shutdown_of_the_reactor_stops_a_client(self) -> None:
        one = self.get()
        for trigger in list(self.reactor.triggers):
            trigger()
        self.assertEqual((one.stopped, self.is_locked), (1, False))
        self.successResultOf(Deferred.fromCoroutine(self.shared.stop()))
        self.assertEqual(one.stopped, 1)

    def test_a_client_that_cannot_be_made_leaves_its_key_unlocked(self) -> None:
        self.failure = ValueError("such settings are not possible")
        self.assertRaises(ValueError, self.get)
        self.assertFalse(self.is_locked)
        self.failure = None
        self.get()
        self.assertTrue(self.is_locked)
