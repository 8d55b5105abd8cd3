"""Random walk of a discovery through faults and strangers. The guarantees about entries are checked at every step.

``python -m dmsg.testing.discovery_walk --seconds 60`` runs one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.

Several programs post, replace and delete entries, two of them with the same key. The guarantees: an acknowledged entry
is not lost, and is not replaced by an older one; nobody changes the entry of another key; a deleted entry does not come
back; and after the faults each program can post.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.discovery.entries.dialects import Dialect
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.discovery.entries.rules import Deletion
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.errors import DmsgError, EntryNotFound
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import UNTUNED_NOTICES, Faults
from dmsg.testing.key_records import (
    ABSENT,
    DELETING,
    DISCOVERY,
    OTHER_OWNER,
    OWNER,
    POSTING,
    STATES,
    STORED,
    TWIN,
    KeyRecord,
)
from dmsg.testing.lab import DISCOVERY_PORT, Lab, repeatable_lab
from dmsg.testing.network import Host
from dmsg.testing.plan import Aim, Plan, Step, draw
from dmsg.testing.walk_command import Done, explained, run
from dmsg.testing.walk_coverage import NO_PARTY, WalkCoverage

OWNERS = ("owner-1", "owner-2", "owner-3", "twin of owner-1")
"""Hosts of the programs. The last one uses the key of the first."""
STRANGER = "stranger"
STEPS = 60
DELAY = 0.01
"""Seconds that a packet between a program and discovery takes until a fault changes the delay."""
SETTLE_TIMEOUT = 120.0
"""Maximum seconds of the lab's time, after the faults, in which all requests must end, and in which each program must
then post."""
NETWORK = ("delay", "loss", "reorder", "partition", "heal", "heal", "wall clock", "wall clock", "bandwidth")
FORGERIES = ("replay an entry", "replay an entry", "forge an entry", "forge a deletion")
DELETE, KILL, RESET, HALF_OPEN = "delete", "kill discovery", "reset", "half-open"
FAULTS = (*NETWORK, *FORGERIES, DELETE, DELETE, KILL, KILL, RESET, HALF_OPEN)
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
_HOSTS = (OWNER, TWIN, OTHER_OWNER, DISCOVERY)
_PARTIES: dict[str, Sequence[str]] = {
    **dict.fromkeys(NETWORK, _HOSTS),
    "heal": (NO_PARTY,),
    **dict.fromkeys(FORGERIES, (NO_PARTY,)),
    **dict.fromkeys((DELETE, HALF_OPEN), _HOSTS[:-1]),
    KILL: (DISCOVERY,),
    RESET: _HOSTS,
}
_POSTS = ((0, 1), (1, 1), (2, 1))
WAYS: dict[str, Sequence[Step]] = {
    ABSENT: (Step(fault=DELETE, seconds=3.0),),
    POSTING: (Step(_POSTS), Step(_POSTS, seconds=0.015), Step(_POSTS, seconds=0.03)),
    STORED: (Step(_POSTS, seconds=3.0),),
    DELETING: (Step(fault=DELETE), Step(fault=DELETE, seconds=0.015), Step(fault=DELETE, seconds=0.03)),
}
"""Steps of a walk after which an entry is often in a state, by the name of the state."""


class DiscoveryWalk:
    """Random walk of a discovery whose store is in a file.

    :param lab: lab in which a discovery runs. The walk replaces it.
    :param directory: existing directory for the file of the store.
    :ivar faults: names of the faults so far, in order.
    :ivar coverage: states of the entries in which faults happened, and the roles of the hosts to which they happened.
    """

    def __init__(self, lab: Lab, plan: Plan, directory: Path) -> None:
        self.coverage = WalkCoverage(FAULTS, STATES, lambda kind: _PARTIES[kind])
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self._store = f"sqlite:{directory / 'entries.sqlite'}"
        self._records = {name: KeyRecord(lab.key(name)) for name in OWNERS[:-1]}
        self._records[OWNERS[-1]] = self._records[OWNERS[0]]
        self._faults = Faults(lab, (), (*OWNERS, "discovery"), [], notices=UNTUNED_NOTICES)
        self._old: list[bytes] = []
        """Entries that discovery has stored so far. A stranger replays them, or makes forgeries from them."""
        self._changed = 0

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged changes of all keys."""
        return sum(record.acknowledged for record in {id(one): one for one in self._records.values()}.values())

    def run(self) -> None:
        """Run the walk, repair all faults, and check that each program can post.

        :raises PromiseBroken: a guarantee is broken.
        :raises AssertionError: a program cannot post.
        """
        self.lab.kill("discovery")
        self._close = self._start()
        self._lookups = {name: self._lookup(self.lab.network.host(name)) for name in (*OWNERS, STRANGER)}
        for name in self._lookups:
            for path in self.lab.network.both_ways(self.lab.network.host(name), self.lab.network.host("discovery")):
                path.delay = DELAY
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        self._wait(lambda: not any(record.posting or record.deleting for record in self._records.values()))
        for name in OWNERS:
            self._post_at_last(name)
        self.check()
        self._close()

    def _lookup(self, host: Host) -> Lookup:
        """Return a client of discovery with the HTTP client of programs, which keeps idle connections."""
        return Lookup(host.reactor, f"http://{self.lab.network.host('discovery').address}:{DISCOVERY_PORT}")

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition about requests is true.

        :raises AssertionError: the condition is not true after ``SETTLE_TIMEOUT`` seconds.
        """
        try:
            self.lab.network.run_until(condition, SETTLE_TIMEOUT)
        except AssertionError as error:
            left = {name: (one.posting, one.deleting) for name, one in self._records.items()}
            raise type(error)(f"requests to discovery hang: {error}; POSTs and DELETEs under way: {left}") from error

    def check(self) -> None:
        """Check the entries of all keys.

        :raises PromiseBroken: a guarantee is broken.
        """
        for record in self._records.values():
            body: bytes | None = None
            with suppress(EntryNotFound):
                body = self._read(record.key.public.hex())
            record.check(body, self.lab.key(STRANGER).public.hex().encode())
            if body is not None and body not in self._old:
                self._old.append(body)

    def _read(self, static: str) -> bytes:
        results: list[Any] = []
        self._entries.get(static).addBoth(results.append)
        (result,) = results
        if isinstance(result, bytes):
            return result
        result.raiseException()
        raise AssertionError

    def _start(self) -> Callable[[], None]:
        """Start discovery; return the function that closes its store."""
        self.lab.network.host("discovery").revive()
        discovery = self.lab.start_discovery(self._store)
        assert discovery._running is not None  # noqa: SLF001  # No public name leads to the store.
        store: Any = discovery._running.store  # noqa: SLF001
        self._entries = store
        close: Callable[[], None] = store._db.close  # noqa: SLF001
        return close

    def _do(self, step: Step) -> None:
        random = Random(step.chance)
        for number, _ in step.says:
            if number < len(OWNERS):
                self._post(OWNERS[number])
        if step.fault:
            self.faults.append(step.fault)
            if step.fault == KILL:
                # The clock is advanced before the kill, so that requests are under way when the process dies.
                self.lab.network.run(random.choice((0.0, 0.015, 0.03)))
            states = {name: record.state for name, record in self._records.items()}
            self._note(step.fault, states, self._make(step.fault, random))
        self.lab.network.run(step.seconds)
        self.check()

    def _make(self, fault: str, random: Random) -> Sequence[str]:
        """Cause a fault. Return the names of the hosts to which it happened."""
        if fault in FORGERIES:
            self._forge(fault, random)
            return ()
        if fault == KILL:
            self._kill()
            return ("discovery",)
        if fault in (DELETE, RESET):
            name = random.choice(OWNERS if fault == DELETE else (*OWNERS, "discovery"))
            if fault == DELETE:
                self._delete(name)
            elif not self.lab.network.host(name).reset():
                return ()
            return (name,)
        # A new address of discovery would not be a fault of its connections: no program could find it any more.
        self._faults.make(fault, random, OWNERS if fault == HALF_OPEN else ())
        return self._faults.hit

    def _note(self, kind: str, states: Mapping[str, str], hosts: Sequence[str]) -> None:
        """Count a fault in the coverage of the walk.

        :param states: states of the entries before the fault, by the name of an owner.
        """
        names = OWNERS[:-1]
        if not hosts:
            self.coverage.note_states(kind, (states[name] for name in names))
        self.coverage.note(kind, ((self._party_of(host, name), states[name]) for host in hosts for name in names))

    def _party_of(self, host: str, owner: str) -> str:
        if host not in self._records:
            return DISCOVERY
        if self._records[host] is not self._records[owner]:
            return OTHER_OWNER
        return OWNER if host == owner else TWIN

    def _kill(self) -> None:
        """Kill discovery, and start it again with the same file."""
        self.lab.kill("discovery")
        self._close()
        self._close = self._start()

    def _change(self, name: str, change: Callable[[], Deferred[Any]]) -> Deferred[Any]:
        changing: list[Deferred[Any]] = []
        self.lab.network.host(name).do(lambda: changing.append(change()))
        return changing[0]

    def _post(self, name: str) -> Deferred[None]:
        record = self._records[name]
        self._changed += 1
        servers = (self.lab.key(f"server {self._changed}").public.hex(),)

        def make(present: Entry) -> Entry:
            return replace(present, client=ClientMeta(servers))

        lookup = self._lookups[name]
        record.posting += 1
        deletions = record.deletions
        posting = self._change(name, lambda: lookup.update(record.key, make))

        def ended(result: Entry | Failure) -> Entry | Failure:
            record.posting -= 1
            return result

        posting.addBoth(ended)
        return posting.addCallbacks(
            record.posted, lambda failure: failure.trap(DmsgError) and None, callbackArgs=(deletions,)
        )

    def _delete(self, name: str) -> None:
        record = self._records[name]
        record.deleting += 1
        record.may_be_deleted = True
        before = set(self._old)
        lookup = self._lookups[name]
        deleting = self._change(name, lambda: lookup.delete(record.key))

        def ended(result: object) -> None:
            record.deleting -= 1
            record.deletions += 1
            if result is None:
                record.acknowledged += 1
                record.dead |= before
            elif isinstance(result, Failure):
                result.trap(DmsgError)

        deleting.addBoth(ended)

    def _forge(self, kind: str, random: Random) -> None:
        """Let a stranger send something to discovery that must not change an entry of another key."""
        own = self.lab.key(STRANGER)
        method, path = "POST", "/discovery/entries"
        if kind == "replay an entry" and self._old:
            body = random.choice(self._old)
        elif kind == "forge an entry" and self._old:
            # The newest recorded entry is probably still stored. A forged entry with the next sequence would replace it
            # if its signature were accepted.
            entry = Dialect.SEED.decode_signed(self._old[-1])
            client = ClientMeta((own.public.hex(),))
            entry = replace(entry, sequence=entry.sequence + 1, timestamp=entry.timestamp + 10**18, client=client)
            body = entry.sign(own).to_json()
        elif kind == "forge a deletion" and self._old:
            entry = Dialect.SEED.decode_signed(self._old[-1])
            body = Deletion(entry.static, entry.sequence, entry.timestamp + 10**18).sign(own).to_json()
            method, path = "DELETE", f"/discovery/entries/{entry.static}"
        else:
            return
        lookup = self._lookups[STRANGER]
        asking = self._change(STRANGER, lambda: lookup.ask(method, path, body))
        asking.addErrback(lambda failure: failure.trap(DmsgError))

    def _post_at_last(self, name: str) -> None:
        record = self._records[name]
        end = self.lab.clock.seconds() + SETTLE_TIMEOUT
        while self.lab.clock.seconds() < end:
            before = record.acknowledged
            posting = self._post(name)
            self.lab.network.run_until(lambda posting=posting: posting.called, SETTLE_TIMEOUT)  # type: ignore[misc]
            self.check()
            if record.acknowledged > before:
                return
        raise AssertionError(f"{name} cannot post")


def draw_plan(seed: int, steps: int, aims: Sequence[Aim] = ()) -> Plan:
    """Return the plan that is drawn from a seed.

    :param aims: faults that the plan contains more often, each with the state of an entry in which it should happen.
    """
    return draw(seed, steps, FAULTS, aims=aims, ways=WAYS)


def follow(plan: Plan) -> Done:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with (
        tempfile.TemporaryDirectory(prefix="dmsg-discovery-walk-") as directory,
        repeatable_lab(plan.seed, trace=trace) as lab,
    ):
        walk = DiscoveryWalk(lab, plan, Path(directory))
        with explained(plan.seed, walk, trace):
            walk.run()
    return Done(walk.acknowledged, walk.faults, trace, walk.coverage)


def main() -> None:
    """Run random walks with the options of the command line."""
    run(
        "dmsg.testing.discovery_walk",
        __doc__,
        STEPS,
        draw_plan,
        follow,
        "changes acknowledged",
        "; none was lost, and nobody changed an entry of another key",
        steered=draw_plan,
    )


if __name__ == "__main__":
    main()
