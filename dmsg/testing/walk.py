"""Random walk of a network through faults and lies. The promise of streams (:mod:`dmsg.testing.promise`) is checked at
every step.

``python -m dmsg.testing.walk --seconds 60`` does one walk after another, each with another seed, until a walk fails,
and prints the seed of this walk. With ``--lies`` servers lie, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import cast

from twisted.internet.interfaces import IProtocol
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.testing import faults
from dmsg.testing.bystanders import HARBOUR, Bystanders, check_blame
from dmsg.testing.determinism import KEPT, Trace
from dmsg.testing.faults import Faults
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.lying_discovery import KINDS as DISCOVERY_KINDS, LyingDiscovery
from dmsg.testing.plan import LIES, Plan, Step, draw
from dmsg.testing.promise import Fixed, PromiseBroken, Talker, Talkers
from dmsg.testing.shrink import Shrinker, as_test, signature
from dmsg.testing.strangers import Strangers
from dmsg.v2019.client import Client

PORT = 7
SERVERS = ("server-1", "server-2", "server-3")
STEPS = 60
UNACKNOWLEDGED = 4_000_000
"""Number of unacknowledged bytes at which an end of a stream sends no more data."""
STREAMS = 6
"""Maximum number of streams that are open at the same time."""
PATIENCE = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""


class Walk:
    """Random walk of a network under faults.

    :param lab: lab in which only discovery runs.
    :param trace: trace of the lab.
    :param steps: number of steps, if the plan is drawn here.
    :param plan: plan of the walk; None to draw one from the seed of the lab.
    :ivar faults: names of the faults so far, in order.
    :ivar lies: number of lies that were told, by kind.
    """

    def __init__(self, lab: Lab, trace: Trace, *, steps: int = STEPS, plan: Plan | None = None) -> None:
        self.seed = lab.seed
        self.trace = trace
        self.lab = lab
        self.plan = plan or draw_plan(lab.seed, steps=steps)
        self.faults: list[str] = []
        self._talkers = Talkers()
        self._streams: list[Talker] = []
        self._closing: list[Talker] = []
        self._opened = 0
        self._faults = Faults(lab, SERVERS, ("alice", "bob"), self._streams)
        self._alliance = Alliance(trace)
        self._liars: dict[str, Liar] = {}
        self._last_liar = ""
        self._discovery: LyingDiscovery | None = None
        self._strangers: Strangers | None = None
        self._bystanders: Bystanders | None = None
        self._own: dict[str, Callable[[Step], None]] = {
            LIES: self._lie,
            "honest": self._repent,
            "open": self._open,
            "finish": self._finish,
            "clock jump": self._clock_jump,
            "strangers flood": self._flood,
            "strangers resume": self._resume,
        }
        self._own.update(dict.fromkeys(_OF_DISCOVERY, self._lie_of_discovery))

    @property
    def lies(self) -> Counter[str]:
        """Number of lies that were told, by kind."""
        return self._alliance.told

    def run(self) -> None:
        """Do the walk, repair all faults, and check that every byte arrives.

        :raises PromiseBroken: a stream has broken the promise.
        :raises AssertionError: a stream has not recovered.
        """
        self._start()
        for step in self.plan.steps:
            self._do(step)
        self._repair()
        try:
            self.lab.network.run_until(self._all_there, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._state()}") from error
        self._check()
        self._repent()

    def _start(self) -> None:
        lab = self.lab
        for name in SERVERS:
            lab.add_server(name)
        if self.plan.lying:
            assert lab.discovery is not None
            self._discovery = LyingDiscovery(lab.network.host("discovery"), lab.discovery)
            self._bystanders = Bystanders(lab)
            keys = [lab.key(name).public for name in SERVERS]
            self.alice = lab.add_client("alice", resume_timeout=3600.0, only=keys, min_servers=2)
        else:
            self.alice = lab.add_client("alice", resume_timeout=3600.0)
        self.bob = lab.add_client("bob", resume_timeout=3600.0)
        lab.settle()
        self.bob.listen(self._talkers, PORT)
        remotes: list[Client] = [self.bob, self.bob]
        if self._bystanders is not None:
            self._bystanders.start()
            self._strangers = Strangers(lab, HARBOUR, self._bystanders.dave.public_key)
            remotes[1] = self._bystanders.dave
            remotes[1].listen(self._talkers, PORT)
        for number, remote in enumerate(remotes):
            one = self._talkers.pair(self.seed * 10 + number)
            lab.result(self.alice.connect(remote.public_key, Fixed(one), port=PORT))
            self._streams += [one, one.other]  # type: ignore[list-item]
        # An accepting end is built only when the confirmation of the connecting end has arrived.
        lab.network.run_until(lambda: all(talker.transport is not None for talker in self._streams))

    def _do(self, step: Step) -> None:
        for number, size in step.says:
            if number < len(self._streams):
                talker = self._streams[number]
                may_say = talker.transport is not None and talker.lost is None
                if may_say and talker.sent - talker.acknowledged < UNACKNOWLEDGED:
                    talker.say(size)
        if self._bystanders is not None:
            self._bystanders.say()
        if step.fault:
            self.faults.append(step.fault)
            self.trace.note(self.lab.clock.seconds(), "fault", step.fault)
            own = self._own.get(step.fault)
            if own is not None:
                own(step)
            else:
                self._faults.make(step.fault, Random(step.chance))
        self.lab.network.run(step.seconds)
        self._check()

    def _check(self) -> None:
        self._talkers.check()
        for talker in self._streams:
            # If a stream was never opened at its responder, it may fail at its initiator.
            if talker.lost is not None and not self._is_unheard(talker):
                raise PromiseBroken(f"a stream was lost: {talker.lost.value}")
        # The server that strangers flooded may count faults of clients.
        spared = {*self._liars, HARBOUR} if self._strangers is not None and self._strangers.flooded else {*self._liars}
        check_blame((name, server) for name, server in self.lab.servers.items() if name not in spared)
        if self._bystanders is not None:
            self._bystanders.check()

    def _is_unheard(self, talker: Talker) -> bool:
        other = talker.other
        return talker.acknowledged == 0 and other is not None and other.transport is None

    def _state(self) -> str:
        """Return a text with the state of a walk that makes no progress, for an error."""
        talkers = [(talker.sent, talker.acknowledged, talker.received) for talker in self._streams]
        clients = [
            (client.status, len(client.servers), client.last_error, client.streams.suspended)
            for client in (self.alice, self.bob)
        ]
        closing = [(talker.sent, talker.other.received) for talker in self._closing if talker.other is not None]
        return (
            f"sent, acknowledged, received {talkers}; closing {closing}; clients {clients}; "
            f"servers {list(self.lab.servers)}"
        )

    def _all_there(self) -> bool:
        for talker in self._closing:
            # A closing end gives up after some seconds without an acknowledgement, and reports a failure. This is
            # allowed.
            if talker.other is None or (talker.other.received != talker.sent and not talker.failures):
                return False
        return all(
            self._is_unheard(talker)
            or (
                talker.acknowledged == talker.sent and talker.other is not None and talker.other.received == talker.sent
            )
            for talker in self._streams
            if talker.transport is not None
        )

    def _repair(self) -> None:
        self._faults.repair()
        if self._discovery is not None:
            self._discovery.lie("", Random(0))
        for name, liar in self._liars.items():
            if not self.plan.unrepentant or name != self._last_liar:
                liar.repent()

    # --- events that are no faults of the network: streams, servers, clocks ---

    def _lie(self, step: Step) -> None:
        """Let a server lie from now on."""
        running = [name for name in self.lab.servers if name != HARBOUR]
        # A server with transports is preferred, because others send few frames to which a lie could apply.
        busy = [name for name in running if self.lab.servers[name].factory.relay.route_count]
        name = Random(step.chance).choice(busy or running)
        server = self.lab.servers[name]
        liar = self._liars.get(name)
        if liar is None or liar.relay is not server.factory.relay:
            liar = self._liars[name] = Liar(self.lab.network.host(name), server, self._alliance, KINDS)
        liar.tell(step.lies)
        self._last_liar = name

    def _flood(self, step: Step) -> None:
        """Let strangers flood a bystander with REQUESTs over the honest server."""
        assert self._strangers is not None
        self._strangers.flood(Random(step.chance))
        self.lies[step.fault] += 1

    def _resume(self, step: Step) -> None:
        """Let strangers try to take over the stream between a bystander and another client."""
        assert self._strangers is not None
        stream = stream_of(self._streams[2])
        if isinstance(stream, ClientStream) and self._streams[2].lost is None:
            self.lies[step.fault] += 1
            for answer in self._strangers.resume(stream.secure_end, Random(step.chance)):
                answer.addErrback(lambda failure: failure.trap(DmsgError))

    def _lie_of_discovery(self, step: Step) -> None:
        """Let discovery lie from now on."""
        assert self._discovery is not None
        kind = _OF_DISCOVERY[step.fault]
        self._discovery.lie(kind, Random(step.chance))
        if kind:
            self.lies[step.fault] += 1

    def _repent(self, step: Step | None = None) -> None:
        """Let all servers be honest from now on."""
        for liar in self._liars.values():
            liar.repent()
        if self._discovery is not None:
            self._discovery.lie("", Random(0))

    def _open(self, step: Step) -> None:
        """Open another stream, which may fail."""
        random = Random(step.chance)
        if len(self._streams) >= 2 * STREAMS:
            return
        one, two = (self.alice, self.bob) if random.random() < 0.5 else (self.bob, self.alice)
        self._opened += 1
        port = 100 + self._opened
        talker = self._talkers.pair(self.seed * 10 + 10 + self._opened)
        other = self._talkers.take()
        two.listen(Fixed(other), port)

        def opened(_: IProtocol) -> None:
            self._streams += [talker, other]

        def failed(failure: Failure) -> None:
            failure.trap(DmsgError)

        one.connect(two.public_key, Fixed(talker), port).addCallbacks(opened, failed)

    def _finish(self, step: Step) -> None:
        """Close a stream at an end, if the other end has no unacknowledged data. The data that the closing end has sent
        must still arrive."""
        may = [
            talker
            for talker in self._streams[4:]
            if talker.other is not None
            and talker.transport is not None
            and talker.other.transport is not None
            and talker.other.sent == talker.other.acknowledged == talker.received
        ]
        if may:
            talker = Random(step.chance).choice(may)
            self._closing.append(talker)
            self._streams[:] = [one for one in self._streams if one not in (talker, talker.other)]
            other = talker.other
            assert talker.transport is not None and other is not None and other.transport is not None
            talker.transport.resumeProducing()  # type: ignore[attr-defined]
            other.transport.resumeProducing()  # type: ignore[attr-defined]
            talker.transport.loseConnection()

    def _clock_jump(self, step: Step) -> None:
        if self._bystanders is not None:
            self._bystanders.forgive()
        self._faults.make("clock jump", Random(step.chance))


_OF_DISCOVERY = {"honest discovery": "", **{f"discovery: {kind}": kind for kind in DISCOVERY_KINDS}}
"""Kinds of lies of discovery, by the name of the fault."""
_OF_STRANGERS = ("strangers flood", "strangers resume", "strangers resume")
FAULTS = (*faults.BY_NAME, "open", "open", "finish")
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""


def draw_plan(seed: int, *, steps: int = STEPS, lies: bool = False) -> Plan:
    """Return the plan that is drawn from a seed.

    :param lies: whether servers may lie.
    """
    if lies:
        # Jumps of the clock are left out, because they affect the bystanders, too: their PINGs time out, and their
        # servers are checked.
        calm = [fault for fault in FAULTS if fault != "clock jump"]
        return draw(seed, steps, (*calm, *_OF_DISCOVERY, *_OF_STRANGERS, "honest"), list(KINDS))
    return draw(seed, steps, FAULTS)


def walk(seed: int, *, steps: int = STEPS, lies: bool = False) -> Walk:
    """Do the random walk that a seed determines.

    :param lies: whether servers may lie.
    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    return follow(draw_plan(seed, steps=steps, lies=lies))


def follow(plan: Plan) -> Walk:
    """Do the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with repeatable_lab(plan.seed, trace=trace) as lab:
        one = Walk(lab, trace, plan=plan)
        _run_logged(one)
    return one


def _run_logged(one: Walk) -> None:
    """Run a walk. The walk also fails if errors were only logged."""
    errors: list[str] = []

    def note(event: LogEvent) -> None:
        if event.get("log_failure") is not None or event.get("isError"):
            errors.append(formatEvent(event) + str(event.get("log_failure", "")))

    observer = cast(ILogObserver, note)
    globalLogPublisher.addObserver(observer)
    try:
        one.run()
        one.lab.stop()
        # Deferreds that failed and were dropped report their errors when they are collected, so garbage is collected
        # here.
        gc.collect()
        if errors:
            raise AssertionError(f"{len(errors)} errors were logged: {errors[0]}")
    except AssertionError as error:
        last = "\n".join(one.trace.last[-KEPT:])
        told = _counted(one.lies) or "none"
        text = (
            f"seed {one.seed}: {error}; faults: {', '.join(one.faults)}; lies: {told}; errors logged: {len(errors)}; "
            f"the last events:\n{last}"
        )
        raise type(error)(text) from error
    finally:
        globalLogPublisher.removeObserver(observer)


def _counted(lies: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(lies.items()))


def shrink(plan: Plan) -> tuple[Plan, str, int]:
    """Reduce a plan whose walk fails to a smaller plan whose walk fails in the same way.

    :returns: the smaller plan, the text of its failure, and the number of walks that were needed.
    :raises ValueError: the walk of ``plan`` does not fail.
    """
    found: list[AssertionError] = []

    def fails(plan: Plan) -> bool:
        try:
            follow(plan)
        except AssertionError as error:
            if found and signature(error) != signature(found[0]):
                return False
            found.append(error)
            return True
        return False

    shrinker = Shrinker(fails)
    small = shrinker.shrink(plan)
    return small, str(found[-1]).split("; faults:")[0], shrinker.tries


def main() -> None:
    """Do random walks for ``--seconds`` seconds, or until a walk fails. With ``--seed``, do only the walk of this
    seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each walk")
    parser.add_argument("--lies", action="store_true", help="servers lie, too")
    parser.add_argument("--shrink", action="store_true", help="reduce the walk of --seed, which fails, to a small test")
    arguments = parser.parse_args()
    options = f" --steps {arguments.steps}" + " --lies" * arguments.lies
    if arguments.shrink and arguments.seed is None:
        parser.error("--shrink needs --seed")
    if arguments.shrink:
        plan = draw_plan(arguments.seed, steps=arguments.steps, lies=arguments.lies)
        try:
            small, error, tries = shrink(plan)
        except ValueError:
            parser.error(f"the walk of seed {arguments.seed} does not fail")
        sys.stdout.write(
            f"# {len(plan.faults)} faults and {len(plan.lies)} lies became {len(small.faults)} and {len(small.lies)} "
            f"in {tries} walks\n{as_test(small, error)}"
        )
        return
    if arguments.seed is not None:
        done = walk(arguments.seed, steps=arguments.steps, lies=arguments.lies)
        sys.stdout.write(
            f"seed {arguments.seed}: all is well; faults: {', '.join(done.faults)}; lies: {_counted(done.lies)}\n"
            f"{done.trace.count} events, hash {done.trace.digest()}\n"
        )
        return
    end = time.monotonic() + arguments.seconds
    first = int.from_bytes(os.urandom(4), "big")
    count = 0
    told: Counter[str] = Counter()
    while time.monotonic() < end:
        try:
            told += walk(first + count, steps=arguments.steps, lies=arguments.lies).lies
        except BaseException:
            sys.stdout.write(f"failed: python -m dmsg.testing.walk --seed {first + count}{options} --shrink\n")
            raise
        count += 1
    last = first + count - 1
    sys.stdout.write(f"{count} walks, seeds {first} to {last}: every acknowledged byte arrived once and in order\n")
    if told:
        sys.stdout.write(f"lies told: {_counted(told)}\n")


if __name__ == "__main__":
    main()
