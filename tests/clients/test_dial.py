"""Lasting connections to servers."""

from __future__ import annotations

from random import Random
from typing import Any, cast

from twisted.internet.defer import Deferred, fail
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.dial import ServerLink
from dmsg.keys import SecKey


class _Unreachable:
    @staticmethod
    def open() -> Deferred[Any]:
        return fail(ConnectionRefusedError("refused"))


class ServerLinkTests(SynchronousTestCase):
    def test_the_log_names_the_server(self) -> None:
        clock, server = Clock(), SecKey.generate().public
        link: ServerLink[Any] = ServerLink(
            clock, server, _Unreachable(), Random(1), on_change=lambda _: None, on_lost=lambda _, __: None
        )
        events: list[LogEvent] = []
        observer = cast(ILogObserver, events.append)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        link.start()
        self.addCleanup(link.stop)
        said = [formatEvent(event) for event in events]
        self.assertIn(f"Scheduling retry 1 to connect server {server.short} in", "\n".join(said))
