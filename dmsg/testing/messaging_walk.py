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

from twisted.internet.interfaces import IProtocol

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
from dmsg.testing.plan import Plan, Step, draw
from dmsg.testing.walk_command import Done, explained, run

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


class MessagingWalk:
    """Random walk of a network of the Messaging System.

    :param lab: lab in which only discovery runs.
    :ivar faults: names of the faults so far, in order.
    :ivar delivered: number of bytes that have arrived.
    """

    def __init__(self, lab: Lab, plan: Plan) -> None:
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self._profile, self._acks = Random(f"profile {plan.seed}").choice(DIALECTS)
        self._servers = _Servers(lab, self._profile)
        self._faults = Faults(self._servers, SERVERS, CLIENTS, [])
        self._clients: dict[str, Client] = {}
        self._accepting: list[NumberedEnd] = []
        """Accepting ends, by the numbers of their channels."""

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
        if step.fault:
            self.faults.append(step.fault)
            random = Random(step.chance)
            if step.fault == OPEN:
                self._open(random)
            elif step.fault == CLOSE:
                self._close(random)
            else:
                self._faults.make(step.fault, random)
        self.lab.network.run(step.seconds)
        self.check()

    def _open(self, random: Random) -> None:
        if len(self._open_ends()) >= 2 * CHANNELS:
            return
        number = len(self._accepting)
        opening, accepting = NumberedEnd(number * 2, number * 2 + 1), NumberedEnd(number * 2 + 1, number * 2)
        opening.other, accepting.other = accepting, opening
        self._accepting.append(accepting)
        one, two = random.sample(CLIENTS, 2)

        def opened(_: IProtocol) -> None:
            stream_of(opening).write(number.to_bytes(NUMBER_SIZE, "big"))

        connecting = self._clients[one].connect(self._clients[two].public_key, OpeningFactory(opening))
        connecting.addCallbacks(opened, lambda failure: failure.trap(DmsgError))

    def _close(self, random: Random) -> None:
        ends = self._open_ends()
        if ends:
            stream_of(random.choice(ends)).loseConnection()


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
        return Done(walk.delivered, walk.faults, trace)

    def plan(seed: int, steps: int) -> Plan:
        return draw(seed, steps, FAULTS)

    run(
        "dmsg.testing.messaging_walk",
        __doc__,
        STEPS,
        plan,
        done,
        "bytes arrived",
        ", all correct, and no channel hangs",
    )


if __name__ == "__main__":
    main()
