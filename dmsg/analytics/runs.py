"""Runs over a set of tables: mutual exclusion between runs, and the state that each run left.

``OUT/runs`` is a small table. A run first claims the right to write, in a transaction of this table that only one of
several runs can commit. While the run writes, it renews its claim every minute. Its final transaction records the
versions of all tables that belong together. Readers use the versions of the newest finished run, so all changes of a
run become visible at once.

A run that is killed commits no final transaction. On the same machine, the next run takes over as soon as the killed
process no longer exists. On another machine, the next run takes over when the claim has not been renewed for
:data:`LEASE_SECONDS`.
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
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import Schema

from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.schemas import DAY_MS
from dmsg.analytics.table_queries import rows_of
from dmsg.telemetry.spool_listing import Left

UNUSABLE_DAYS = 7
"""Maximum number of days of which a state counts unusable lines and files."""
FORMAT = 2
"""Version of the format of the table of runs; tables of another version are neither read nor written."""
LEASE_SECONDS = 600.0
"""Lease of a claim: seconds without a renewal after which another run may take over."""
CLAIM_TIMEOUT = 3600.0
"""Maximum seconds that a streaming query waits for another run to finish."""
RENEW_SECONDS = 60.0
KEPT_RUNS = 3
"""Number of newest runs whose tables stay readable, unless a run is older than :data:`KEPT_DAYS`."""
KEPT_DAYS = 8
"""Number of days for which the tables of each day's last run stay readable."""
KEPT_SECONDS = 900.0
"""Seconds for which the tables of every run stay readable, because a reader may still use them."""
MAX_KEPT = 200
"""Maximum number of runs whose tables stay readable."""
TIDY_AT = 64
"""Number of transactions after which the outdated files of the table of runs are removed."""
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


class TablesBusy(LakeError):
    """Error: another run is writing to the tables."""


@dataclass(frozen=True)
class State:
    """State of all tables, as a run left it.

    :ivar run: number of the run, from 1; 0 before the first run.
    :ivar batches: number of the last refined batch of each source.
    :ivar days: number of the run that last wrote each day.
    :ivar at: when the run began, in ms since 1970.
    :ivar versions: version of each table. A table without a version here is read in its newest version.
    :ivar left: number and first path of the files and directories that the run could not read, by reason.
    :ivar unusable: number of lines that are no events, and of damaged files, by the day on which they were read, as
        ``2026-01-31``. It has at most :data:`UNUSABLE_DAYS` days.
    :ivar today: day for which the tables without days were computed, as ``2026-01-31``; empty if these tables have to
        be computed again.
    """

    run: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    at: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    left: Left = field(default_factory=dict)
    unusable: dict[str, tuple[int, int]] = field(default_factory=dict)
    today: str = ""

    def with_unusable(self, day: str, lines: int, files: int) -> State:
        """Return a copy of the state with further unusable lines and damaged files that were read on a day."""
        if not lines and not files:
            return self
        former = self.unusable.get(day, (0, 0))
        found = {**self.unusable, day: (former[0] + lines, former[1] + files)}
        return replace(self, unusable=dict(sorted(found.items())[-UNUSABLE_DAYS:]))

    def with_days(self, days: Iterable[str], run: int) -> State:
        """Return a copy of the state in which ``run`` is the last run that wrote these days."""
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
            written = int(said["format"])
            if written != FORMAT:
                raise LakeError(_other_format(where, written))
            # Unknown fields are ignored, because a later version of dmsg may have added them.
            known = {one.name: said[one.name] for one in fields(State) if one.name in said}
            left = {reason: (int(count), str(first)) for reason, (count, first) in known.pop("left", {}).items()}
            unusable = {day: (int(lines), int(files)) for day, (lines, files) in known.pop("unusable", {}).items()}
            return State(**known, left=left, unusable=unusable)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LakeError(f"{where}/runs holds a row that is not a run: {self.said[:60]!r}") from None


def _other_format(where: str, written: int) -> str:
    """Return an error text that says what to do with tables of another format."""
    text = f"the tables in {where} are of format {written}, this version of dmsg has format {FORMAT}"
    if written > FORMAT:
        return f"{text}: update dmsg"
    return f"{text}: move them away, and make them anew from the files of the spool with `dmsg analytics run`"


def _this_process() -> str:
    """Return a text that identifies this process: host, boot id of the machine, PID namespace, PID, and start time of
    the process."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:
        booted = names = ""
    return "/".join([socket.gethostname(), booted, names, str(os.getpid()), _start_time(os.getpid())])


def _start_time(process: int) -> str:
    """Return a process's start time in clock ticks since boot; empty if the process is gone or /proc is missing."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def owner_exists(owner: str) -> bool | None:
    """Whether the process that made a claim still exists; None if it runs on another machine or in another
    container."""
    theirs, ours = owner.split("/"), _this_process().split("/")
    if len(theirs) < len(ours) or theirs[:3] != ours[:3] or not ours[1]:
        return None
    return _start_time(int(theirs[3])) == theirs[4]


class Runs:
    """Table ``OUT/runs``: the runs of the pipeline that wrote to one set of tables."""

    def __init__(self, root: str, clock: Callable[[], float] | None = None) -> None:
        self._root = root
        self._uri = f"{root}/runs"
        self._clock = clock or time.time
        self._own: tuple[_Row, DeltaTable, int] | None = None

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._uri)
        except TableNotFoundError:
            return None
        except DeltaError as error:
            raise LakeError(f"{self._uri} cannot be read: {str(error).splitlines()[0]}") from None

    def _read_rows(self) -> tuple[DeltaTable | None, list[_Row]]:
        """Return the table and its rows, oldest first."""
        for again in (True, False):
            table = self._open()
            if table is None:
                break
            try:
                return table, sorted((_Row(**row) for row in rows_of(table).to_pylist()), key=lambda row: row.run)
            except (TypeError, AttributeError):
                raise LakeError(
                    f"{self._uri} is the table of another program: choose another directory for dmsg's tables"
                ) from None
            except LakeError:
                # A concurrent writer may have replaced and removed the files after the table was opened, so the table
                # is read once more.
                if not again:
                    raise
        return None, []

    def has_begun(self) -> bool:
        """Whether a run has ever begun."""
        return self._open() is not None

    def states(self) -> list[State]:
        """Return the states of finished runs whose tables can still be read, oldest first."""
        return [row.state(self._root) for row in self._read_rows()[1] if row.phase == DONE]

    def state(self, at: datetime | None = None) -> State:
        """Return the state that the newest finished run left.

        :param at: return the state of the newest run that had begun by this time instead.
        :raises LakeError: the state has another format, or no run of that time is stored.
        """
        states = self.states()
        if at is None:
            return states[-1] if states else State()
        then = [state for state in states if state.at <= at.timestamp() * 1000]
        if not then:
            raise LakeError(
                f"{self._root} has no tables from before {at:%Y-%m-%d %H:%M}: none were made, or they were removed"
            )
        return then[-1]

    def check_free(self) -> None:
        """Check that no run is writing.

        :raises TablesBusy: another run is writing.
        """
        self._check_free(self._read_rows()[1])

    def _check_free(self, rows: list[_Row]) -> None:
        newest = rows[-1] if rows else None
        if newest is not None and newest.phase == BEGUN:
            silent = self._clock() - newest.at / 1000
            # The claim of an existing process stays valid even if it was not renewed for long: the process may be
            # suspended, or a clock may have been changed.
            seen = owner_exists(newest.owner)
            if seen or (seen is None and silent < LEASE_SECONDS):
                ago = (
                    f"{silent:.0f} s ago" if silent >= 0 else f"from a clock that is {-silent:.0f} s ahead of this one"
                )
                raise TablesBusy(f"another run writes to {self._root}, last sign of life {ago}")

    def claim(self) -> Claim:
        """Claim the right to write to the tables.

        :raises TablesBusy: another run is writing.
        """
        now = self._clock()
        table, rows = self._read_rows()
        if table is None:
            try:
                table = DeltaTable.create(self._uri, Schema.from_arrow(_COLUMNS), configuration=_CONFIGURATION)
            except CommitFailedError:
                raise self._busy_error() from None
            except DeltaError as error:
                raise self._creation_failed(error) from None
        self._check_free(rows)
        done = [row for row in rows if row.phase == DONE]
        number = max((row.run for row in done), default=0) + 1
        row = _Row(number, int(now * 1000), BEGUN, f"{_this_process()}/{secrets.token_hex(4)}", "")
        self.write(table, [*done, row])
        return Claim(self, row)

    def _creation_failed(self, error: DeltaError) -> LakeError:
        if DeltaTable.is_deltatable(self._uri):
            return self._busy_error()  # Another run has created the table at the same time.
        return LakeError(f"there can be no tables in {self._root}: {str(error).splitlines()[0]}")

    def _busy_error(self) -> TablesBusy:
        return TablesBusy(f"another run writes to {self._root}")

    def write(self, table: DeltaTable, rows: list[_Row]) -> None:
        """Replace all rows of the table of runs.

        :raises LakeError: another run has written to it since ``table`` was opened.
        """
        said = pa.Table.from_pylist([row.__dict__ for row in rows], schema=_COLUMNS)
        try:
            write_deltalake(table, said, mode="overwrite", commit_properties=CommitProperties(max_commit_retries=0))
        except CommitFailedError:
            raise self._busy_error() from None
        if table.version() % TIDY_AT == 0:
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)

    def record_phase(self, own: _Row, phase: str, text: str = "", *, forget: bool = False) -> _Row:
        """Write a run's phase to its row. The phase ``BEGUN`` renews the run's claim.

        :param own: row of the run.
        :param forget: remove the row instead of updating it.
        :raises LakeError: another run has taken over.
        """
        table, rows = self._read_rows()
        if table is None or not rows or (rows[-1].run, rows[-1].owner, rows[-1].phase) != (own.run, own.owner, BEGUN):
            raise self.taken_over()
        row = replace(own, at=int(self._clock() * 1000) if phase == BEGUN else own.at, phase=phase, said=text)
        kept = [*rows[:-1], *([] if forget else [row])]
        self.write(table, _runs_to_keep(kept) if phase == DONE else kept)
        return row

    def taken_over(self) -> LakeError:
        """Return the error for a run that has lost its claim to another run."""
        return LakeError(f"another run has taken over {self._root}: nothing had been heard of this one")

    def is_own(self, own: _Row) -> bool:
        """Whether the run with this row still has the claim."""
        if self._own is not None and self._own[0] == own:
            _, seen, version = self._own
            with suppress(DeltaError):
                seen.update_incremental()
                if seen.version() == version:
                    # The table has not changed since this run's row was read, so the run still has the claim.
                    return True
        table, rows = self._read_rows()
        found = bool(rows) and (rows[-1].run, rows[-1].owner, rows[-1].phase) == (own.run, own.owner, BEGUN)
        self._own = (own, table, table.version()) if found and table is not None else None
        return found


def _runs_to_keep(rows: list[_Row]) -> list[_Row]:
    """Return the finished runs whose tables stay readable: the newest runs, the last run of each day, and all runs of
    the last minutes."""
    done = [row for row in rows if row.phase == DONE]
    newest = done[-1]
    recent = [row for row in done if newest.at - row.at < KEPT_DAYS * DAY_MS]
    last_of_day = {row.at // DAY_MS: row.run for row in recent}
    wanted = {newest.run, *last_of_day.values(), *(row.run for row in recent[-KEPT_RUNS:])}
    wanted |= {row.run for row in recent if newest.at - row.at < KEPT_SECONDS * 1000}
    return [row for row in recent if row.run in wanted][-MAX_KEPT:]


class Claim:
    """Claim of a run: its right to write to the tables.

    The claim is a context manager. In its block a thread renews the claim. At the end of the block, the claim is given
    up unless the run has finished.
    """

    def __init__(self, runs: Runs, row: _Row) -> None:
        self._runs = runs
        self._row = row
        self._over = threading.Event()
        self._speaking = threading.Lock()
        self._lost: LakeError | None = None
        self._thread = threading.Thread(target=self._renew, name="renew-claim", daemon=True)

    @property
    def number(self) -> int:
        """Number of the run."""
        return self._row.run

    @property
    def at(self) -> int:
        """Time at which the claim was made or last renewed, in ms since 1970."""
        return self._row.at

    @property
    def is_over(self) -> bool:
        """Whether the claim was given up, or lost to another run."""
        return self._over.is_set() or self._lost is not None

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            with self._speaking:
                if self._over.is_set():
                    return
                try:
                    self._row = self._runs.record_phase(self._row, BEGUN)
                except LakeError as error:
                    self._lost = error
                    return
                # The error is only logged, because storage may be unavailable for a moment. The next renewal follows in
                # a minute.
                except Exception as error:
                    _log.warning("the store does not answer: %s", error)

    def check(self) -> None:
        """Check that this run still has the claim. Call it before each write that readers can see.

        :raises LakeError: another run has taken over.
        """
        if self._lost is not None:
            raise self._lost
        with self._speaking:
            if not self._runs.is_own(self._row):
                raise self._runs.taken_over()

    def finish(self, state: State) -> None:
        """Commit the state. From then on readers see the rows that this run wrote."""
        self.check()
        self._end(DONE, json.dumps({"format": FORMAT, **state.__dict__}))

    def _end(self, phase: str, text: str = "") -> None:
        # The event is set before the lock is acquired. A renewal that waits for the lock then ends without writing.
        self._over.set()
        with self._speaking:
            self._row = self._runs.record_phase(self._row, phase, text, forget=phase == GIVEN_UP)

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
