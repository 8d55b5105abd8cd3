"""Random walk of transfers by codes through faults, lies and strangers. The guarantees of codes and parcels are checked
at every step.

``python -m dmsg.testing.code_walk --seconds 60`` runs one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.

Two pairs of people send files and directories to each other, by ``dmsg send`` and ``dmsg receive``. When a program
fails or is killed, both people start again with another code. The guarantees: under its final name a receiver has the
whole content or nothing; nobody without the code agrees or gets data; exactly the wrong guesses are counted;
a repeated transfer sends only what is missing; and after the faults every transfer finishes.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, succeed

from dmsg.testing.code_kinds import (
    AMBUSH_DELAYS,
    AMBUSH_FAULTS,
    ENDS,
    EVERY_KIND,
    FULL_DISK,
    HONEST,
    INTERCEPT,
    LENGTHEN,
    MOMENTS,
    OVERWRITE,
    REPLACE,
    REPLACE_PARTLY_RECEIVED,
    STEPS,
    Ambush,
    draw_plan,
)
from dmsg.testing.code_pairs import PAIRS, Pair
from dmsg.testing.code_programs import (
    OFFERING,
    RECEIVING,
    SENDING,
    STATES,
    OfferRecord,
    Program,
    ReceiverProgram,
    SenderProgram,
)
from dmsg.testing.code_strangers import GUESSES, NAME, SILENT, VISITS, CodeStranger
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.host_work import work_on_hosts
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.liar import Alliance, Liar
from dmsg.testing.lies import KINDS
from dmsg.testing.plan import LIE, LIES, Aim, Plan, Step
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.walk_command import Done, explained, run
from dmsg.testing.walk_coverage import WalkCoverage

SERVERS = ("server-1", "server-2", "server-3")
DELAY = 0.01
"""Seconds that a packet between a program and a server takes while no fault changes the delay."""
RATE = 500_000.0
"""Bandwidth, in bytes per second, between a program and a server while no fault changes the bandwidth. It is low, so
that transfers last long enough for faults."""
LARGE_SIZE = 2_000_000
"""Size in bytes of a large file or directory. Half of those that are sent are large. A large transfer takes some
seconds, so most faults happen during one."""
REACTION_TIME = 0.5
"""Seconds that a person in a walk takes before the next action."""
SETTLE_TIMEOUT = 800.0
"""Maximum seconds of the lab's time in which everything must finish after the last fault."""


class CodeWalk:
    """Random walk of transfers by codes.

    :param lab: lab in which only discovery runs.
    :param directory: existing, empty directory for the files.
    :ivar faults: names of the faults so far, in order.
    :ivar records: records of all codes that were told to receivers.
    :ivar ended: programs that have ended. They are stored, so that their objects are not collected: a killed process
        must do nothing any more, not even in finalizers.
    :ivar repaired_at: time at which all faults were repaired; None before.
    :ivar coverage: counts of faults and lies, by the states that programs had when they happened.
    """

    def __init__(self, lab: Lab, trace: Trace, plan: Plan, directory: Path) -> None:
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self.records: list[OfferRecord] = []
        self.ended: list[Program] = []
        self.repaired_at: float | None = None
        self.coverage = WalkCoverage(EVERY_KIND, STATES)
        self._trace = trace
        self._pairs = [Pair(self, number, directory / str(number)) for number in range(len(PAIRS))]
        self._faults = Faults(lab, SERVERS, tuple(name for pair in PAIRS for name in pair), [])
        self._alliance = Alliance(trace, lambda kind: self._note(f"lie: {kind}"))
        self._liars: list[Liar] = []
        self._random = Random(f"codes {plan.seed}")
        self._intercepting = False
        self._ambushes: list[Ambush] = []
        self._own: dict[str, Callable[[Step, Random], object]] = {
            LIES: self._lie,
            HONEST: lambda step, random: self._repent(),
            "cut": self._cut,
            "heal": self._heal,
            REPLACE_PARTLY_RECEIVED: self._replace_partly_received,
            FULL_DISK: self._fill_disk,
            "kill discovery": self._kill_discovery,
            "tell two": lambda step, random: random.choice(self._pairs).tell_another(),
            REPLACE: self._replace_source,
            LENGTHEN: self._lengthen_offered,
            OVERWRITE: self._overwrite_source,
            INTERCEPT: self._intercept,
        }
        self._own.update(dict.fromkeys(VISITS, self._visit))
        self._own.update(dict.fromkeys(ENDS, self._end))

    @property
    def finished(self) -> int:
        """Number of transfers that have finished."""
        return sum(pair.finished for pair in self._pairs)

    @property
    def lies(self) -> Counter[str]:
        """Number of lies that servers have told, by kind."""
        return self._alliance.told

    def run(self) -> None:
        """Run the walk, repair all faults, and check that every transfer finishes.

        :raises PromiseBroken: a guarantee is broken.
        :raises AssertionError: a transfer does not finish.
        """
        for name in SERVERS:
            self.lab.add_server(name)
        self._watch_discovery()
        for name in (name for pair in PAIRS for name in pair):
            self.lab.network.host(name)
        self._stranger = CodeStranger(self.lab, self.records)
        self._slow_down()
        self.lab.settle()
        for step in self.plan.steps:
            self._do(step)
        self._faults.repair()
        self._repent()
        self._slow_down()
        for host in self.lab.network.hosts.values():
            host.ahead = 0.0
        self._ambushes.clear()
        self.repaired_at = self.lab.clock.seconds()
        # Each pair ends with one more transfer, which no fault disturbs.
        for pair in self._pairs:
            pair.begin_transfer(LARGE_SIZE, self._random)
        try:
            self.lab.network.run_until(self._all_finished, SETTLE_TIMEOUT)
        except AssertionError as error:
            left = [[(one.name, one.state) for one in pair.programs] for pair in self._pairs if not pair.is_idle]
            raise type(error)(f"{error}: {len(left)} transfers are left: {left}") from error
        self.check()

    def _all_finished(self) -> bool:
        for pair in self._pairs:
            pair.proceed()
        self.check()
        return all(pair.is_idle for pair in self._pairs)

    def check(self) -> None:
        """Check all guarantees.

        :raises PromiseBroken: a guarantee is broken.
        """
        if self._stranger.broken:
            raise PromiseBroken("; ".join(self._stranger.broken[:5]))
        for record in self.records:
            record.check()
        for pair in self._pairs:
            pair.check()

    def disturb_sender(self, record: OfferRecord) -> None:
        """Once all faults are repaired, let a stranger disturb the sender of each new code: by silent streams, and by
        three wrong guesses. The transfer must succeed nevertheless."""
        if self.repaired_at is not None:
            self._stranger.visit(SILENT, record, self._random)
            for kind in self._random.choices(GUESSES, k=3):
                self._stranger.visit(kind, record, self._random)

    def _do(self, step: Step) -> None:
        random = Random(step.chance)
        for number, size in step.says:
            if number < len(self._pairs):
                drawn = Random(f"{step.chance} {number}")
                self._pairs[number].begin_transfer(drawn.choice((size, LARGE_SIZE)), drawn)
        if step.fault:
            self.faults.append(step.fault)
            self._trace.note(self.lab.clock.seconds(), "fault", step.fault)
            if "@" in step.fault:
                self._aim(step, random)
            else:
                if step.fault not in AMBUSH_FAULTS:
                    self._note(step.fault)
                self._make(step, random)
        left = step.seconds
        while True:
            self.lab.network.run(min(left, REACTION_TIME))
            for pair in self._pairs:
                pair.proceed()
            self.check()
            left -= REACTION_TIME
            if left <= 0:
                return

    def _note(self, kind: str) -> None:
        self.coverage.note_states(kind, (program.state for pair in self._pairs for program in pair.programs))

    # --- faults ---

    def _make(self, step: Step, random: Random) -> None:
        own = self._own.get(step.fault)
        if own is not None:
            own(step, random)
        else:
            self._faults.make(step.fault, random)

    def _aim(self, step: Step, random: Random) -> None:
        """Let a fault happen now if a program is in a given state, or otherwise when one next reaches this state."""
        kind, state, _ = Aim.parse(step.fault)
        ambush = Ambush(kind, Program, state, 0.0, 0.0, lambda program: self._make_at(kind, program, step, random))
        present = [program for program in self._running() if program.state == state]
        if present:
            self._spring(ambush, random.choice(present))
        else:
            self._ambushes.append(ambush)

    def _make_at(self, kind: str, program: Program, step: Step, random: Random) -> None:
        """Let a fault happen now, to the transfer of a program if it is a fault of a transfer."""
        pair = self._pair_of(program)
        receiver = pair.receiver if pair.receiver in pair.programs else None
        if kind in ENDS:
            side, end = ENDS[kind]
            for one in pair.programs:
                if isinstance(one, side):
                    end(one)
        elif kind == REPLACE:
            pair.replace_source(random)
        elif kind == LENGTHEN:
            pair.lengthen_source(random)
        elif kind == OVERWRITE:
            pair.overwrite_source(random)
        elif kind == REPLACE_PARTLY_RECEIVED:
            if receiver is not None:
                receiver.kill()
            pair.replace_source(random, partly_received=True)
        elif kind == FULL_DISK:
            if receiver is not None:
                self._fill_disk_of(receiver, random)
        elif kind.startswith(LIE):
            self._lie(step, random)
        else:
            self._make(replace(step, fault=kind), random)

    def _slow_down(self) -> None:
        """Set the initial delay and rate of all paths between programs and servers."""
        for name in (NAME, *(name for pair in PAIRS for name in pair)):
            for server in SERVERS:
                for path in self.lab.network.both_ways(self.lab.network.host(name), self.lab.network.host(server)):
                    path.delay, path.rate = DELAY, RATE

    def _heal(self, step: Step, random: Random) -> None:
        self._faults.make("heal", random)
        self._slow_down()

    def _cut(self, step: Step, random: Random) -> None:
        """Reset a connection between a program and a server after some number of further bytes."""
        one = random.choice([name for pair in PAIRS for name in pair])
        paths = self.lab.network.both_ways(self.lab.network.host(one), self.lab.network.host(random.choice(SERVERS)))
        random.choice(paths).reset_after = random.choice((1, random.randrange(1, 2000), random.randrange(1, 300_000)))

    def _end(self, step: Step, random: Random) -> None:
        """End a running program now, or, in two of three cases, when a program next reaches a state that is drawn
        here."""
        side, end = ENDS[step.fault]
        programs = [one for one in self._running() if isinstance(one, side)]
        if random.random() < 1 / 3 and programs:
            self._note(step.fault)
            end(random.choice(programs))
            return
        state = random.choice(MOMENTS[side])
        share = random.random() if state in (SENDING, RECEIVING) else 0.0
        self._ambushes.append(Ambush(step.fault, side, state, share, random.choice(AMBUSH_DELAYS), end))

    def program_changed(self, program: Program) -> None:
        """Start the delay of the first planned fault that waits for the present state of the program, if any."""
        for ambush in self._ambushes:
            if isinstance(program, ambush.side) and ambush.state == program.state and ambush.share <= program.share:
                self._ambushes.remove(ambush)
                self.lab.clock.callLater(ambush.delay, self._spring, ambush, program)
                return

    def _spring(self, ambush: Ambush, program: Program) -> None:
        if self.repaired_at is not None:
            return
        if program.has_ended:
            self._ambushes.append(ambush)
            return
        if not ambush.kind.startswith(LIE):  # A lie counts when it is told.
            self._note(ambush.kind)
        self._trace.note(self.lab.clock.seconds(), "ambush", ambush.kind)
        ambush.action(program)

    def _running(self) -> list[Program]:
        return [program for pair in self._pairs for program in pair.programs]

    def _pair_of(self, program: Program) -> Pair:
        return next(pair for pair in self._pairs if program in pair.programs)

    def _replace_source(self, step: Step, random: Random) -> None:
        """Replace a file that somebody sends. In three of ten cases, this happens now, if possible to a file that is
        being transferred. Otherwise it is planned for the time after an offer or at the beginning of the transfer.
        """
        if random.random() < 0.3:
            self._note(REPLACE)
            sending = [pair for pair in self._pairs if any(one.state == SENDING for one in pair.programs)]
            random.choice(sending or self._pairs).replace_source(random)
            return
        state = random.choice((OFFERING, OFFERING, SENDING))
        self._ambushes.append(
            Ambush(
                REPLACE,
                SenderProgram,
                state,
                0.0,
                random.choice(AMBUSH_DELAYS),
                lambda one: self._pair_of(one).replace_source(random),
            )
        )

    def _replace_partly_received(self, step: Step, random: Random) -> None:
        """Plan the kill of a receiver that has received a part of the content. Then replace a partly received file at
        the sender before the next attempt."""

        def replace(receiver: Program) -> None:
            pair = self._pair_of(receiver)
            receiver.kill()
            pair.replace_source(random, partly_received=True)

        self._ambushes.append(
            Ambush(REPLACE_PARTLY_RECEIVED, ReceiverProgram, RECEIVING, random.uniform(0.01, 1.0), 0.0, replace)
        )

    def _lengthen_offered(self, step: Step, random: Random) -> None:
        """Plan that a file is replaced by a longer one between its offer and its transfer."""

        def lengthen(sender: Program) -> None:
            self._pair_of(sender).lengthen_source(random)

        self._ambushes.append(Ambush(LENGTHEN, SenderProgram, OFFERING, 0.0, random.choice(AMBUSH_DELAYS), lengthen))

    def _overwrite_source(self, step: Step, random: Random) -> None:
        """Plan that the source is overwritten after the sender has read a part of it."""

        def overwrite(sender: Program) -> None:
            self._pair_of(sender).overwrite_source(random)

        self._ambushes.append(Ambush(OVERWRITE, SenderProgram, SENDING, random.uniform(0.01, 0.8), 0.0, overwrite))

    def _fill_disk(self, step: Step, random: Random) -> None:
        """Plan that the disk of a receiver becomes full. In half of the cases, it is freed at once."""

        def fill(receiver: Program) -> None:
            assert isinstance(receiver, ReceiverProgram)
            self._fill_disk_of(receiver, random)

        self._ambushes.append(Ambush(FULL_DISK, ReceiverProgram, RECEIVING, random.random(), 0.0, fill))

    @staticmethod
    def _fill_disk_of(receiver: ReceiverProgram, random: Random) -> None:
        receiver.disk.room = random.choice((1, random.randrange(1, 300_000)))
        receiver.disk.is_freed_soon = random.random() < 0.5

    def _kill_discovery(self, step: Step, random: Random) -> None:
        """Kill discovery, and start it again with an empty store."""
        host = self.lab.network.host("discovery")
        host.kill()
        host.revive()
        self.lab.start_discovery()
        self._watch_discovery()

    def _watch_discovery(self) -> None:
        """Replace discovery's look-up of nameplates: from the fault ``INTERCEPT`` until discovery is honest again, the
        look-up returns the stranger's key."""
        assert self.lab.discovery is not None and self.lab.discovery._running is not None  # noqa: SLF001
        nameplates: Any = self.lab.discovery._running.store.nameplates  # noqa: SLF001
        find = nameplates.find

        def found(number: int, now: float) -> Deferred[str]:
            return succeed(self._stranger.client.public_key.hex()) if self._intercepting else find(number, now)

        nameplates.find = found

    def _intercept(self, step: Step, random: Random) -> None:
        self._intercepting = True

    def _visit(self, step: Step, random: Random) -> None:
        """Let a stranger visit the sender of a code that is offered now."""
        offering = [pair.sender.record for pair in self._pairs if pair.sender is not None and not pair.sender.has_ended]
        records = [record for record in offering if record is not None]
        if records:
            self._stranger.visit(step.fault, random.choice(records), random)

    def _lie(self, step: Step, random: Random) -> None:
        """Let a server lie from now on."""
        name = random.choice(list(self.lab.servers))
        liar = Liar(self.lab.network.host(name), self.lab.servers[name], self._alliance, KINDS)
        liar.tell(step.lies)
        self._liars.append(liar)

    def _repent(self) -> None:
        """Let all servers and discovery be honest from now on."""
        self._intercepting = False
        for liar in self._liars:
            liar.stop_lying()
        self._liars.clear()


@contextmanager
def _empty_home(home: Path) -> Iterator[None]:
    """Context manager in which this process has an empty home directory.

    A sender refuses to send the files of dmsg itself. In the real home directory it would look for the files of the
    person who runs the walk, which takes time, and a walk would depend on them.

    :param home: path of the directory, which is created.
    """
    before = dict(os.environ)
    home.mkdir()
    for name in [name for name in before if name.startswith(("DMSG_", "XDG_"))]:
        del os.environ[name]
    os.environ["HOME"] = os.fspath(home)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def follow(plan: Plan) -> Done:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with (
        tempfile.TemporaryDirectory(prefix="dmsg-code-walk-") as directory,
        repeatable_lab(plan.seed, trace=trace) as lab,
        work_on_hosts(lab.network),
        _empty_home(Path(directory) / "home"),
    ):
        walk = CodeWalk(lab, trace, plan, Path(directory))
        with explained(plan.seed, walk, trace):
            walk.run()
            lab.stop()
    return Done(walk.finished, walk.faults, trace, walk.coverage)


def main() -> None:
    """Run random walks with the options of the command line."""
    run(
        "dmsg.testing.code_walk",
        __doc__,
        STEPS,
        draw_plan,
        follow,
        "transfers finished",
        ", all whole; nobody without the code got anything",
        steered=draw_plan,
    )


if __name__ == "__main__":
    main()
