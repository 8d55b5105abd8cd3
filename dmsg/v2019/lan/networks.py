"""Set of objects, one for each address of this machine, which are started and stopped as networks come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall

from dmsg.net.isolate import call_isolated
from dmsg.net.mdns.interfaces import Interface

CHECK_INTERVAL = 5.0
"""Seconds between checks of this machine's addresses. The user may join a network while a command runs."""


class OnInterface(Protocol):
    """Interface (protocol class) of an object that has sockets on one address of this machine."""

    def stop(self) -> Deferred[None]:
        """Close the sockets."""


class Networks:
    """Set of objects, one for each address of this machine. Objects are started and stopped as networks come and go.

    :param open_on: starts an object on one address.
    :param on_warning: called with a sentence if no object can be started on an address, once for each reason.
    :ivar failed: reason for each address on which no object could be started.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        list_interfaces: Callable[[], list[Interface]],
        open_on: Callable[[Interface], OnInterface],
        on_warning: Callable[[str], object],
    ) -> None:
        self._list_interfaces = list_interfaces
        self._open_on = open_on
        self._on_warning = on_warning
        self._running: dict[Interface, OnInterface] = {}
        self._stopping: list[Deferred[None]] = []
        self.failed: dict[str, str] = {}
        self._looking = LoopingCall(lambda: call_isolated(self._look))
        self._looking.clock = reactor
        self._looking.start(CHECK_INTERVAL, now=True).addErrback(lambda _: None)

    @property
    def interfaces(self) -> list[Interface]:
        """Addresses of this machine on which one of the objects runs now."""
        return list(self._running)

    def _look(self) -> None:
        try:
            present = self._list_interfaces()
        except OSError as error:
            self._note_failure("this machine", str(error))
            return
        for gone in [one for one in self._running if one not in present]:
            self._stopping.append(self._running.pop(gone).stop())
        for new in present:
            if new not in self._running:
                self._start(new)

    def _start(self, interface: Interface) -> None:
        try:
            self._running[interface] = self._open_on(interface)
            self.failed.pop(interface.host, None)
        except Exception as error:
            # Exception is caught, because the errors of listening in Twisted and those of sockets have no common base
            # class.
            self._note_failure(interface.host, str(error))

    def _note_failure(self, where: str, why: str) -> None:
        if self.failed.get(where) != why:
            self.failed[where] = why
            self._on_warning(f"codes cannot be exchanged on the network at {where}: {why}")

    def stop(self) -> Deferred[None]:
        """Stop all objects. The Deferred fires when all sockets are closed."""
        if self._looking.running:
            self._looking.stop()
        running, self._running = self._running, {}
        self._stopping += [one.stop() for one in running.values()]
        stopping, self._stopping = self._stopping, []
        return DeferredList(stopping, consumeErrors=True).addCallback(lambda _: None)
