"""Limit on all that peers leave in a directory of this user, and removal of unfinished files that nobody continues.

Without this limit, anyone who knows the key of a listener with ``--anyone`` could fill the disk, by many transfers that
are small enough one by one.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

from dmsg.apps.partial_files import part_name, size_of_part, sweep_parts
from dmsg.apps.transfer import TransferError
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.units import human_size
from dmsg.net.threads import in_thread

INTAKE_LIMIT = 10_000_000_000
"""Default maximum bytes that peers may leave in a directory if anyone may send."""
ENTRY_COST = 4096
"""Bytes that each file and directory counts in addition to its content. Otherwise many empty files would use up the
disk.
"""
PARTS_LIMIT = 10_000
"""Maximum number of unfinished files and directories that peers may leave."""
PART_LIFETIME = 7 * 86400.0
"""Seconds after which an unfinished file that nobody has continued is removed."""
SWEEP_INTERVAL = 3600.0
"""Seconds between two searches for unfinished files that are too old."""


class IntakeFull(TransferError):
    """Error: an offer is refused, because peers have left too much.

    :ivar limit: name of the limit that the offer exceeds, ``bytes`` or ``parts``.
    """

    def __init__(self, text: str, limit: str) -> None:
        super().__init__(text)
        self.limit = limit


@dataclass(eq=False)
class Reservation:
    """Share of the limit that belongs to one running transfer.

    :ivar cost: bytes that count while the transfer runs.
    :ivar entries: number of files and directories.
    :ivar parts: paths of the partial files of the transfer.
    :ivar is_over: whether the transfer has ended, and its partial files are being measured.
    :ivar replaced: bytes of existing files that a successful transfer replaces.
    """

    cost: int
    entries: int
    parts: tuple[Path, ...]
    replaced: int
    is_over: bool = False


class Intake:
    """Account of what peers have left in a directory since the command started, and of older unfinished files.

    :param root: directory that peers write to.
    :param limit: maximum bytes in all.
    :param deep: whether unfinished files can also be in directories below ``root``.
    :param wall_clock: function that returns the time in seconds since 1970, as in times of files; None for the system's
        clock.
    :ivar total: bytes that count now: complete files, unfinished files, and the offers of running transfers.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        root: Path,
        limit: int,
        *,
        deep: bool = False,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.total = 0
        self._reactor = reactor
        self._root = root
        self._limit = limit
        self._deep = deep
        self._wall_clock = wall_clock or time.time
        self._left: dict[Path, int] = {}
        """Bytes of the unfinished files for which no transfer is running, by path."""
        self._held: dict[Path, Reservation] = {}
        """Reservation of the last transfer to each partial file that has not been settled."""
        self._lines = LogThrottle(reactor.seconds)
        self._loop = LoopingCall(self._sweep)
        self._loop.clock = reactor

    def start(self) -> Deferred[None]:
        """Count the unfinished files in the directory, and repeat that from time to time.

        :returns: Deferred that fires when the files are counted for the first time.
        """
        self._loop.start(SWEEP_INTERVAL, now=False)
        return self._sweep()

    def stop(self) -> None:
        """Stop searching for old unfinished files."""
        if self._loop.running:
            self._loop.stop()

    def reserve(self, parent: Path, things: list[tuple[str, str, int, int, int]]) -> Reservation:
        """Reserve space for a transfer.  The caller passes the result to :meth:`settle`.

        :param parent: directory that the items are written to.
        :param things: items of the offer; see :class:`~dmsg.apps.parcels.offers.Offer`.
        :raises IntakeFull: the offer is more than what is left of the limit.
        """
        parts = tuple(parent / part_name(name) for name, *_ in things)
        entries = sum(files + directories for _, _, _, files, directories in things)
        size = sum(size for _, _, size, _, _ in things) + ENTRY_COST * entries
        for part in parts:
            earlier = self._held.get(part)
            if earlier is not None and earlier.is_over:
                # The sender continues an interrupted transfer, whose bytes count only once.
                self.total -= earlier.cost
                earlier.cost = 0
        cost = max(0, size - sum(self._left.get(part, 0) for part in parts))
        left = max(0, self._limit - self.total)
        if cost > left:
            raise IntakeFull(
                f"{human_size(cost)} are too much: this side accepts {human_size(self._limit)} from all its peers "
                f"together, and {human_size(left)} of that are left",
                "bytes",
            )
        if len(self._left.keys() | self._held.keys() | set(parts)) > PARTS_LIMIT:
            raise IntakeFull(
                f"this side has {PARTS_LIMIT} unfinished files from its peers, and accepts no more", "parts"
            )
        self.total += cost
        replaced = sum(_size_of_file(parent / name) for name, *_ in things)
        reservation = Reservation(cost, entries, parts, replaced)
        self._held.update(dict.fromkeys(parts, reservation))
        return reservation

    def settle(self, reservation: Reservation, transferred: int | None) -> Deferred[None]:
        """Replace a reservation by what the transfer has left.

        :param transferred: bytes of a successful transfer; None if the transfer has failed.
        :returns: Deferred that fires when that is known.
        """
        reservation.is_over = True
        if transferred is None:
            measured = in_thread(self._reactor, lambda: {part: size_of_part(part) for part in reservation.parts})
            return measured.addBoth(self._settle_failed, reservation)
        kept = min(reservation.cost, transferred + ENTRY_COST * reservation.entries)
        self.total -= reservation.cost - max(0, kept - reservation.replaced)
        for part in reservation.parts:
            # The bytes of an earlier, interrupted transfer are now in the complete file, and stay in the total.
            self._left.pop(part, None)
            self._release(part, reservation)
        return succeed(None)

    def _settle_failed(self, sizes: dict[Path, int] | Failure, reservation: Reservation) -> None:
        self.total -= reservation.cost
        for part in reservation.parts:
            # A partial file counts only once if another transfer has continued it meanwhile.
            if self._release(part, reservation) and not isinstance(sizes, Failure):
                self._note_left(part, sizes[part])

    def _release(self, part: Path, reservation: Reservation) -> bool:
        """Forget which transfer writes a partial file.

        :returns: whether no other transfer writes the file.
        """
        if self._held.get(part) is reservation:
            del self._held[part]
        return part not in self._held

    def _note_left(self, part: Path, size: int) -> None:
        self.total -= self._left.pop(part, 0)
        if size:
            self._left[part] = size + ENTRY_COST
            self.total += size + ENTRY_COST

    def refusal_line(self, error: IntakeFull, peer: str) -> str | None:
        """Return the line about a refused offer for the user; None if it was printed a short time ago.

        A line also tells how many offers were refused for the same reason since the last one.
        """
        more = self._lines.suffix(error.limit)
        return None if more is None else f"an offer of {peer} is refused: {error}{more}"

    def _sweep(self) -> Deferred[None]:
        before = self._wall_clock() - PART_LIFETIME
        known = list(self._left)

        def sweep() -> dict[Path, int]:
            sizes = sweep_parts(self._root, before, deep=self._deep, limit=PARTS_LIMIT)
            return {**{path: 0 for path in known if not os.path.lexists(path)}, **sizes}

        def note(sizes: dict[Path, int]) -> None:
            for part, size in sizes.items():
                self._note_left(part, size)

        # A directory that cannot be read must not end the searches.
        return in_thread(self._reactor, sweep).addCallbacks(note, lambda _: None)


def intake_of(
    reactor: IReactorTime, root: Path, limit: int | None, *, anyone: bool, deep: bool = False
) -> Intake | None:
    """Return the account for a listener; None if nothing is limited, because only known peers may send.

    :param limit: maximum bytes that the user has set; None for the default.
    :param anyone: whether anyone who knows the key may send.
    """
    if limit is None and not anyone:
        return None
    return Intake(reactor, root.resolve(), INTAKE_LIMIT if limit is None else limit, deep=deep)


def _size_of_file(path: Path) -> int:
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
