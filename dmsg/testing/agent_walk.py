"""Random walk of programs that use agents, through faults. The guarantees of the agent are checked at every step.

``python -m dmsg.testing.agent_walk --seconds 60`` runs one walk after another, each with another seed, until a walk
fails, and prints the seed of this walk.

There are two machines with an agent. One of them has two programs, the other has one. A fourth program has a client of
its own. The guarantees: no wrong byte arrives; acknowledged bytes have arrived at the other client; a stream ends only
if one of its two programs ended it or was killed, or one of their agents was stopped; after the faults every stream
delivers everything or has ended at both ends; and agents and programs that start again can be reached.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol

from dmsg.errors import DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.testing import faults
from dmsg.testing.agent_machines import Machine, User
from dmsg.testing.agent_streams import (
    CLOSING,
    HALF_CLOSED,
    IDLE,
    IN_FLIGHT,
    OPENING,
    PAUSED,
    STATES,
    SUSPENDED,
    AgentStream,
)
from dmsg.testing.determinism import Trace
from dmsg.testing.faults import Faults
from dmsg.testing.lab import Lab, repeatable_lab
from dmsg.testing.numbered_ends import NUMBER_SIZE, NumberedEnd, OpeningFactory
from dmsg.testing.plan import INSTANT, PATIENCE, Aim, Plan, Step, draw
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.rude_programs import RUDE, SINK, RudeProgram
from dmsg.testing.walk_command import Done, explained, run
from dmsg.testing.walk_coverage import WalkCoverage

SERVERS = ("server-1", "server-2", "server-3")
MACHINES = {"anna": ("browser", "shell"), "ben": ("editor",)}
"""Names of the programs of each machine with an agent."""
ALONE = "carol"
"""Name of the program with a client of its own."""
FIRST_PORT = 10
STEPS = 60
STREAMS = 8
"""Maximum number of streams that are open at the same time."""
FIRST_STREAMS = 4
"""Number of streams that are opened at the beginning."""
MAX_UNRECEIVED = 3_000_000
"""Number of bytes that an end of a stream may have sent and the other end not received yet. At this number, the end
sends no more. This number is larger than the windows of both agents together."""
LAST_SIZE = 300_000
"""Number of bytes that each of the two ends sends over a stream that is opened at the end of a walk."""
RESTART_DELAYS = (0.0, 0.5, 3.0, 20.0)
"""Seconds after which a killed agent or program is started again."""
SETTLE_TIMEOUT = 400.0
"""Maximum seconds of the lab's time in which everything must recover after the last fault."""
REOPEN = 1.0
"""Seconds after which a stream that could not be opened is opened again. All streams are checked often, so each further
one makes a failing walk slower."""
LEFT_OUT = frozenset({"poison", "clock jump", "slow reader", "reader resumes"})
"""Faults that a walk of agents leaves out, or implements itself."""
OPEN, FINISH, CLOSE, ABORT = "open", "finish", "close", "abort"
KILL_AGENT, STOP_AGENT, PAUSE_AGENT = "kill agent", "stop agent", "pause agent"
KILL_PROGRAM, PAUSE_PROGRAM = "kill program", "pause program"
SLOW_READER, READER_RESUMES = "slow reader", "reader resumes"
OWN_FAULTS = (
    *(*[OPEN] * 8, FINISH, FINISH, CLOSE, ABORT),
    *(KILL_AGENT, STOP_AGENT, PAUSE_AGENT, KILL_PROGRAM, KILL_PROGRAM, PAUSE_PROGRAM),
    *(SLOW_READER, READER_RESUMES),
)
FAULTS = (*(name for name in faults.BY_NAME if name not in LEFT_OUT), *OWN_FAULTS, *RUDE)
"""Names of the faults of a walk. A fault that is listed twice happens twice as often."""
_SAYS = tuple((end, 300_000) for end in range(4))
WAYS: dict[str, Sequence[Step]] = {
    OPENING: (Step(fault=OPEN, seconds=0.0005), Step(fault=OPEN)),
    IDLE: (Step(seconds=12.0),),
    IN_FLIGHT: (Step(_SAYS, seconds=0.0005), Step(_SAYS, seconds=0.002)),
    PAUSED: (Step(_SAYS, SLOW_READER, seconds=0.3),),
    HALF_CLOSED: (Step(fault=FINISH, seconds=1.0), Step(fault=FINISH, seconds=0.0005)),
    SUSPENDED: (Step(_SAYS, "reset", seconds=0.0005), Step(_SAYS, "partition", seconds=30.0)),
    CLOSING: (Step(_SAYS, CLOSE), Step(_SAYS, CLOSE, seconds=0.0005)),
}
"""Maps each state to steps of a walk after which a stream is often in this state."""


class _Sink(Factory):
    """Factory of protocols that read data and answer nothing, for the streams that rude programs open."""

    noisy = False

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return Protocol()


class AgentWalk:
    """Random walk of programs that use agents.

    :param lab: lab in which only discovery runs.
    :param directory: existing, empty directory for the sockets, with a short path.
    :ivar faults: names of the faults so far, in order.
    :ivar coverage: states of the streams when the faults happened.
    """

    def __init__(self, lab: Lab, plan: Plan, directory: Path) -> None:
        self.lab = lab
        self.plan = plan
        self.faults: list[str] = []
        self.coverage = WalkCoverage(FAULTS, STATES)
        self._accepting: list[NumberedEnd] = []
        self._streams: list[AgentStream] = []
        self._broken: list[str] = []
        for name in SERVERS:
            lab.add_server(name)
        self._machines = [Machine(lab, name, directory) for name in MACHINES]
        self._users: list[User] = []
        for machine in self._machines:
            machine.on_end = lambda machine: self._harm(self._users_of(machine))
            for name in MACHINES[machine.name]:
                self._users.append(User(lab, name, machine, FIRST_PORT + len(self._users), self._accepting))
        self._users.append(User(lab, ALONE, None, FIRST_PORT + len(self._users), self._accepting))
        self._rude = [RudeProgram(machine, self._users[-1].key, self._broken.append) for machine in self._machines]
        self._faults = Faults(lab, SERVERS, (*MACHINES, ALONE), [])
        self._own: dict[str, Callable[[Random], object]] = {
            OPEN: self._open_any,
            FINISH: self._finish,
            CLOSE: self._close,
            ABORT: self._abort,
            KILL_AGENT: self._kill_agent,
            STOP_AGENT: self._stop_agent,
            PAUSE_AGENT: lambda random: random.choice(self._machines).host.pause(),
            KILL_PROGRAM: self._kill_program,
            PAUSE_PROGRAM: lambda random: random.choice(self._users[:-1]).host.pause(),
            SLOW_READER: self._slow_reader,
            READER_RESUMES: lambda random: self._read(),
        }

    @property
    def delivered(self) -> int:
        """Number of bytes that have arrived."""
        return sum(end.received for stream in self._streams for end in stream.ends)

    def run(self) -> None:
        """Run the walk, repair all faults, and check that every stream recovers or has ended.

        :raises PromiseBroken: a guarantee is broken.
        :raises AssertionError: a stream hangs, or a program cannot be reached.
        """
        for machine in self._machines:
            machine.start_agent()
        for user in self._users:
            user.start()
        self.lab.clients[ALONE].listen(_Sink(), SINK)
        self.lab.settle()
        random = Random(f"streams {self.plan.seed}")
        for _ in range(FIRST_STREAMS):
            self._open_any(random)
        for step in self.plan.steps:
            self._do(step)
        self._repair()
        self._wait(lambda: all(user.is_listening for user in self._users), "programs have no port")
        self._wait(lambda: all(stream.is_settled for stream in self._streams), "streams hang")
        last = [self._last_stream(one, two) for one, two in self._pairs()]
        self._wait(lambda: all(stream() for stream in last), "new streams do not deliver everything")

    def stop(self) -> None:
        """Stop all agents and clients in an orderly way."""
        for machine in self._machines:
            self.lab.clients.pop(machine.name, None)
            stopped = machine.stop_agent()
            self.lab.network.run_until(lambda: stopped.called, 60)  # noqa: B023  # It is called in this turn of the loop.
        self.lab.stop()

    def check(self) -> None:
        """Check all guarantees.

        :raises PromiseBroken: a guarantee is broken.
        """
        if self._broken:
            raise PromiseBroken("; ".join(self._broken[:5]))
        for machine in self._machines:
            if machine.is_stopping:
                # Programs may have opened further streams since the agent began to stop. These may be lost, too.
                self._harm(self._users_of(machine))
        for stream in self._streams:
            stream.check()

    def _wait(self, condition: Callable[[], bool], text: str) -> None:
        def checked() -> bool:
            self.check()
            return condition()

        try:
            self.lab.network.run_until(checked, SETTLE_TIMEOUT)
        except PromiseBroken:
            raise
        except AssertionError as error:
            hanging = [str(stream) for stream in self._streams if not stream.is_settled]
            raise AssertionError(f"{text}: {error}; {'; '.join(hanging[:4])}") from error

    def _do(self, step: Step) -> None:
        ends = [end for end in self._open_ends() if not end.has_finished]
        for number, size in step.says:
            if number < len(ends) and ends[number].sent - ends[number].other.received < MAX_UNRECEIVED:
                self._as_its_program(ends[number], methodcaller("say", size))
        if step.at:
            self.lab.network.wait_for(lambda: step.at in self._states(), PATIENCE, INSTANT)
        if step.fault:
            self.faults.append(step.fault)
            self.coverage.note_states(step.fault, self._states())
            random = Random(step.chance)
            if step.fault in self._own:
                self._own[step.fault](random)
            elif step.fault in RUDE:
                random.choice(self._rude).behave(step.fault, random)
            else:
                self._faults.make(step.fault, random)
        self.lab.network.run(step.seconds)
        self.check()

    def _states(self) -> set[str]:
        return {state for stream in self._streams for state in stream.states()}

    def _as_its_program(self, end: NumberedEnd, action: Callable[[Any], object]) -> None:
        stream = next(stream for stream in self._streams if end in stream.ends)
        stream.user_of(end).host.do(lambda: action(end))

    def _open_ends(self) -> list[NumberedEnd]:
        return [end for stream in self._streams for end in stream.ends if stream.is_usable(end)]

    # --- streams ---

    def _pairs(self) -> list[tuple[User, User]]:
        """Return all ordered pairs of programs on different machines."""
        users = self._users
        return [(one, two) for one in users for two in users if one.key != two.key]

    def _open_any(self, random: Random) -> None:
        if len(self._open_ends()) < 2 * STREAMS:
            pairs = [pair for pair in self._pairs() if pair[0].is_running]
            if pairs:
                self._open(*random.choice(pairs))

    def _open(self, one: User, two: User) -> AgentStream:
        number = len(self._accepting)
        stream = AgentStream(one, two, number)
        self._accepting.append(stream.accepting)
        self._streams.append(stream)

        def opened(_: object) -> None:
            stream_of(stream.opening).write(number.to_bytes(NUMBER_SIZE, "big"))
            stream.is_opening = False

        def failed(failure: Any) -> None:
            stream.is_opening = False
            stream.has_failed = True
            failure.trap(DmsgError)

        one.connect(two, OpeningFactory(stream.opening)).addCallbacks(opened, failed)
        return stream

    def _last_stream(self, one: User, two: User) -> Callable[[], bool]:
        """Return a function that must be called repeatedly until it returns True. Its calls open a stream (again, if an
        attempt fails), send data both ways, and close the stream. True means that all data has arrived."""
        stream, opened_at = self._open(one, two), self.lab.clock.seconds()
        said: list[NumberedEnd] = []

        def delivers() -> bool:
            nonlocal stream, opened_at
            if stream.has_failed and self.lab.clock.seconds() - opened_at >= REOPEN:
                stream, opened_at = self._open(one, two), self.lab.clock.seconds()
            for end in stream.ends:
                if end not in said and stream.is_usable(end):
                    said.append(end)
                    self._as_its_program(end, lambda end: end.say(LAST_SIZE))
            opening, accepting = stream.ends
            if opening.received == LAST_SIZE and not stream.is_closed and stream.is_usable(opening):
                stream.is_closed = True
                # Data written before the close must arrive, although the stream is closed at once.
                self._as_its_program(opening, _say_and_close)
            return accepting.received == 2 * LAST_SIZE and accepting.lost is not None

        return delivers

    def _any_end(self, random: Random) -> tuple[AgentStream, NumberedEnd] | None:
        ends = [(stream, end) for stream in self._streams for end in stream.ends if stream.is_usable(end)]
        return random.choice(ends) if ends else None

    def _finish(self, random: Random) -> None:
        found = self._any_end(random)
        if found is not None and not found[1].has_finished and stream_of(found[1]).can_half_close:
            self._as_its_program(found[1], lambda end: end.finish())

    def _close(self, random: Random) -> None:
        found = self._any_end(random)
        if found is not None:
            found[0].is_closed = True
            self._as_its_program(found[1], lambda end: stream_of(end).loseConnection())

    def _abort(self, random: Random) -> None:
        found = self._any_end(random)
        if found is not None:
            found[0].is_closed = True
            self._as_its_program(found[1], lambda end: stream_of(end).abortConnection())

    def _slow_reader(self, random: Random) -> None:
        found = self._any_end(random)
        if found is not None:
            self._as_its_program(found[1], lambda end: stream_of(end).pauseProducing())

    def _read(self) -> None:
        for stream in self._streams:
            for end in stream.ends:
                if end.transport is not None and end.lost is None:
                    self._as_its_program(end, lambda end: stream_of(end).resumeProducing())

    # --- processes ---

    def _harm(self, users: list[User]) -> None:
        for stream in self._streams:
            for user in users:
                stream.user_stopped(user)

    def _users_of(self, machine: Machine) -> list[User]:
        return [user for user in self._users if user.machine is machine]

    def _later(self, random: Random, start: Callable[[], object]) -> None:
        """Start an agent or a program again, some time later."""
        self.lab.clock.callLater(random.choice(RESTART_DELAYS), start)

    def _kill_agent(self, random: Random) -> None:
        machine = random.choice(self._machines)
        if machine.agent is not None:
            machine.kill()
            self._later(random, machine.start_agent)

    def _stop_agent(self, random: Random) -> None:
        machine = random.choice(self._machines)
        users = [user for user in self._users_of(machine) if user.is_running]
        if machine.agent is not None and users:
            self._harm(self._users_of(machine))
            machine.host.resume()
            users[0].host.resume()
            users[0].ask_for_the_end()
            self._later(random, machine.start_agent)

    def _kill_program(self, random: Random) -> None:
        user = random.choice(self._users[:-1])
        if user.is_running:
            self._harm([user])
            for stream in self._streams:
                stream.program_killed(user)
            user.kill()
            self._later(random, user.start)

    def _repair(self) -> None:
        self._faults.repair()
        self._read()
        for host in self.lab.network.hosts.values():
            host.ahead = 0.0
        # The clock is advanced until stopping agents have ended, and killed agents and programs were restarted as
        # planned.
        self.lab.network.run(max(RESTART_DELAYS))
        for machine in self._machines:
            machine.start_agent()
        for user in self._users:
            user.start()
        self._read()


def _say_and_close(end: NumberedEnd) -> None:
    end.say(LAST_SIZE)
    stream_of(end).loseConnection()


def draw_plan(seed: int, steps: int, aims: Sequence[Aim] = ()) -> Plan:
    """Return the plan that is drawn from a seed.

    :param aims: faults that the plan contains more often, each with the state of a stream in which it should happen.
    """
    return draw(seed, steps, FAULTS, aims=aims, ways=WAYS)


def follow(plan: Plan) -> Done:
    """Run the walk of a plan.

    :raises AssertionError: the walk fails. Its text contains the seed, the faults and the last events.
    """
    trace = Trace()
    with (
        tempfile.TemporaryDirectory(prefix="dmsg-agent-") as directory,
        repeatable_lab(plan.seed, trace=trace) as lab,
    ):
        walk = AgentWalk(lab, plan, Path(directory))
        with explained(plan.seed, walk, trace):
            walk.run()
            walk.stop()
    return Done(walk.delivered, walk.faults, trace, walk.coverage)


def main() -> None:
    """Run random walks with the options of the command line."""
    run(
        "dmsg.testing.agent_walk",
        __doc__,
        STEPS,
        draw_plan,
        follow,
        "bytes arrived",
        ", all correct, and no program's stream was ended by another",
        steered=draw_plan,
    )


if __name__ == "__main__":
    main()
