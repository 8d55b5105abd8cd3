"""Parties of a random walk that lie: servers, discoveries, strangers, and a client that lies over its own streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random

from dmsg.discovery.service.service import Discovery
from dmsg.errors import DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.testing.bystanders import HARBOUR, Bystanders, check_blame
from dmsg.testing.determinism import Trace
from dmsg.testing.lab import Lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.lying_discovery import KINDS as DISCOVERY_KINDS, LyingDiscovery
from dmsg.testing.lying_ends import KINDS as END_KINDS, LyingEnds
from dmsg.testing.plan import LIE, Step
from dmsg.testing.promise import Talker
from dmsg.testing.strangers import Strangers
from dmsg.testing.walk_kinds import DISCOVERY_LIE_OF_FAULT

ENDS_AT_ONCE = 3
"""Number of lies that a lying end tells in a step, each on a new stream."""
CHANGE_PROBABILITY = 0.1
"""Probability that a second discovery begins to tell another kind of lie in a step of the walk."""


class WalkLiars:
    """Parties that lie in a walk, and the bystanders that they must not harm.

    :param note: callback invoked with the kind of each lie that a server tells, and the name of its host.
    :ivar bystanders: the bystanders; None until :meth:`add_bystanders` is called.
    :ivar flooded: whether strangers have flooded a bystander.
    """

    def __init__(self, lab: Lab, trace: Trace, note: Callable[[str, str], None]) -> None:
        self._lab = lab
        self._alliance = Alliance(trace, lambda kind: note(f"{LIE}{kind}", self._alliance.teller))
        self._liars: dict[str, Liar] = {}
        self._last_liar = ""
        self._discovery: LyingDiscovery | None = None
        self._strangers: Strangers | None = None
        self._ends: LyingEnds | None = None
        self.bystanders: Bystanders | None = None

    @property
    def told(self) -> Counter[str]:
        """Number of lies that were told, by kind."""
        return self._alliance.told

    def watch_discovery(self, discovery: Discovery) -> None:
        """Prepare a running discovery, so that it can lie later."""
        self._discovery = LyingDiscovery(self._lab.network.host("discovery"), discovery)

    def add_bystanders(self) -> Bystanders:
        """Start the bystanders and their server."""
        self.bystanders = Bystanders(self._lab)
        return self.bystanders

    def start(self) -> None:
        """Connect the bystanders, and start strangers and a lying client at their server."""
        assert self.bystanders is not None
        self.bystanders.start()
        self._strangers = Strangers(self._lab, HARBOUR, self.bystanders.dave.public_key)
        self._ends = LyingEnds(self._lab, HARBOUR, self.bystanders.dave)

    def check(self, rude_at: Sequence[str] = ()) -> None:
        """Check that no honest server has counted a violation of the protocol by a client
        (:data:`~dmsg.testing.bystanders.BLAMING_REASONS`), and that the bystanders were not harmed.

        :param rude_at: names of servers whose clients do break the protocol.
        :raises PromiseBroken: a server has counted such a violation, or a bystander was harmed.
        """
        spared = {*self._liars, *rude_at}
        if self._strangers is not None and self._strangers.flooded:
            # Strangers have flooded this server, so it may have counted drops for one of the reasons in BLAME.
            spared.add(HARBOUR)
        check_blame((name, server) for name, server in self._lab.servers.items() if name not in spared)
        if self.bystanders is not None:
            self.bystanders.check()

    # --- lies ---

    def lie(self, step: Step, wanted: Collection[str] = ()) -> None:
        """Let a server lie from now on.

        :param wanted: names of hosts. The server is one of them if one of them is a server that runs.
        """
        running = [name for name in self._lab.servers if name != HARBOUR]
        if not running:
            return
        # A server with transports is preferred. Other servers send few frames, so most lies would change nothing.
        busy = [name for name in running if self._lab.servers[name].factory.relay.route_count]
        name = Random(step.chance).choice([name for name in running if name in wanted] or busy or running)
        server = self._lab.servers[name]
        liar = self._liars.get(name)
        if liar is None or liar.relay is not server.factory.relay:
            liar = self._liars[name] = Liar(self._lab.network.host(name), server, self._alliance, KINDS)
        liar.tell(step.lies)
        self._last_liar = name

    def flood(self, random: Random) -> None:
        """Let strangers flood a bystander with REQUESTs over the honest server."""
        assert self._strangers is not None
        self._strangers.flood(random)
        self.told["strangers flood"] += 1

    def resume(self, random: Random, talker: Talker) -> None:
        """Let strangers try to take over the stream between a bystander and another client.

        :param talker: end of the stream at the other client.
        """
        assert self._strangers is not None
        stream = stream_of(talker)
        if isinstance(stream, ClientStream) and talker.lost is None:
            self.told["strangers resume"] += 1
            for answer in self._strangers.resume(stream.secure_end, random):
                answer.addErrback(lambda failure: failure.trap(DmsgError))

    def lie_at_an_end(self, step: Step) -> None:
        """Let a client break the protocol on some streams with a bystander."""
        assert self._ends is not None
        for kind in Random(step.chance).sample(END_KINDS, ENDS_AT_ONCE):
            if self._ends.tell(kind, step.chance):
                self.told[f"end: {kind}"] += 1

    def lie_of_discovery(self, step: Step) -> None:
        """Let discovery lie from now on."""
        assert self._discovery is not None
        kind = DISCOVERY_LIE_OF_FAULT[step.fault]
        self._discovery.lie(kind, Random(step.chance))
        if kind:
            self.told[step.fault] += 1

    def stop_lying(self, *, but_the_last: bool = False) -> None:
        """Let servers and discovery be honest from now on.

        :param but_the_last: whether the last server that began to lie continues to lie.
        """
        for name, liar in self._liars.items():
            if not but_the_last or name != self._last_liar:
                liar.stop_lying()
        if self._discovery is not None:
            self._discovery.lie("", Random(0))


class LyingSecond:
    """Second discovery that lies until the walk ends. Now and then it changes the kind of its lies.

    :param seed: seed of the lies.
    """

    def __init__(self, lab: Lab, name: str, discovery: Discovery, seed: int) -> None:
        self._random = Random(f"second discovery {seed}")
        self._discovery = LyingDiscovery(lab.network.host(name), discovery)

    def change(self) -> None:
        """Choose another kind of lie, with the probability ``CHANGE_PROBABILITY``."""
        if not self._discovery.kind or self._random.random() < CHANGE_PROBABILITY:
            self._discovery.lie(self._random.choice(DISCOVERY_KINDS), Random(self._random.getrandbits(32)))
