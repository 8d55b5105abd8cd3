"""Random walk over faults, with the promise checked at every step.

``python -m dmsg.testing.walk --seconds 60`` does one walk after another, each with a seed of its own, and prints the
seed of the first that fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any, cast

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher

from dmsg.testing.determinism import KEPT, Trace
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.promise import Talker, Talkers
from dmsg.v2019.core.wire import DRAIN, Frame

PORT = 7
SERVERS = 3
STEPS = 60
PATIENCE = 400.0
"""Seconds of the lab's time within which everything must recover after the last fault."""


class Walk:
    """Random walk of a network under faults.

    :param lab: lab in which nothing runs yet but discovery; its seed is that of the walk.
    :param trace: trace of the lab.
    :ivar faults: faults so far, in order.
    """

    def __init__(self, lab: Lab, trace: Trace, *, steps: int = STEPS) -> None:
        self.seed = lab.seed
        self.trace = trace
        self.lab = lab
        self.random = Random(lab.seed)
        self.faults: list[str] = []
        self._steps = steps
        self._talkers = Talkers()
        self._streams: list[Talker] = []
        self._actions: dict[str, Callable[[], None]] = {
            "delay": self._delay,
            "loss": self._loss,
            "reorder": self._reorder,
            "bandwidth": self._bandwidth,
            "partition": self._partition,
            "heal": self._heal,
            "reset": self._reset,
            "kill": self._kill,
            "restart": self._restart,
            "leave": self._leave,
            "pause": self._pause,
            "go on": self._proceed,
            "slow reader": self._slow_reader,
            "reader goes on": self._reader_goes_on,
            "clock jump": self._clock_jump,
            "poison": self._poison,
        }

    def run(self) -> None:
        """Do the walk, heal everything, and check that every byte has arrived.

        :raises PromiseBroken: the promise was not kept.
        :raises AssertionError: a stream did not recover.
        """
        self.lab.add_servers(SERVERS)
        self.alice, self.bob = (self.lab.add_client(name, resume_timeout=3600.0) for name in ("alice", "bob"))
        self.lab.settle()
        self.bob.listen(self._talkers, PORT)
        for number in range(2):
            one = self._talkers.pair(self.seed * 10 + number)
            self.lab.result(self.alice.connect(self.bob.public_key, _Fixed(one), port=PORT))
            self._streams += [one, one.other]  # type: ignore[list-item]
        # The accepting end is built when the connecting end has confirmed.
        self.lab.network.run_until(lambda: all(talker.transport is not None for talker in self._streams))
        for _ in range(self._steps):
            for talker in self._streams:
                if self.random.random() < 0.5 and talker.sent - talker.acknowledged < 4_000_000:
                    talker.say(self.random.choice((1, 100, 10_000, 300_000)))
            if self.random.random() < 0.6:
                name = self.random.choice(list(self._actions))
                self.faults.append(name)
                self.trace.note(self.lab.clock.seconds(), "fault", name)
                self._actions[name]()
            self.lab.network.run(self.random.choice((0.0, 0.01, 0.3, 3.0, 12.0)))
            self._talkers.check()
        self._repair()
        try:
            self.lab.network.run_until(self._all_there, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._state()}") from error
        self._talkers.check()
        for talker in self._streams:
            if talker.lost is not None:
                raise AssertionError(f"a stream was lost: {talker.lost.value}")

    def _state(self) -> str:
        """Return the state of a walk that makes no progress."""
        talkers = [(talker.sent, talker.acknowledged, talker.received) for talker in self._streams]
        clients = [
            (client.status, len(client.servers), client.last_error, client.streams.suspended)
            for client in (self.alice, self.bob)
        ]
        return f"sent, acknowledged, received {talkers}; clients {clients}; servers {list(self.lab.servers)}"

    def _all_there(self) -> bool:
        if any(talker.lost is not None for talker in self._streams):
            return True
        return all(
            talker.acknowledged == talker.sent and talker.other is not None and talker.other.received == talker.sent
            for talker in self._streams
        )

    def _repair(self) -> None:
        self._heal()
        self._proceed()
        self._reader_goes_on()
        for name in [f"server-{number}" for number in range(1, SERVERS + 1)]:
            if name not in self.lab.servers:
                self.lab.add_server(name)

    # --- faults by name ---

    def _paths(self) -> list[tuple[str, str]]:
        hosts = list(self.lab.network.hosts)
        return [(one, two) for one in hosts for two in hosts if one < two and "discovery" not in (one, two)]

    def _random_path(self) -> list[object]:
        one, two = self.random.choice(self._paths())
        network = self.lab.network
        return list(network.both_ways(network.host(one), network.host(two)))

    def _delay(self) -> None:
        seconds = self.random.choice((0.001, 0.02, 0.2))
        for path in self._random_path():
            path.delay = seconds  # type: ignore[attr-defined]

    def _loss(self) -> None:
        for path in self._random_path():
            path.loss = self.random.choice((0.0, 0.05, 0.3))  # type: ignore[attr-defined]

    def _reorder(self) -> None:
        for path in self._random_path():
            path.reorder = self.random.choice((0.0, 0.2))  # type: ignore[attr-defined]

    def _bandwidth(self) -> None:
        for path in self._random_path():
            path.rate = self.random.choice((0.0, 100_000.0, 1e6, 1e8))  # type: ignore[attr-defined]

    def _partition(self) -> None:
        for path in self._random_path():
            path.cut_since = self.lab.clock.seconds()  # type: ignore[attr-defined]

    def _heal(self) -> None:
        network = self.lab.network
        for one, two in self._paths():
            for path in network.both_ways(network.host(one), network.host(two)):
                path.cut_since = None
                path.loss = path.reorder = 0.0
                path.rate = 0.0

    def _reset(self) -> None:
        self.lab.network.host(self.random.choice(("alice", "bob", *self.lab.servers))).reset()

    def _kill(self) -> None:
        if len(self.lab.servers) > 1:
            self.lab.kill(self.random.choice(list(self.lab.servers)))

    def _restart(self) -> None:
        gone = [f"server-{n}" for n in range(1, SERVERS + 1) if f"server-{n}" not in self.lab.servers]
        if gone:
            self.lab.add_server(self.random.choice(gone))

    def _leave(self) -> None:
        """Stop a server in an orderly way, so that it drains."""
        if len(self.lab.servers) > 1:
            name = self.random.choice(list(self.lab.servers))
            # A paused server is resumed first, because it must run to hear that it should stop.
            self.lab.network.host(name).resume()
            self.lab.servers.pop(name).stopService()

    def _pause(self) -> None:
        self.lab.network.host(self.random.choice(list(self.lab.servers))).pause()

    def _proceed(self) -> None:
        for host in self.lab.network.hosts.values():
            host.resume()

    def _slow_reader(self) -> None:
        talker = self.random.choice(self._streams)
        if talker.transport is not None and talker.lost is None:
            talker.transport.pauseProducing()  # type: ignore[attr-defined]

    def _reader_goes_on(self) -> None:
        for talker in self._streams:
            if talker.transport is not None:
                talker.transport.resumeProducing()  # type: ignore[attr-defined]

    def _poison(self) -> None:
        """Let a server append malformed bytes to the next data that it forwards; its client must end the connection."""
        server = self.random.choice(list(self.lab.servers.values()))
        peers = list(server.factory.relay.peers)
        if peers:
            _Poisoner(self.random.choice(peers))

    def _clock_jump(self) -> None:
        """Let much time pass at once, as on a machine that was suspended."""
        self.lab.clock.advance(self.random.choice((5, 60, 600)))


class _Poisoner:
    """Replacement for a relay's port until data are sent through it."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._port = peer.port
        peer.port = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data, and malformed bytes after them."""
        self._port.send(data)
        self._port.send(Frame(DRAIN, 0, b"malformed").encode())
        if self._peer.port is self:
            self._peer.port = self._port


class _Fixed(Factory):
    """Factory of one given protocol."""

    noisy = False

    def __init__(self, protocol: Talker) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: IAddress | None) -> Talker:
        return self._protocol


def walk(seed: int, *, steps: int = STEPS) -> Walk:
    """Do one walk, of which everything follows from the seed.

    :raises AssertionError: the promise was not kept; the text has the seed, the faults and the last events.
    """
    trace = Trace()
    with repeatable_lab(seed, trace=trace) as lab:
        one = Walk(lab, trace, steps=steps)
        _run_logged(one)
    return one


def _run_logged(one: Walk) -> None:
    """Run a walk, and fail also for errors that were only logged."""
    errors: list[str] = []

    def note(event: LogEvent) -> None:
        if event.get("log_failure") is not None or event.get("isError"):
            errors.append(formatEvent(event) + str(event.get("log_failure", "")))

    observer = cast(ILogObserver, note)
    globalLogPublisher.addObserver(observer)
    try:
        one.run()
        one.lab.stop()
        gc.collect()  # Deferreds that failed and were dropped report their errors at this collection.
        if errors:
            raise AssertionError(f"{len(errors)} errors were logged: {errors[0]}")
    except AssertionError as error:
        last = "\n".join(one.trace.last[-KEPT:])
        text = f"seed {one.seed}: {error}; faults: {', '.join(one.faults)}; the last events:\n{last}"
        raise type(error)(text) from error
    finally:
        globalLogPublisher.removeObserver(observer)


def main() -> None:
    """Do random walks for ``--seconds`` or until one fails; with ``--seed`` do only the walk of that seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each walk")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        done = walk(arguments.seed, steps=arguments.steps)
        sys.stdout.write(
            f"seed {arguments.seed}: all is well; faults: {', '.join(done.faults)}\n"
            f"{done.trace.count} events, hash {done.trace.digest()}\n"
        )
        return
    end = time.monotonic() + arguments.seconds
    first = int.from_bytes(os.urandom(4), "big")
    count = 0
    while time.monotonic() < end:
        try:
            walk(first + count, steps=arguments.steps)
        except BaseException:
            again = f"python -m dmsg.testing.walk --seed {first + count} --steps {arguments.steps}"
            sys.stdout.write(f"failed: {again}\n")
            raise
        count += 1
    last = first + count - 1
    sys.stdout.write(f"{count} walks, seeds {first} to {last}: every acknowledged byte arrived once and in order\n")


if __name__ == "__main__":
    main()
