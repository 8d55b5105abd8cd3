"""Limit on all that peers leave in a directory of this user, and removal of unfinished files that nobody continues.

Without this limit, anyone who knows the key of a listener with ``--anyone`` could fill the disk, by many transfers that
are small enough one by one.

Strangers, whose keys are not in the address book, together get only a part of each limit.  A stranger can create any
number of keys, so a share for each key would not help.  The rest is a reserve for known peers.  When an offer does not
fit, unfinished files of strangers make room for it.  A stranger cannot continue an unfinished file of a known peer,
because the stranger could replace its data, and would learn its hash.

Only what peers leave while the command runs is counted and removed.  Other unfinished files in the directory may be
those of this user.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from dmsg.apps.partial_files import PartUse, measure_part, part_name, sweep_parts
from dmsg.apps.transfer import TransferError
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.printable import shorten
from dmsg.base.units import human_size
from dmsg.keys import PubKey
from dmsg.net.threads import in_thread

INTAKE_LIMIT = 10_000_000_000
"""Default maximum bytes that peers may leave in a directory if anyone may send."""
ENTRY_COST = 4096
"""Bytes that each file, directory and text counts in addition to its content. Otherwise many empty files would use up
the disk.
"""
PARTS_LIMIT = 10_000
"""Maximum number of unfinished files and directories that peers may leave."""
STRANGERS_DIVISOR = 2
"""Number by which each limit is divided to get the part of it that all strangers together may use."""
CONTINUE_TIME = 3600.0
"""Seconds that a stranger has to continue an unfinished file, before it may be removed to make room for an offer."""
PART_LIFETIME = 7 * 86400.0
"""Seconds after which an unfinished file that nobody has continued is removed."""
SWEEP_INTERVAL = 3600.0
"""Seconds between two searches for unfinished files that are too old."""


class OfferRefused(TransferError):
    """Error: an offer is refused because of what peers have left.

    :ivar kind: kind of the reason; messages of one kind are printed seldom.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class IntakeFull(OfferRefused):
    """Error: an offer is refused, because peers have left too much.

    :ivar kind: name of the limit that the offer exceeds, ``bytes`` or ``parts``.
    """


@dataclass(eq=False)
class Reservation:
    """Share of the limit that belongs to one running transfer.

    :ivar cost: bytes that count while the transfer runs.
    :ivar entries: number of files and directories.
    :ivar parts: paths of the partial files of the transfer.
    :ivar is_known: whether the sender is known, and not a stranger.
    :ivar is_over: whether the transfer has ended, and its partial files are being measured.
    :ivar replaced: bytes of existing files that a successful transfer replaces.
    """

    cost: int
    entries: int
    parts: tuple[Path, ...]
    replaced: int
    is_known: bool
    is_over: bool = False


class _Unfinished(NamedTuple):
    """Unfinished file that no transfer is writing.

    :ivar size: bytes that count.
    :ivar is_known: whether its last sender is known, and not a stranger.
    :ivar since: time since which no transfer is writing it.
    """

    size: int
    is_known: bool
    since: float


class Intake:
    """Account of what peers have left in a directory since the command started.

    :param limit: maximum bytes in all.
    :param is_known: predicate that tells whether a sender is known; any other sender is a stranger.
    :param wall_clock: function that returns the time in seconds since 1970, as in times of files; None for the system's
        clock.
    :ivar total: bytes that count now: complete files, unfinished files, and the offers of running transfers.
    :ivar of_strangers: bytes of these that strangers have left or offer.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        limit: int,
        is_known: Callable[[PubKey], bool],
        *,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.total = 0
        self.of_strangers = 0
        self._reactor = reactor
        self._limit = limit
        self._is_known = is_known
        self._wall_clock = wall_clock or time.time
        self._left: dict[Path, _Unfinished] = {}
        """Unfinished files for which no transfer is running, by path."""
        self._held: dict[Path, Reservation] = {}
        """Reservation of the transfer that writes each partial file, or has written it and is not settled."""
        self._lines = LogThrottle(reactor.seconds)
        self._loop = LoopingCall(self._sweep)
        self._loop.clock = reactor

    def start(self) -> None:
        """Search from time to time for unfinished files that are too old."""
        self._loop.start(SWEEP_INTERVAL, now=False)

    def stop(self) -> None:
        """Stop searching for old unfinished files."""
        if self._loop.running:
            self._loop.stop()

    def reserve(self, parent: Path, things: list[tuple[str, str, int, int, int]], sender: PubKey | None) -> Reservation:
        """Reserve space for a transfer.  The caller passes the result to :meth:`settle`.

        :param parent: directory that the items are written to.
        :param things: items of the offer; see :class:`~dmsg.apps.parcels.offers.Offer`.
        :param sender: key of the sender; None if it has none.
        :raises IntakeFull: the offer is more than what is left of the limit.
        :raises OfferRefused: see :meth:`check_sender`.
        """
        self.check_sender(parent, things, sender)
        is_known = self._knows(sender)
        parts = tuple(parent / part_name(name) for name, *_ in things)
        entries = sum(files + directories for _, _, _, files, directories in things)
        size = sum(size for _, _, size, _, _ in things) + ENTRY_COST * entries
        for part in parts:
            earlier = self._held.get(part)
            if earlier is not None and earlier.is_over:
                # The sender continues an interrupted transfer, whose bytes count only once.
                self._count(-earlier.cost, is_known=earlier.is_known)
                earlier.cost = 0
        cost = max(0, size - sum(self._left[part].size for part in parts if part in self._left))
        self._make_room(cost, parts, is_known=is_known)
        self._count(cost, is_known=is_known)
        replaced = sum(_size_of_file(parent / name) for name, *_ in things)
        reservation = Reservation(cost, entries, parts, replaced, is_known)
        for part in parts:
            # If another transfer is still writing the file, the file stays reserved for that transfer, because the new
            # offer is about to be refused.
            if part not in self._held or self._held[part].is_over:
                self._held[part] = reservation
        return reservation

    def check_sender(self, parent: Path, things: list[tuple[str, str, int, int, int]], sender: PubKey | None) -> None:
        """Check that a stranger does not continue an unfinished file of a known peer.

        The parameters are those of :meth:`reserve`.

        :raises OfferRefused: the stranger has offered such a file.
        """
        if self._knows(sender):
            return
        for name, *_ in things:
            part = parent / part_name(name)
            if (part in self._held or part in self._left) and self._is_known_peers(part):
                raise OfferRefused(f"{name} is unfinished here, and a known peer has sent it: use another name", "name")

    def add_text(self, text: str, sender: PubKey | None) -> None:
        """Count a text, which the command prints.  Its output may be a file.

        :raises IntakeFull: the text is more than what is left of the limit.
        """
        is_known = self._knows(sender)
        # No form in which the command prints the text is much longer than that of JSON.
        cost = ENTRY_COST + len(json.dumps(text))
        self._make_room(cost, (), is_known=is_known)
        self._count(cost, is_known=is_known)

    def _knows(self, sender: PubKey | None) -> bool:
        return sender is not None and self._is_known(sender)

    def _make_room(self, cost: int, parts: tuple[Path, ...], *, is_known: bool) -> None:
        """Check that an offer fits, and remove unfinished files of strangers as far as needed, the oldest first.

        :raises IntakeFull: the offer does not fit, even without these files.  None of them is removed then.
        """
        left, free_parts = self._left_for(parts, is_known=is_known)
        freed: dict[Path, _Unfinished] = {}
        size = 0
        removable = self._removable(parts)
        while cost > left + size or free_parts + len(freed) < 0:
            try:
                path, unfinished = next(removable)
            except StopIteration:
                raise self._refusal(cost, left, is_known=is_known) from None
            freed[path] = unfinished
            size += unfinished.size
        if freed:
            self._remove(freed)

    def _left_for(self, parts: tuple[Path, ...], *, is_known: bool) -> tuple[int, int]:
        """Return how many bytes, and how many partial files besides ``parts``, a sender may still leave.

        Either number is negative if known peers have used more than their reserve, or if ``parts`` are too many.
        """
        paths = self._left.keys() | self._held.keys() | set(parts)
        left, free_parts = self._limit - self.total, PARTS_LIMIT - len(paths)
        if not is_known:
            left = min(left, self._limit // STRANGERS_DIVISOR - self.of_strangers)
            of_strangers = len(paths) - sum(self._is_known_peers(path) for path in paths.difference(parts))
            free_parts = min(free_parts, PARTS_LIMIT // STRANGERS_DIVISOR - of_strangers)
        return left, free_parts

    def _removable(self, offered: tuple[Path, ...]) -> Iterator[tuple[Path, _Unfinished]]:
        """Yield the unfinished files that may be removed to make room, the oldest first."""
        until = self._reactor.seconds() - CONTINUE_TIME
        for path, unfinished in self._left.items():
            is_free = path not in offered and path not in self._held
            if is_free and not unfinished.is_known and unfinished.since <= until:
                yield path, unfinished

    def _refusal(self, cost: int, left: int, *, is_known: bool) -> IntakeFull:
        divisor = 1 if is_known else STRANGERS_DIVISOR
        whom = "all its peers together" if is_known else "all peers together that are not in its address book"
        if cost <= left:
            most = PARTS_LIMIT // divisor
            return IntakeFull(f"this side has {most} unfinished files from {whom}, and accepts no more", "parts")
        return IntakeFull(
            f"{human_size(cost)} are too much: this side accepts {human_size(self._limit // divisor)} from {whom}, and "
            f"{human_size(max(0, left))} of that are left",
            "bytes",
        )

    def _remove(self, freed: dict[Path, _Unfinished]) -> None:
        """Remove unfinished files.  Their bytes stop to count at once."""
        for part in freed:
            self._forget_left(part)

        def note(exist: dict[Path, bool]) -> None:
            # A file that another program is continuing was not removed, so it counts again.
            for part, unfinished in freed.items():
                if exist.get(part, True) and part not in self._held:
                    self._note_left(part, unfinished)

        before = self._wall_clock() - CONTINUE_TIME
        in_thread(self._reactor, sweep_parts, list(freed), before).addCallbacks(note, lambda _: None)

    def _is_known_peers(self, path: Path) -> bool:
        """Whether the sender of an unfinished file is known."""
        return self._held[path].is_known if path in self._held else self._left[path].is_known

    def settle(self, reservation: Reservation, transferred: int | None) -> Deferred[None]:
        """Replace a reservation by what the transfer has left.

        :param transferred: bytes of a successful transfer; None if the transfer has failed.
        :returns: Deferred that fires when that is known.
        """
        reservation.is_over = True
        if transferred is None:
            measured = in_thread(self._reactor, lambda: {part: measure_part(part) for part in reservation.parts})
            return measured.addBoth(self._settle_failed, reservation)
        kept = min(reservation.cost, transferred + ENTRY_COST * reservation.entries)
        self._count(max(0, kept - reservation.replaced) - reservation.cost, is_known=reservation.is_known)
        for part in reservation.parts:
            # The bytes of an earlier, interrupted transfer are now in the complete file, and stay in the total.
            self._left.pop(part, None)
            self._release(part, reservation)
        return succeed(None)

    def _settle_failed(self, used: dict[Path, PartUse] | Failure, reservation: Reservation) -> None:
        self._count(-reservation.cost, is_known=reservation.is_known)
        now = self._reactor.seconds()
        for part in reservation.parts:
            # A partial file counts only once if another transfer has continued it meanwhile.
            if self._release(part, reservation) and not isinstance(used, Failure):
                size = used[part].size + ENTRY_COST * used[part].entries
                self._note_left(part, _Unfinished(size, reservation.is_known, now))

    def _release(self, part: Path, reservation: Reservation) -> bool:
        """Forget which transfer writes a partial file.

        :returns: whether no other transfer writes the file.
        """
        if self._held.get(part) is reservation:
            del self._held[part]
        return part not in self._held

    def _count(self, size: int, *, is_known: bool) -> None:
        self.total += size
        if not is_known:
            self.of_strangers += size

    def _forget_left(self, part: Path) -> None:
        unfinished = self._left.pop(part, None)
        if unfinished is not None:
            self._count(-unfinished.size, is_known=unfinished.is_known)

    def _note_left(self, part: Path, unfinished: _Unfinished) -> None:
        self._forget_left(part)
        if unfinished.size:
            self._left[part] = unfinished
            self._count(unfinished.size, is_known=unfinished.is_known)

    def refusal_line(self, error: OfferRefused, peer: str) -> str | None:
        """Return the line about a refused offer for the user; None if it was printed a short time ago.

        A line also tells how many offers were refused for the same reason since the last one.
        """
        more = self._lines.suffix(error.kind)
        return None if more is None else f"an offer of {peer} is refused: {shorten(str(error))}{more}"

    def _sweep(self) -> Deferred[None]:
        def note(exist: dict[Path, bool]) -> None:
            for part, exists in exist.items():
                if not exists:
                    self._forget_left(part)

        before = self._wall_clock() - PART_LIFETIME
        # A directory that cannot be read must not end the searches.
        return in_thread(self._reactor, sweep_parts, list(self._left), before).addCallbacks(note, lambda _: None)


def intake_of(
    reactor: IReactorTime, limit: int | None, is_known: Callable[[PubKey], bool], *, anyone: bool
) -> Intake | None:
    """Return the account for a listener; None if nothing is limited, because only known peers may send.

    :param limit: maximum bytes that the user has set; None for the default.
    :param is_known: predicate that tells whether a sender is known, if anyone may send.
    :param anyone: whether anyone who knows the key may send.
    """
    if limit is None and not anyone:
        return None
    return Intake(reactor, INTAKE_LIMIT if limit is None else limit, is_known if anyone else lambda key: True)


def _size_of_file(path: Path) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
