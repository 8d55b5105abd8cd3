"""Streams of a walk of agents, and checks of their guarantees, which depend on the faults that happened to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmsg.agent.local_stream import LocalStream
from dmsg.net.streams.transports import stream_of
from dmsg.testing.agent_machines import User
from dmsg.testing.numbered_ends import NUMBER_SIZE, NumberedEnd
from dmsg.testing.promise import PromiseBroken

OPENING, IDLE, IN_FLIGHT, PAUSED, HALF_CLOSED, SUSPENDED, CLOSING = STATES = (
    *("opening", "idle", "in flight", "paused", "half-closed", "suspended", "closing"),
)
"""States of an end of a stream."""


class AgentStream:
    """Stream between two programs.

    :ivar opening: end that opens the stream.
    :ivar accepting: end that accepts the stream.
    :ivar is_opening: whether the attempt to open the stream is not over yet.
    :ivar has_failed: whether the stream could not be opened.
    :ivar is_closed: whether one of the programs has closed or aborted the stream.
    """

    def __init__(self, one: User, two: User, number: int) -> None:
        self.opening, self.accepting = NumberedEnd(2 * number, 2 * number + 1), NumberedEnd(2 * number + 1, 2 * number)
        self.opening.other, self.accepting.other = self.accepting, self.opening
        self.is_opening = True
        self.has_failed = self.is_closed = False
        self._users = one, two
        self._dead: set[NumberedEnd] = set()
        """Ends whose process was killed."""
        self._may_be_lost = False
        """Whether a program or an agent of the stream was stopped."""
        self._may_not_open = False
        """Whether a program or an agent of the stream was stopped before the stream was open. The stream may then open
        or fail: the program waits for a new agent, and the peer may reach the process that was started next.
        """

    def __str__(self) -> str:
        texts = [
            f"{user.name} sent {end.sent}, {end.other.received} arrived, ended: {end.lost is not None}"
            for user, end in zip(self._users, self.ends, strict=True)
        ]
        return f"{texts[0]}, {texts[1]}; harmed: {self._may_be_lost}, closed: {self.is_closed}"

    @property
    def ends(self) -> tuple[NumberedEnd, NumberedEnd]:
        """The opening end and the accepting end."""
        return self.opening, self.accepting

    def user_of(self, end: NumberedEnd) -> User:
        """Return the program that uses an end of the stream."""
        return self._users[self.ends.index(end)]

    def is_usable(self, end: NumberedEnd) -> bool:
        """Whether the program of an end can use the stream."""
        opened = end.transport is not None and not (end is self.opening and self.is_opening)
        return opened and end.lost is None and end not in self._dead and not self.is_closed

    def user_stopped(self, user: User) -> None:
        """Record that a program, or its agent, is stopped now."""
        if user not in self._users:
            return
        end = self.ends[self._users.index(user)]
        if end.transport is None:
            self._may_not_open = True
        else:
            self._may_be_lost = True

    def program_killed(self, user: User) -> None:
        """Record that a program was killed. Its end of the stream then need not notice that the stream has ended."""
        if user in self._users:
            end = self.ends[self._users.index(user)]
            if end is self.opening or end.transport is not None:
                self._dead.add(end)
                if end is self.opening:
                    self.is_opening = False

    @property
    def _has_ended(self) -> bool:
        return all(self._knows_the_end(end) for end in self.ends)

    def _knows_the_end(self, end: NumberedEnd) -> bool:
        """Whether an end has noticed that the stream has ended, or need not notice it.

        An end whose process was killed need not notice it. An accepting end that waits for the opening end to resume
        the stream need not notice it either, because such an end may wait for an hour.
        """
        if end in self._dead or end.transport is None or end.lost is not None:
            return True
        return end is self.accepting and stream_of(end).away_since is not None

    @property
    def _has_delivered(self) -> bool:
        return all(end.other.received == end.sent for end in self.ends)

    @property
    def is_settled(self) -> bool:
        """Whether the stream has delivered everything; or, if a fault or a program may have ended the stream, whether
        both ends have noticed its end."""
        if self.is_opening:
            return False
        has_both = all(end.transport is not None for end in self.ends)
        if self._may_be_lost or self.is_closed or self.has_failed:
            return self._has_ended
        if self._may_not_open:
            return self._has_ended or (has_both and self._has_delivered)
        if not has_both:
            return self.opening.lost is not None
        is_over = all(end.has_finished for end in self.ends)
        return self._has_delivered and (not is_over or self._has_ended)

    def check(self) -> None:
        """Check what is guaranteed at any time.

        :raises PromiseBroken: more bytes are acknowledged than have arrived, more have arrived than were sent, or the
            stream has ended for no reason.
        """
        for end in self.ends:
            arrived = self._received_size(end.other)
            if arrived is not None and end.acknowledged > arrived:
                raise PromiseBroken(f"{end.acknowledged} bytes were acknowledged and {arrived} have arrived")
            if end.other.received > end.sent:
                raise PromiseBroken(f"{end.other.received} bytes arrived, but only {end.sent} were sent")
        may_end = self._may_be_lost or self._may_not_open or self.is_closed
        if may_end or any(end.transport is None for end in self.ends) or all(end.has_finished for end in self.ends):
            return
        for user, end in zip(self._users, self.ends, strict=True):
            if end.lost is not None:
                raise PromiseBroken(
                    f"a stream of {user.name} has ended for no reason: {end.lost.getErrorMessage()}; {self}"
                )

    def _received_size(self, end: NumberedEnd) -> int | None:
        """Return the number of bytes of the pattern that an end's client has received; None if it is not known.

        If the program uses an agent, the agent's client is meant. The agent may not have passed all bytes to the
        program yet.
        """
        stream: Any = end.transport
        if stream is None or end.lost is not None or end in self._dead:
            return None
        if isinstance(stream, LocalStream):
            # The program's connection ends at the agent, whose client has the stream.
            there: Any = stream._carrier._transport  # noqa: SLF001
            bridge = getattr(there.other.protocol, "_bridge", None)
            if bridge is None:
                return None
            stream = bridge.transport
        received: int = stream.end.received
        return received - (NUMBER_SIZE if end is self.accepting else 0)

    def states(self) -> Iterator[str]:
        """Yield the states of the ends of the stream, except those that have ended or whose process was killed."""
        if self.is_opening:
            yield OPENING
        for end in self.ends:
            stream: Any = end.transport
            if stream is None or end.lost is not None or end in self._dead:
                continue
            if stream.disconnecting:
                yield CLOSING
            elif stream.away_since is not None:
                yield SUSPENDED
            elif stream._paused:  # noqa: SLF001
                yield PAUSED
            elif stream.writing_ended or stream._remote_ended:  # noqa: SLF001
                yield HALF_CLOSED
            elif stream._carrier.in_flight():  # noqa: SLF001
                yield IN_FLIGHT
            else:
                yield IDLE
