"""Rude programs of a walk of agents. They use the agent's socket in wrong ways, and must not harm other programs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol

from dmsg.agent.programs import ProgramConnection
from dmsg.agent.wire import HEADER, MAX_PAYLOAD, WINDOW, Kind, Reader, encode_frame, encode_line, parse_line
from dmsg.keys import PubKey
from dmsg.net.socket_endpoints import UNIXEndpoint
from dmsg.testing.agent_machines import Machine
from dmsg.testing.unix_sockets import Process

SINK = 99
"""Port of a peer that reads everything, and answers nothing."""
SILENT_CONNECTIONS = 20
"""Number of connections that a silent program opens."""
GARBAGE, SILENCE, FLOOD, BAD_FRAMES, OTHERS_PORT, LEAVE = RUDE = (
    *("garbage", "silence", "flood", "bad frames", "port of another", "leave"),
)
"""Kinds of wrong use of the agent's socket."""


class _Rude(Protocol):
    """Connection of a rude program to an agent.

    :param first: bytes that it sends first.
    :param second: bytes that it sends after the agent's answer.
    :param answered: function that is called with the agent's answer.
    """

    def __init__(
        self, first: bytes, second: bytes = b"", answered: Callable[[dict[str, object]], object] = lambda answer: None
    ) -> None:
        self._first = first
        self._second = second
        self._answered = answered
        self._reader = Reader()
        self._has_answer = False

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._first)

    def dataReceived(self, data: bytes) -> None:
        if self._has_answer:
            return
        self._reader.feed(data)
        line = self._reader.next_line()
        if line is not None and self.transport is not None:
            self._has_answer = True
            self._answered(parse_line(line))
            self.transport.write(self._second)


class RudeProgram:
    """Program that uses the agent of its machine in wrong ways.

    :param peer: key of a peer that has the port :data:`SINK`.
    :param broken: function that is called with the text of a broken guarantee.
    """

    def __init__(self, machine: Machine, peer: PubKey, broken: Callable[[str], object]) -> None:
        self._machine = machine
        self._peer = peer
        self._broken = broken
        self._host = Process(machine.lab.network, f"rude program of {machine.name}", machine.sockets)

    def behave(self, kind: str, random: Random) -> None:
        """Open connections to the agent, and violate the agent's protocol on them.

        :param kind: kind of violation, one of ``RUDE_EXCHANGES``.
        """
        self._host.revive()
        to_sink = encode_line({"do": "connect", "to": str(self._peer), "port": SINK, "half_close": False})
        if kind == GARBAGE:
            self._open(_Rude(random.randbytes(random.choice((10, 100_000))) + b"\n"))
        elif kind == SILENCE:
            for _ in range(SILENT_CONNECTIONS):
                self._open(_Rude(b""))
        elif kind == FLOOD:
            self._open(_Rude(to_sink, encode_frame(Kind.DATA, bytes(MAX_PAYLOAD)) * (3 * WINDOW // MAX_PAYLOAD)))
        elif kind == BAD_FRAMES:
            frames = (
                HEADER.pack(77, 0),
                HEADER.pack(Kind.DATA, MAX_PAYLOAD + 1),
                encode_frame(Kind.END),
                encode_frame(Kind.READ, b"12"),
                encode_frame(Kind.TAKEN, bytes(4)),
                encode_frame(Kind.CLOSE),
            )
            self._open(_Rude(to_sink, encode_frame(Kind.DATA, b"before") + random.choice(frames)))
        elif kind == OTHERS_PORT:
            self._ask_for_port(random)
        else:
            self._open(_Rude(to_sink, encode_frame(Kind.DATA, bytes(MAX_PAYLOAD))))
            self._host.callLater(random.choice((0.0, 0.1, 1.0)), self._leave)

    def _leave(self) -> None:
        # The process is ended by a timer of the clock, because it must not be killed while its own code is running.
        self._machine.lab.clock.callLater(0, self._host.kill)

    def _ask_for_port(self, random: Random) -> None:
        """Ask for the port of a program that has it, and check that the agent refuses."""
        agent = self._machine.agent
        services = {} if agent is None else dict(agent.services)
        if not services:
            return
        port = random.choice(sorted(services))

        def answered(answer: dict[str, object]) -> None:
            owner = cast(ProgramConnection, services[port]._connection)  # noqa: SLF001
            if "error" not in answer and not owner._finished:  # noqa: SLF001
                self._broken(f"the agent has given the port {port} of one program to another")
            if rude.transport is not None:
                rude.transport.loseConnection()

        rude = _Rude(encode_line({"do": "listen", "port": port}), b"", answered)
        self._open(rude)

    def _open(self, protocol: Protocol) -> None:
        factory = Factory.forProtocol(lambda: protocol)
        factory.noisy = False

        def connect() -> None:
            connected: Deferred[IProtocol] = UNIXEndpoint(self._host, str(self._machine.path)).connect(factory)
            connected.addErrback(lambda _: None)

        self._host.do(connect)
