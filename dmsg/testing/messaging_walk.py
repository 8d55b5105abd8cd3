"""Random walk of the Messaging System through faults. The guarantees of channels are checked at every step.

``python -m dmsg.testing.messaging_walk --seconds 60`` runs one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.

A channel ends when a connection that carries it is lost. So the guarantee is weaker than that of streams. The bytes
that arrive are the beginning of the bytes that were sent. Acknowledged data has arrived. No channel hangs: after the
faults, each channel either delivers everything or has ended at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from twisted.internet.interfaces import IProtocol
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.messaging.client import Client
from dmsg.messaging.core.dialect import Acks
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.server import Server
from dmsg.net.streams.transports import stream_of
from dmsg.servers.settings import ServerSettings
from dmsg.testing import faults
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.lab import SERVER_PORT, Lab, repeatable_lab
from dmsg.testing.numbered_ends import NUMBER_SIZE, AcceptingFactory, NumberedEnd, OpeningFactory
from dmsg.testing.plan import INSTANT, PATIENCE, Aim, Plan, Step, draw
from dmsg.testing.stream_places import StreamPlace, obstacle, parties_of
from dmsg.testing.walk_command import Done, explained, run
from dmsg.testing.walk_coverage import WalkCoverage, hosts_in_role, pairs

SERVERS = ("server-1", "server-2", "server-3")
CLIENTS = ("alice", "bob", "carol")
STEPS = 60
CHANNELS = 6
"""Maximum number of channels that are open at the same time."""
MAX_UNACKNOWLEDGED = 1_000_000
"""Number of bytes in flight at which an end of a channel sends no more data. Bytes are in flight until the other end
has received them."""
SETTLE_TIMEOUT = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""
LEFT_OUT = frozenset({"poison", "slow reader", "reader resumes"})
"""Faults that do not apply to the Messaging System."""
OPEN, CLOSE = "open", "close"
DIALECTS: Sequence[tuple[Profile, Acks]] = ((Profile.SEED, None), (Profile.SKYWIRE, None), (Profile.SKYWIRE, True))
"""Profiles of the walks, and whether the clients use acknowledgements inside channels. By default, clients of this
package use none with each other."""
FAULTS = (*(name for name in faults.BY_NAME if name not in LEFT_OUT), OPEN, OPEN, OPEN, CLOSE)
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
OPENING, IDLE, IN_FLIGHT, CLOSING = STATES = ("opening", "idle", "in flight", "closing")
"""States of an end of a channel, in the order of the table's columns. An end is ``CLOSING`` after the other end has
ended."""
_SAYS = tuple((end, 1000) for end in range(2 * CHANNELS))
WAYS: dict[str, Sequence[Step]] = {
    OPENING: (Step(fault=OPEN), Step(fault=OPEN, seconds=0.002)),
    IDLE: (Step(fault=OPEN, seconds=3.0),),
    IN_FLIGHT: (Step(_SAYS), Step(_SAYS, seconds=0.002)),
    CLOSING: (Step(fault=CLOSE), Step(fault=CLOSE, seconds=0.002)),
}
"""Steps of a walk after which an end is often in a state, by the name of the state."""
BEFORE_WAYS = {state: (Step(fault="delay"), Step(fault=OPEN, seconds=1.0)) for state in (OPENING, IN_FLIGHT, CLOSING)}
"""Steps that happen before those of :data:`WAYS`. Without a delay, these states end at once."""


class MessagingWalk:
    """Random walk of a network of the Messaging System.

    :param lab: lab in which only discovery runs.
    :ivar faults: names of the faults so far, in order.
    :ivar delivered: number of bytes that have arrived.
    :ivar coverage: states of the ends in which faults happened, and the roles of the hosts to which they happened.
    """

    def __init__(self, lab: Lab, plan: Plan) -> None:
        self.coverage = WalkCoverage(FAULTS, STATES, parties_of, obstacle)
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self._profile, self._acks = Random(f"profile {plan.seed}").choice(DIALECTS)
        self._servers = _Servers(lab, self._profile)
        self._faults = Faults(self._servers, SERVERS, CLIENTS, [])
        self._clients: dict[str, Client] = {}
        self._accepting: list[NumberedEnd] = []
        """Accepting ends, by the numbers of their channels."""
        self._hosts: list[tuple[str, str]] = []
        """Names of the initiator and the responder, by the numbers of the channels."""
        self._server_names = {bytes(lab.key(name).public): name for name in SERVERS}
        """Names of the servers, by their public keys."""
        self._failed: set[NumberedEnd] = set()
        """Accepting ends of channels that could not be opened."""

    @property
    def delivered(self) -> int:
        """Number of bytes that have arrived."""
        return sum(end.received + end.other.received for end in self._accepting)

    def run(self) -> None:
        """Run the walk, repair all faults, and check that no channel hangs.

        :raises PromiseBroken: a channel has broken its guarantee.
        :raises AssertionError: a channel hangs.
        """
        lab = self.lab
        for name in SERVERS:
            self._servers.add_server(name)
        for name in CLIENTS:
            host = lab.network.host(name)
            client = Client(
                host.reactor,
                lab.key(name),
                lab.lookups(host),
                profile=self._profile,
                acks=self._acks,
                random=lab.random,
                min_servers=2,
            )
            client.startService()
            lab.clients[name] = self._clients[name] = client  # type: ignore[assignment]  # The lab only stops it.
            client.listen(AcceptingFactory(self._accepting))
        lab.settle()
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        try:
            lab.network.run_until(
                lambda: all(end.is_settled and end.other.is_settled for end in self._accepting), SETTLE_TIMEOUT
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {self._hanging()}") from error
        self.check()

    def check(self) -> None:
        """Check the guarantee of all channels.

        :raises PromiseBroken: a channel has broken its guarantee.
        """
        for end in self._ends():
            end.check()

    def _hanging(self) -> str:
        texts = [
            f"sent {end.sent}, received {end.other.received}, ended: {bool(end.lost)}, {bool(end.other.lost)}"
            for end in self._ends()
            if not end.is_settled
        ]
        return f"{len(texts)} ends hang: {'; '.join(texts[:4])}; profile {self._profile.value}, acks {self._acks}"

    def _ends(self) -> list[NumberedEnd]:
        return [one for end in self._accepting for one in (end.other, end)]

    def _open_ends(self) -> list[NumberedEnd]:
        return [end for end in self._ends() if end.transport is not None and end.lost is None]

    def _do(self, step: Step) -> None:
        ends = self._open_ends()
        for number, size in step.says:
            if number < len(ends) and ends[number].sent - ends[number].other.received < MAX_UNACKNOWLEDGED:
                ends[number].say(size)
        if step.at:
            self.lab.network.wait_for(
                lambda: self._aimed_hosts(step) if step.to else any(one.state == step.at for one in self._places()),
                PATIENCE,
                INSTANT,
            )
        if step.fault:
            self.faults.append(step.fault)
            places = self._places()
            self.coverage.note(step.fault, pairs(places, self._make(step)))
        self.lab.network.run(step.seconds)
        self.check()

    def _make(self, step: Step) -> Sequence[str]:
        """Cause a fault. Return the names of the hosts to which it happened."""
        random = Random(step.chance)
        if step.fault in (OPEN, CLOSE):
            (self._open if step.fault == OPEN else self._close)(random)
            return ()
        self._faults.make(step.fault, random, self._aimed_hosts(step))
        return self._faults.hit

    def _aimed_hosts(self, step: Step) -> set[str]:
        """Return the names of the hosts that have the role ``step.to`` for an end in the state ``step.at``, and to
        which the fault of the step can happen."""
        return hosts_in_role(self._places(), step.at, step.to, self._faults.candidates(step.fault))

    def _places(self) -> list[StreamPlace]:
        """Return the states and hosts of the ends of all channels."""
        places = []
        for hosts, accepting in zip(self._hosts, self._accepting, strict=True):
            for end in (accepting.other, accepting):
                state = None if accepting in self._failed else _state_of(end)
                if state is not None:
                    session: Any = getattr(getattr(end.transport, "_carrier", None), "session", None)
                    server = "" if session is None else self._server_names.get(bytes(session.server), "")
                    places.append(StreamPlace(state, *hosts, server))
        return places

    def _open(self, random: Random) -> None:
        if len(self._open_ends()) >= 2 * CHANNELS:
            return
        number = len(self._accepting)
        opening, accepting = NumberedEnd(number * 2, number * 2 + 1), NumberedEnd(number * 2 + 1, number * 2)
        opening.other, accepting.other = accepting, opening
        self._accepting.append(accepting)
        one, two = random.sample(CLIENTS, 2)
        self._hosts.append((one, two))

        def opened(_: IProtocol) -> None:
            stream_of(opening).write(number.to_bytes(NUMBER_SIZE, "big"))

        def failed(failure: Failure) -> None:
            failure.trap(DmsgError)
            self._failed.add(accepting)

        connecting = self._clients[one].connect(self._clients[two].public_key, OpeningFactory(opening))
        connecting.addCallbacks(opened, failed)

    def _close(self, random: Random) -> None:
        ends = self._open_ends()
        if ends:
            stream_of(random.choice(ends)).loseConnection()


def _state_of(end: NumberedEnd) -> str | None:
    """Return the state of an end of a channel, one of :data:`STATES`; None if the end has ended."""
    if end.lost is not None:
        return None
    if end.transport is None:
        return OPENING if end.other.lost is None else None
    if end.other.lost is not None or stream_of(end).disconnecting:
        return CLOSING
    return IDLE if end.other.received == end.sent else IN_FLIGHT


class _Servers:
    """Part of a lab that starts and stops servers. Its servers are those of the Messaging System, not those of 2019."""

    def __init__(self, lab: Lab, profile: Profile) -> None:
        self._lab = lab
        self._profile = profile
        self.network, self.clock = lab.network, lab.clock
        self.servers = lab.servers
        self.kill, self.leave = lab.kill, lab.leave

    def add_server(self, name: str) -> Server:
        """Start a server on the host of that name."""
        host = self.network.host(name)
        host.revive()
        server = Server(
            host.reactor,
            self._lab.key(name),
            [f"tcp:{SERVER_PORT}:interface={host.address}"],
            ServerSettings(
                public_address=f"{host.address}:{SERVER_PORT}",
                discovery=self._lab.lookups(host),
                random=self._lab.random,
            ),
            profile=self._profile,
        )
        server.startService()
        self.servers[name] = server  # type: ignore[assignment]  # The lab only stops and kills it.
        return server


def draw_plan(seed: int, steps: int, aims: Sequence[Aim] = ()) -> Plan:
    """Return the plan that is drawn from a seed.

    :param aims: faults that the plan contains more often, each with the state of an end in which it should happen.
    """
    return draw(seed, steps, FAULTS, aims=aims, ways=WAYS, before_ways=BEFORE_WAYS)


def follow(plan: Plan) -> tuple[MessagingWalk, Trace]:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with repeatable_lab(plan.seed, trace=trace) as lab:
        walk = MessagingWalk(lab, plan)
        with explained(plan.seed, walk, trace):
            walk.run()
            lab.stop()
    return walk, trace


def main() -> None:
    """Run random walks with the options of the command line."""

    def done(plan: Plan) -> Done:
        walk, trace = follow(plan)
        return Done(walk.delivered, walk.faults, trace, walk.coverage)

    run(
        "dmsg.testing.messaging_walk",
        __doc__,
        STEPS,
        draw_plan,
        done,
        "bytes arrived",
        ", all correct, and no channel hangs",
        steered=draw_plan,
    )


if __name__ == "__main__":
    main()
