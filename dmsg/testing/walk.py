"""Random walk of a network through faults and lies. The promise of streams (:mod:`dmsg.testing.promise`) is checked at
every step.

``python -m dmsg.testing.walk --seconds 60`` runs one walk after another, each with another seed, until a walk fails,
and prints the seed of this walk. With ``--lies`` servers lie, too. The seed also determines the number of servers and
clients, and whether there is a second discovery, which may be down or lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from dmsg.clients.publish import REFRESH_EVERY
from dmsg.testing.bystanders import HARBOUR
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.old_party import NEW_HOST, OLD_HOST, OldParty
from dmsg.testing.old_programs import OldPair
from dmsg.testing.plan import INSTANT, LIES, PATIENCE, Plan, Step
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.single_faults import SingleFaults
from dmsg.testing.stream_places import STATES, StreamPlace, obstacle, parties_of
from dmsg.testing.walk_command import Done, counted, explained, run
from dmsg.testing.walk_coverage import WalkCoverage, hosts_in_role, pairs
from dmsg.testing.walk_kinds import DISCOVERY_LIE_OF_FAULT, EVERY_FAULT, EVERY_LIE, STEPS, draw_plan
from dmsg.testing.walk_liars import LyingSecond, WalkLiars
from dmsg.testing.walk_streams import WalkStreams
from dmsg.testing.walk_waits import Waits
from dmsg.v2019.client import Client

SETTLE_TIMEOUT = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""
REACHABLE_AFTER = 1.2 * REFRESH_EVERY + 200.0
"""Maximum seconds between the repair of all faults and the time at which each client is reachable again. A discovery
that was killed has lost the entries, and clients post them again after this time."""
LOAD_SECONDS = 120.0
"""Seconds after the recovery for which the requests to discovery are counted."""
MAX_IDLE_REQUESTS = 15.0
"""Maximum number of requests per minute to discovery after the recovery, as an average of all clients and servers."""
SECOND_DISCOVERY = "discovery-2"
"""Host of the second discovery."""
RESUME_TIMEOUT = 3600.0
"""Seconds for which a client of a walk tries to resume a stream."""
WAIT_PROBABILITY = 0.2
"""Probability that a program begins to wait for its client in a step."""


class Walk:
    """Random walk of a network under faults.

    :param lab: lab in which only discovery runs.
    :param trace: trace of the lab.
    :param plan: plan of the walk.
    :ivar faults: names of the faults so far, in order.
    :ivar old_programs: clients of 2019 that repeat exchanges; None if the shape of the network has none.
    :ivar old_party: client of 2019 that communicates with a client of today; None if the shape of the network has none.
    :ivar coverage: states of the streams in which the faults and lies happened, and the roles of the hosts to which
        they happened.
    """

    def __init__(self, lab: Lab, trace: Trace, plan: Plan) -> None:
        self.seed = lab.seed
        self.trace = trace
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        shape = plan.shape
        self._servers = tuple(f"server-{number}" for number in range(1, shape.servers + 1))
        self._names = ("alice", "bob", *(f"client-{number}" for number in range(3, shape.clients + 1)))
        self._clients: dict[str, Client] = {}
        self._server_names = {bytes(lab.key(name).public): name for name in (*self._servers, HARBOUR)}
        self._streams = WalkStreams(lab, self._clients, self.seed)
        self._waits = Waits(lab, self._clients)
        others = (
            "discovery",
            *([SECOND_DISCOVERY] if shape.second else []),
            *(("carol", "dave", HARBOUR) * plan.lying),
        )
        # In a network with one server, a fault may kill or stop this server.
        least = min(1, shape.servers - 1)
        # In a walk with lies, the programs of 2019 use a server without faults, and must not be interrupted.
        old = (OLD_HOST, NEW_HOST) * (shape.old and not plan.lying)
        clients = (*self._names, *old)
        self._faults = Faults(lab, self._servers, clients, self._streams.open, others=others, least=least)
        self.coverage = WalkCoverage(EVERY_LIE if plan.lying else EVERY_FAULT, STATES, parties_of, obstacle)
        self._single = SingleFaults(lab, self._servers, self._server_names, self._clients, self._streams, self._waits)
        self._liars = WalkLiars(lab, trace, lambda kind, host: self._note(kind, self._places(), (host,)))
        self._second: LyingSecond | None = None
        self.old_programs: OldPair | None = None
        self.old_party: OldParty | None = None
        self._own: dict[str, Callable[[Step], object]] = {
            LIES: lambda step: self._liars.lie(step, self._aimed_hosts(step)),
            "honest": lambda step: self._liars.stop_lying(),
            "open": lambda step: self._streams.open_one(Random(step.chance)),
            "finish": lambda step: self._streams.finish_one(Random(step.chance)),
            "small pieces": lambda step: self._streams.say_small_pieces(Random(step.chance)),
            "strangers flood": lambda step: self._liars.flood(Random(step.chance)),
            "strangers resume": lambda step: self._liars.resume(Random(step.chance), self._streams.lasting[2]),
            "lying end": self._liars.lie_at_an_end,
            **dict.fromkeys(DISCOVERY_LIE_OF_FAULT, self._liars.lie_of_discovery),
        }
        self._of_one_host: dict[str, Callable[[Step], str]] = {
            "kill client": self._kill_client,
            "kill discovery": self._kill_discovery,
            "lost last frame": self._lose_last_frame,
        }
        self._candidates: dict[str, Callable[[], Sequence[str]]] = {
            LIES: lambda: self._faults.running,
            "kill client": lambda: self._names[1:],
            "kill discovery": self._discoveries,
            "lost last frame": lambda: self._names,
        }

    @property
    def lies(self) -> Counter[str]:
        """Number of lies that were told, by kind."""
        return self._liars.told

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged bytes of all streams together."""
        return self._streams.acknowledged

    def run(self) -> None:
        """Run the walk, repair all faults, and check that every byte arrives, that a new stream can be opened, and that
        every Deferred on which a program waits fires. Then cause single faults, and check the same again.

        :raises PromiseBroken: a stream has broken the promise.
        :raises AssertionError: a stream has not recovered.
        """
        self._start()
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        self._liars.stop_lying(but_the_last=self.plan.keeps_last_lie)
        try:
            self._waits.check()
            self.lab.network.run_until(self._streams.is_all_there, SETTLE_TIMEOUT)
            self._streams.check_reachable(Random(f"last {self.seed}"), REACHABLE_AFTER)
            old = self.old_programs
            if old is not None:
                finished = old.finished
                self.lab.network.run_until(lambda: old.is_ahead_of(finished), SETTLE_TIMEOUT)
            party = self.old_party
            if party is not None:
                conversations = list(party.finished)
                self.lab.network.run_until(lambda: party.is_ahead_of(conversations), SETTLE_TIMEOUT)
            self._check_load()
            self._check_single_faults()
        except AssertionError as error:
            raise type(error)(f"{error}: {self._state()}") from error
        self._check()
        self._liars.stop_lying()

    def _check_single_faults(self) -> None:
        """Check that the network recovers from single faults.

        :raises PromiseBroken: a stream has broken the promise, or a Deferred does not fire.
        :raises AssertionError: a stream does not recover.
        """
        # The last server that lies could otherwise be the only one left when another server shuts down.
        self._liars.stop_lying()
        random = Random(f"single faults {self.seed}")
        server = self._single.read_while_moving(random)
        self.lab.network.run_until(self._streams.is_all_there, SETTLE_TIMEOUT)
        self._check()
        if server:
            self.lab.add_server(server)
        self._single.lose_last_frame(random)
        self.lab.network.run_until(self._streams.is_all_there, SETTLE_TIMEOUT)
        self._single.go_half_open(random)
        self.lab.network.run_until(self._streams.is_all_there, SETTLE_TIMEOUT)
        self._single.lose_servers_while_posting(random)
        self.lab.network.run_until(self._streams.is_all_there, SETTLE_TIMEOUT)

    def _check_load(self) -> None:
        """Check that clients and servers do not send too many requests to the first discovery, whatever the second
        discovery answers.

        :raises PromiseBroken: a client or server has sent too many requests.
        """
        host = self.lab.network.host("discovery")
        before = host.accepted
        self.lab.network.run(LOAD_SECONDS)
        asked = (host.accepted - before) * 60 / LOAD_SECONDS
        limit = MAX_IDLE_REQUESTS * (len(self.lab.clients) + len(self.lab.servers))
        if asked > limit:
            raise PromiseBroken(f"discovery gets {asked:.0f} requests a minute, and at most {limit:.0f} are expected")

    # --- the hosts ---

    def _start(self) -> None:
        lab, shape = self.lab, self.plan.shape
        if shape.second:
            second = lab.add_discovery(SECOND_DISCOVERY)
            if shape.second == "down":
                lab.network.host(SECOND_DISCOVERY).kill()
            elif shape.second == "lying":
                self._second = LyingSecond(lab, SECOND_DISCOVERY, second, self.seed)
        if shape.old and not self.plan.lying and shape.servers > 1:
            lab.old_servers.add(self._servers[0])
        self._slow_down()
        for name in self._servers:
            lab.add_server(name)
        if self.plan.lying:
            assert lab.discovery is not None
            self._liars.watch_discovery(lab.discovery)
            bystanders = self._liars.add_bystanders()
        for name in self._names:
            self._start_client(name)
        lab.settle()
        remotes = [("bob", self._clients["bob"]), (self._names[-1], self._clients[self._names[-1]])]
        if self.plan.lying:
            self._liars.start()
            remotes[1] = ("dave", bystanders.dave)
        for client in dict(remotes).values():
            self._streams.listen(client)
        self._streams.start("alice", remotes)
        if shape.old:
            # No fault happens to the honest server of a walk with lies.
            server = HARBOUR if self.plan.lying else self._servers[0]
            self.old_programs = OldPair(lab, server, self.seed, is_steady=self.plan.lying)
            self.old_party = OldParty(lab, server, self.seed, is_steady=self.plan.lying)

    def _slow_down(self) -> None:
        network = self.lab.network
        for name in self._names:
            for server in self._servers:
                for path in network.both_ways(network.host(name), network.host(server)):
                    path.delay = self.plan.shape.delay

    def _start_client(self, name: str) -> None:
        if name == "alice" and self.plan.lying:
            keys = [self.lab.key(one).public for one in self._servers]
            client = self.lab.add_client(name, resume_timeout=RESUME_TIMEOUT, only=keys, min_servers=min(2, len(keys)))
        else:
            client = self.lab.add_client(name, resume_timeout=RESUME_TIMEOUT)
        self._clients[name] = client

    def _kill_client(self, step: Step) -> str:
        """Kill a client other than ``alice``, and start it again with the same key. It has forgotten its streams."""
        random = Random(step.chance)
        wanted = self._aimed_hosts(step)
        name = random.choice([name for name in self._names[1:] if name in wanted] or self._names[1:])
        self._streams.client_was_killed(name)
        self._waits.client_was_killed(name)
        self.lab.kill(name)
        self.lab.network.host(name).revive()
        self._start_client(name)
        self._streams.open_one(random)
        return name

    def _kill_discovery(self, step: Step) -> str:
        """Kill a discovery, and start it again with an empty store."""
        name = Random(step.chance).choice(self._discoveries())
        self.lab.network.host(name).kill()
        if name == SECOND_DISCOVERY:
            self.lab.add_discovery(name)
        else:
            discovery = self.lab.start_discovery()
            if self.plan.lying:
                self._liars.watch_discovery(discovery)
        return name

    def _discoveries(self) -> Sequence[str]:
        """Return the names of the discoveries that may be killed."""
        return ["discovery"] + [SECOND_DISCOVERY] * (self.plan.shape.second == "honest")

    def _lose_last_frame(self, step: Step) -> str:
        """Lose a frame at the only server that the initiator of a stream reaches. Return the name of the initiator."""
        self._liars.stop_lying()
        return self._single.lose_last_frame_at_only_server(Random(step.chance), self._aimed_hosts(step))

    # --- steps ---

    def _do(self, step: Step) -> None:
        self._streams.say(step.says)
        if self._liars.bystanders is not None:
            self._liars.bystanders.say()
        if self._second is not None:
            self._second.change()
        if self.old_programs is not None:
            self.old_programs.proceed()
        if self.old_party is not None:
            self.old_party.proceed()
        if step.at:
            self.lab.network.wait_for(
                lambda: (
                    any(place.state == step.at for place in self._places()) and (not step.to or self._aimed_hosts(step))
                ),
                PATIENCE,
                INSTANT,
            )
        if step.fault:
            self.faults.append(step.fault)
            self.trace.note(self.lab.clock.seconds(), "fault", step.fault)
            places = self._places()
            self._note(step.fault, places, self._make(step))
        random = Random(f"waits {step.chance}")
        if random.random() < WAIT_PROBABILITY:
            self._waits.begin_any(random)
        self.lab.network.run(step.seconds)
        self._check()

    def _make(self, step: Step) -> Sequence[str]:
        """Cause a fault. Return the names of the hosts to which it happened."""
        of_one_host, own = self._of_one_host.get(step.fault), self._own.get(step.fault)
        if of_one_host is not None:
            name = of_one_host(step)
            return (name,) if name else ()
        if own is not None:
            own(step)
            return ()
        self._faults.make(step.fault, Random(step.chance), self._aimed_hosts(step))
        return self._faults.hit

    def _aimed_hosts(self, step: Step) -> set[str]:
        """Return the names of the hosts that have the role ``step.to`` for a stream in the state ``step.at``, and to
        which the fault of the step can happen."""
        candidates = self._candidates.get(step.fault)
        hosts = self._faults.candidates(step.fault) if candidates is None else candidates()
        return hosts_in_role(self._places(), step.at, step.to, hosts)

    def _places(self) -> list[StreamPlace]:
        return self._streams.places(self._server_names)

    def _states(self) -> set[str]:
        return {place.state for place in self._places()}

    def _note(self, kind: str, places: Sequence[StreamPlace], hosts: Sequence[str]) -> None:
        """Count a fault or lie in the coverage."""
        self.coverage.note(kind, pairs(places, hosts))

    def _check(self) -> None:
        self._streams.check()
        self._liars.check(() if self.old_programs is None else self.old_programs.rude_at)
        if self.old_programs is not None:
            self.old_programs.check()
        if self.old_party is not None:
            self.old_party.check()

    def _state(self) -> str:
        """Return a text with the state of a walk that makes no progress, for an error."""
        clients = [
            (name, client.status, len(client.servers), client.last_error, client.streams.suspended)
            for name, client in self._clients.items()
        ]
        return f"{self._streams.text()}; {self.plan.shape}; clients {clients}; servers {list(self.lab.servers)}"


def walk(seed: int, *, steps: int = STEPS, lies: bool = False) -> Walk:
    """Do the random walk that a seed determines.

    :param lies: whether servers may lie.
    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    return follow(draw_plan(seed, steps, lies=lies))


def follow(plan: Plan) -> Walk:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with repeatable_lab(plan.seed, trace=trace) as lab:
        one = Walk(lab, trace, plan)
        with explained(plan.seed, one, trace, lambda: f"; lies: {counted(one.lies) or 'none'}"):
            one.run()
            lab.stop()
    return one


def _followed(plan: Plan) -> Done:
    one = follow(plan)
    return Done(one.acknowledged, one.faults, one.trace, one.coverage, one.lies)


def main() -> None:
    """Run random walks with the options of the command line."""
    run(
        "dmsg.testing.walk",
        __doc__,
        STEPS,
        draw_plan,
        _followed,
        "bytes acknowledged",
        "; each arrived once and in order",
        steered=draw_plan,
        lying=partial(draw_plan, lies=True),
    )


if __name__ == "__main__":
    main()
