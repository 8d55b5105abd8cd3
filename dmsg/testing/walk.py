"""Random walk of a network through faults and lies. The promise of streams (:mod:`dmsg.testing.promise`) is checked at
every step.

``python -m dmsg.testing.walk --seconds 60`` does one walk after another, each with another seed, until a walk fails,
and prints the seed of this walk. With ``--lies`` servers lie, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from twisted.internet.interfaces import IProtocol
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.testing.bystanders import HARBOUR, Bystanders, check_blame
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.lying_discovery import LyingDiscovery
from dmsg.testing.lying_ends import KINDS as END_KINDS, LyingEnds
from dmsg.testing.plan import LIES, Plan, Step
from dmsg.testing.promise import Fixed, PromiseBroken, Talker, Talkers
from dmsg.testing.shrink import Shrinker, as_test, signature
from dmsg.testing.strangers import Strangers
from dmsg.testing.walk_command import explained
from dmsg.testing.walk_coverage import WalkCoverage
from dmsg.testing.walk_kinds import EVERY_FAULT, EVERY_LIE, OF_DISCOVERY, STEPS, draw_plan
from dmsg.v2019.client import Client

PORT = 7
SERVERS = ("server-1", "server-2", "server-3")
UNACKNOWLEDGED = 4_000_000
"""Number of unacknowledged bytes at which an end of a stream sends no more data."""
STREAMS = 6
"""Maximum number of streams that are open at the same time."""
LAST = 10_000
"""Size in bytes of the data that an end sends just before it closes its stream."""
ENDS_AT_ONCE = 3
"""Number of lies that a lying end tells in a step, each on a new stream."""
PIECES, SMALL, PIECE_SECONDS = 100, 50, 0.001
"""Number of small pieces to send, their maximum size in bytes, and the seconds of the lab's time between two of
them."""
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
    :ivar coverage: states of the streams in which the faults and lies happened.
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
        self._opening: list[Talker] = []
        self._lasting: tuple[Talker, ...] = ()
        """Ends of the first streams, which no end closes."""
        self._orphans: list[Talker] = []
        """Ends of streams whose other end was in a killed program."""
        self._opened = 0
        self._faults = Faults(lab, SERVERS, ("alice", "bob"), self._streams)
        self.coverage = WalkCoverage(EVERY_LIE if self.plan.lying else EVERY_FAULT)
        self._alliance = Alliance(trace, lambda kind: self._note(f"lie: {kind}"))
        self._liars: dict[str, Liar] = {}
        self._last_liar = ""
        self._discovery: LyingDiscovery | None = None
        self._strangers: Strangers | None = None
        self._lying_ends: LyingEnds | None = None
        self._bystanders: Bystanders | None = None
        self._own: dict[str, Callable[[Step], None]] = {
            LIES: self._lie,
            "honest": self._repent,
            "open": self._open,
            "finish": self._finish,
            "small pieces": self._small_pieces,
            "kill client": self._kill_client,
            "kill discovery": self._kill_discovery,
            "clock jump": self._clock_jump,
            "strangers flood": self._flood,
            "strangers resume": self._resume,
            "lying end": self._lie_at_an_end,
        }
        self._own.update(dict.fromkeys(OF_DISCOVERY, self._lie_of_discovery))

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
        self._start_bob()
        lab.settle()
        remotes: list[Client] = [self.bob, self.bob]
        if self._bystanders is not None:
            self._bystanders.start()
            self._strangers = Strangers(lab, HARBOUR, self._bystanders.dave.public_key)
            self._lying_ends = LyingEnds(lab, HARBOUR, self._bystanders.dave)
            remotes[1] = self._bystanders.dave
            remotes[1].listen(self._talkers, PORT)
        for number, remote in enumerate(remotes):
            one = self._talkers.pair(self.seed * 10 + number)
            lab.result(self.alice.connect(remote.public_key, Fixed(one), port=PORT))
            self._streams += [one, one.other]  # type: ignore[list-item]
        # An accepting end is built only when the confirmation of the connecting end has arrived.
        lab.network.run_until(lambda: all(talker.transport is not None for talker in self._streams))
        self._lasting = tuple(self._streams)

    def _start_bob(self) -> None:
        self.bob = self.lab.add_client("bob", resume_timeout=3600.0)
        self.bob.listen(self._talkers, PORT)

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
            self._note(step.fault)
            self.trace.note(self.lab.clock.seconds(), "fault", step.fault)
            own = self._own.get(step.fault)
            if own is not None:
                own(step)
            else:
                self._faults.make(step.fault, Random(step.chance))
        self.lab.network.run(step.seconds)
        self._check()

    def _note(self, kind: str) -> None:
        """Count a fault or lie in the coverage."""
        self.coverage.note(kind, (*self._streams, *self._opening, *self._closing))

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
        orphans = [(talker.sent, talker.received) for talker in self._orphans if talker.lost is None]
        closing = [(talker.sent, talker.other.received) for talker in self._closing if talker.other is not None]
        return (
            f"sent, acknowledged, received {talkers}; closing {closing}; orphans {orphans}; clients {clients}; "
            f"servers {list(self.lab.servers)}"
        )

    def _all_there(self) -> bool:
        for talker in self._closing:
            # A closing end gives up after some seconds without an acknowledgement, and reports a failure. This is
            # allowed.
            if talker.other is None or (talker.other.received != talker.sent and not talker.failures):
                return False
        # An initiator whose remote program was killed tries to resume the stream, and then learns that the stream no
        # longer exists.
        if not all(talker.lost is not None for talker in self._orphans):
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
        talker = self._lasting[2]
        stream = stream_of(talker)
        if isinstance(stream, ClientStream) and talker.lost is None:
            self.lies[step.fault] += 1
            for answer in self._strangers.resume(stream.secure_end, Random(step.chance)):
                answer.addErrback(lambda failure: failure.trap(DmsgError))

    def _lie_at_an_end(self, step: Step) -> None:
        """Let a client break the protocol on some streams with a bystander."""
        assert self._lying_ends is not None
        for kind in Random(step.chance).sample(END_KINDS, ENDS_AT_ONCE):
            if self._lying_ends.tell(kind, step.chance):
                self.lies[f"end: {kind}"] += 1

    def _lie_of_discovery(self, step: Step) -> None:
        """Let discovery lie from now on."""
        assert self._discovery is not None
        kind = OF_DISCOVERY[step.fault]
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
            self._opening.remove(talker)
            self._streams += [talker, other]

        def failed(failure: Failure) -> None:
            self._opening.remove(talker)
            failure.trap(DmsgError)

        self._opening.append(talker)

        one.connect(two.public_key, Fixed(talker), port).addCallbacks(opened, failed)

    def _finish(self, step: Step) -> None:
        """Close a stream at an end, if the other end has no unacknowledged data. The data that the closing end has sent
        must still arrive."""
        may = [
            talker
            for talker in self._streams
            if talker not in self._lasting
            and talker.other is not None
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
            # The stream closes when this data is acknowledged, so later faults happen while it is closing.
            talker.say(LAST)
            talker.transport.resumeProducing()  # type: ignore[attr-defined]
            other.transport.resumeProducing()  # type: ignore[attr-defined]
            talker.transport.loseConnection()

    def _small_pieces(self, step: Step) -> None:
        """Send many small pieces to an end that does not read. In half of the cases this end then resumes reading."""
        random = Random(step.chance)
        may = [
            talker
            for talker in self._streams
            if talker.other is not None
            and all(end.transport is not None and end.lost is None for end in (talker, talker.other))
        ]
        if not may:
            return
        talker = random.choice(may)
        assert talker.other is not None
        reader = stream_of(talker.other)
        reader.pauseProducing()
        for _ in range(PIECES):
            talker.say(random.randint(1, SMALL))
            # Each piece is sent in a turn of its own. Pieces of the same turn would share a frame.
            self.lab.network.run(PIECE_SECONDS)
        if random.random() < 0.5:
            reader.resumeProducing()

    def _kill_client(self, step: Step) -> None:
        """Kill ``bob``, and start him again with the same key. He has forgotten his streams."""
        bob = self.bob.public_key
        for one in (*self._streams, *self._closing):
            pair = (one, one.other)
            mine = next((end for end in pair if end is not None and _peer_of(end) == bob and end.lost is None), None)
            if mine is not None:
                self._streams[:] = [end for end in self._streams if end not in pair]
                self._closing[:] = [end for end in self._closing if end not in pair]
                stream = stream_of(mine)
                stream.resumeProducing()  # The stream reports its end only after all data is read.
                # Only initiators resume streams. The other ends wait for bob, and their timeout is after the end of the
                # lab.
                if mine not in self._orphans and isinstance(stream, ClientStream) and stream.secure_end.initiator:
                    self._orphans.append(mine)
        self.lab.kill("bob")
        self.lab.network.host("bob").revive()
        self._start_bob()
        self._open(step)

    def _kill_discovery(self, step: Step) -> None:
        """Kill discovery, and start it again with an empty store."""
        host = self.lab.network.host("discovery")
        host.kill()
        host.revive()
        discovery = self.lab.start_discovery()
        if self._discovery is not None:
            self._discovery = LyingDiscovery(host, discovery)

    def _clock_jump(self, step: Step) -> None:
        if self._bystanders is not None:
            self._bystanders.forgive()
        self._faults.make("clock jump", Random(step.chance))


def _peer_of(talker: Talker) -> PubKey | None:
    """Return the key of the other end of a stream; None if the stream is not open yet."""
    if not isinstance(talker.transport, ClientStream) or talker.transport.end is None:
        return None
    peer = talker.transport.getPeer()
    assert isinstance(peer, DmsgAddress)
    return peer.public_key


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
        with explained(plan.seed, one, trace, lambda: f"; lies: {_counted(one.lies) or 'none'}"):
            one.run()
            lab.stop()
    return one


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
    parser.add_argument("--seconds", type=float, default=60.0, help="Seconds for which to do walks.")
    parser.add_argument("--seed", type=int, help="Do only the walk of this seed.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Number of steps of each walk.")
    parser.add_argument("--lies", action="store_true", help="Let servers lie, too.")
    parser.add_argument("--shrink", action="store_true", help="Reduce the failing walk of --seed to a small test.")
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
    covered = WalkCoverage(EVERY_LIE if arguments.lies else EVERY_FAULT)
    while time.monotonic() < end:
        try:
            done = walk(first + count, steps=arguments.steps, lies=arguments.lies)
        except BaseException:
            sys.stdout.write(f"failed: python -m dmsg.testing.walk --seed {first + count}{options} --shrink\n")
            raise
        told += done.lies
        covered.add(done.coverage)
        count += 1
    last = first + count - 1
    sys.stdout.write(f"{count} walks, seeds {first} to {last}: every acknowledged byte arrived once and in order\n")
    if told:
        sys.stdout.write(f"lies told: {_counted(told)}\n")
    sys.stdout.write(f"number of faults and lies, by the states of streams at that time:\n{covered.table()}")
    missing = covered.missing
    if missing:
        sys.stdout.write(f"never happened: {', '.join(f'{kind} while {state}' for kind, state in missing)}\n")


if __name__ == "__main__":
    main()
