"""Runs over a lake: one at a time, and what each of them left.

``OUT/runs`` is a small table of its own.  Who wants to write says so there, in a
transaction that only one of several can make, and says every minute that it is
still there; its last word names the versions of all tables, which belong
together.  A reader takes those of the newest run that ended: before that word
nothing has changed for it, after it everything.

A run that is killed has no last word.  The next one takes over as soon as it is
certain that the process is gone, where it was one of this machine, or when
nothing has been heard of it for :data:`LEASE_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import Schema

from dmsg.analytics.delta import LakeError, rows_of

FORMAT = 2
"""Of what is said: a lake of another format is not touched."""
DAY_MS = 86_400_000
LEASE_SECONDS = 600.0
"""After so long without a word a run is taken as gone."""
RENEW_SECONDS = 60.0
KEPT_RUNS = 3
"""The newest runs whose tables can be read as they were, if they are of these days."""
KEPT_DAYS = 8
"""Days back of which the last run's tables can be read as they were."""
KEPT_SECONDS = 900.0
"""Tables of all runs of so short a time ago can be read, too: somebody may be in the midst of it."""
KEPT_MOST = 200
"""Runs that are kept at most."""
TIDY_AT = 64
"""Transactions after which the files that they replaced are removed."""
_COLUMNS = pa.schema(
    [
        pa.field("run", pa.int64()),
        pa.field("at", pa.int64()),
        pa.field("phase", pa.string()),
        pa.field("owner", pa.string()),
        pa.field("said", pa.string()),
    ]
)
_CONFIGURATION: dict[str, str | None] = {
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
_log = logging.getLogger(__name__)
BEGUN, DONE, GIVEN_UP = "begun", "done", "given up"


class Busy(LakeError):
    """Somebody else writes to them."""


@dataclass(frozen=True)
class State:
    """What a run left.

    :ivar run: its number, from 1; 0 before the first.
    :ivar batches: source -> its last batch that is in the tables.
    :ivar days: day -> the run that wrote its tables last.
    :ivar at: ms since 1970, when the run began.
    :ivar versions: table -> the version of it that belongs to the others; of one that is missing the newest.
    """

    run: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    at: int = 0
    versions: dict[str, int] = field(default_factory=dict)

    def with_days(self, days: Iterable[str], run: int) -> State:
        """With those days written by ``run``."""
        return replace(self, days={**self.days, **dict.fromkeys(days, run)})


@dataclass(frozen=True)
class _Row:
    run: int
    at: int
    phase: str
    owner: str
    said: str

    def state(self, where: str) -> State:
        try:
            said = json.loads(self.said)
            if said.pop("format") != FORMAT:
                raise LakeError(f"{where} was written by another version of dmsg")
            return State(**said)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LakeError(f"{where}/runs holds what is no run: {self.said[:60]!r}") from None


def _this_process() -> str:
    """Host, start of the machine, process and its start; the namespace of its number too."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:
        booted = names = ""
    return "/".join([socket.gethostname(), booted, names, str(os.getpid()), _begun(os.getpid())])


def _begun(process: int) -> str:
    """When a process began, in ticks since the start of the machine; empty if it is gone, or nobody tells."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def there(owner: str) -> bool | None:
    """Whether a process of this machine is there; None: of another machine nothing is known."""
    theirs, ours = owner.split("/"), _this_process().split("/")
    if len(theirs) < len(ours) or theirs[:3] != ours[:3] or not ours[1]:
        return None
    return _begun(int(theirs[3])) == theirs[4]


class Runs:
    """The runs over one lake."""

    def __init__(self, root: str, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._uri = f"{root}/runs"
        self._clock = clock

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._uri)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise LakeError(f"{self._uri} cannot be read: {str(error).splitlines()[0]}") from None

    def _look(self) -> tuple[DeltaTable | None, list[_Row]]:
        """What is said now, oldest first."""
        for again in (True, False):
            table = self._open()
            if table is None:
                break
            try:
                return table, sorted((_Row(**row) for row in rows_of(table).to_pylist()), key=lambda row: row.run)
            except (TypeError, AttributeError):
                raise LakeError(f"{self._uri} is another program's table") from None
            except LakeError:
                # What was replaced after it was opened may have been removed before it was read.
                if not again:
                    raise
        return None, []

    def any(self) -> bool:
        """Whether a run has ever begun."""
        return self._open() is not None

    def states(self) -> list[State]:
        """What runs left whose tables can still be read, oldest first."""
        return [row.state(self._root) for row in self._look()[1] if row.phase == DONE]

    def state(self, at: datetime | None = None) -> State:
        """What the newest run left.

        :param at: the newest that had ended by then.
        :raises LakeError: it is of another version of this program; or so old a state is gone.
        """
        states = self.states()
        if at is None:
            return states[-1] if states else State()
        then = [state for state in states if state.at <= at.timestamp() * 1000]
        if not then:
            raise LakeError(f"{self._root} has no tables of {at:%Y-%m-%d %H:%M} any more, or had none")
        return then[-1]

    def check_free(self) -> None:
        """:raises Busy: somebody writes."""
        self._check_free(self._look()[1])

    def _check_free(self, rows: list[_Row]) -> None:
        newest = rows[-1] if rows else None
        if newest is not None and newest.phase == BEGUN:
            silent = self._clock() - newest.at / 1000
            # who is seen to be there keeps it, however long he is silent: he may be suspended, or a clock was set
            seen = there(newest.owner)
            if seen or (seen is None and silent < LEASE_SECONDS):
                ago = f"{silent:.0f} s ago" if silent >= 0 else f"by a clock that is {-silent:.0f} s ahead of this one"
                raise self._busy(f", which said so {ago}")

    def claim(self) -> Claim:
        """Begin to write.

        :raises Busy: somebody else does.
        """
        now = self._clock()
        table, rows = self._look()
        if table is None:
            try:
                table = DeltaTable.create(self._uri, Schema.from_arrow(_COLUMNS), configuration=_CONFIGURATION)
            except CommitFailedError:
                raise self._busy() from None
            except DeltaError as error:
                raise self._not_made(error) from None
        self._check_free(rows)
        done = [row for row in rows if row.phase == DONE]
        number = max((row.run for row in done), default=0) + 1
        row = _Row(number, int(now * 1000), BEGUN, f"{_this_process()}/{secrets.token_hex(4)}", "")
        self.write(table, [*done, row])
        return Claim(self, row)

    def _not_made(self, error: DeltaError) -> LakeError:
        if DeltaTable.is_deltatable(self._uri):
            return self._busy()  # somebody else was quicker
        return LakeError(f"there can be no tables in {self._root}: {str(error).splitlines()[0]}")

    def _busy(self, more: str = "") -> Busy:
        return Busy(f"another run writes to {self._root}{more}")

    def write(self, table: DeltaTable, rows: list[_Row]) -> None:
        """Replace what is said, if nobody has said anything since ``table`` was opened.

        :raises LakeError: somebody has.
        """
        said = pa.Table.from_pylist([row.__dict__ for row in rows], schema=_COLUMNS)
        try:
            write_deltalake(table, said, mode="overwrite", commit_properties=CommitProperties(max_commit_retries=0))
        except CommitFailedError:
            raise self._busy() from None
        if table.version() % TIDY_AT == 0:
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)

    def say(self, own: _Row, phase: str, said: str = "", *, forget: bool = False) -> _Row:
        """Say something more of a run that has begun.

        :raises LakeError: another one has taken over.
        """
        table, rows = self._look()
        if table is None or not rows or (rows[-1].run, rows[-1].owner, rows[-1].phase) != (own.run, own.owner, BEGUN):
            raise self.taken_over()
        row = replace(own, at=int(self._clock() * 1000) if phase == BEGUN else own.at, phase=phase, said=said)
        kept = [*rows[:-1], *([] if forget else [row])]
        self.write(table, _kept(kept) if phase == DONE else kept)
        return row

    def taken_over(self) -> LakeError:
        """What who has been too long silent is told."""
        return LakeError(f"another run has taken over {self._root}: nothing had been heard of this one")

    def is_own(self, own: _Row) -> bool:
        """Whether that run is still the one that writes."""
        rows = self._look()[1]
        return bool(rows) and (rows[-1].run, rows[-1].owner, rows[-1].phase) == (own.run, own.owner, BEGUN)


def _kept(rows: list[_Row]) -> list[_Row]:
    """The newest; of the last days the last few, the last of each day and all of a moment ago."""
    done = [row for row in rows if row.phase == DONE]
    newest = done[-1]
    recent = [row for row in done if newest.at - row.at < KEPT_DAYS * DAY_MS]
    last_of_day = {row.at // DAY_MS: row.run for row in recent}
    wanted = {newest.run, *last_of_day.values(), *(row.run for row in recent[-KEPT_RUNS:])}
    wanted |= {row.run for row in recent if newest.at - row.at < KEPT_SECONDS * 1000}
    return [row for row in recent if row.run in wanted][-KEPT_MOST:]


class Claim:
    """A run that has begun; a context that ends it, in order or not."""

    def __init__(self, runs: Runs, row: _Row) -> None:
        self._runs = runs
        self._row = row
        self._over = threading.Event()
        self._speaking = threading.Lock()
        self._lost: LakeError | None = None
        self._thread = threading.Thread(target=self._renew, name="renew-claim", daemon=True)

    @property
    def number(self) -> int:
        """Of the run."""
        return self._row.run

    @property
    def at(self) -> int:
        """When it was last heard of, in ms since 1970."""
        return self._row.at

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with self._speaking:
                if self._over.is_set():
                    return
                try:
                    self._row = self._runs.say(self._row, BEGUN)
                except LakeError as error:
                    self._lost = error
                    return
                except Exception as error:  # the store is away for a moment, perhaps: it is asked again
                    _log.warning("the store does not answer: %s", error)

    def check(self) -> None:
        """Ask, before anything is written that others would see.

        :raises LakeError: another run has taken over.
        """
        if self._lost is not None:
            raise self._lost
        with self._speaking:
            if not self._runs.is_own(self._row):
                raise self._runs.taken_over()

    def finish(self, state: State) -> None:
        """The last word: what is written is what counts now."""
        self.check()
        self._end(DONE, json.dumps({"format": FORMAT, **state.__dict__}))

    def _end(self, phase: str, said: str = "") -> None:
        self._over.set()
        with self._speaking:
            self._row = self._runs.say(self._row, phase, said, forget=phase == GIVEN_UP)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over.is_set():
            try:
                self._end(GIVEN_UP)
            except Exception:
                if kind is None:
                    raise
        self._thread.join()
