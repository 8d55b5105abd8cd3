"""Late events: the files of other servers are not searched, and the tables are those of a run over all events."""

from __future__ import annotations

import shutil
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from dmsg.analytics import affected_rows, affected_tables
from dmsg.analytics.affected_rows import Groups, find_events
from dmsg.analytics.affected_tables import AffectedTables, Rows
from dmsg.analytics.file_columns import Budget
from dmsg.analytics.file_hashes import FileHashes
from dmsg.analytics.file_texts import FileTexts, server_column
from dmsg.analytics.jobs import Pipeline, RunOutcome
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.session import SparkOnDemand
from tests.analytics.support import DAY, NEXT, NOW, S1, S2, Boot, LakeCase, spark, tables_at_once, write_file

STORED = ("verdicts", "unfinished", "sessions")
"""Silver tables with stored rows that late events of transports and sessions affect."""


class TwoServersCase(LakeCase):
    """Two servers, whose events arrived in two runs, and are therefore in different files of bronze.

    :cvar compared: silver tables that :meth:`check_tables` compares.
    """

    compared: ClassVar[tuple[str, ...]] = STORED
    _earlier: ClassVar[dict[object, TwoServersCase]] = {}
    """Finished runs with which several tests begin, by the function that makes them."""

    def setUp(self) -> None:
        super().setUp()
        # Runs read the files of these directories.
        self.new, self.new_checked = self.spool / "new", self.checked / "new"
        self.new.mkdir()
        self.new_checked.mkdir()
        self.boots = {server: Boot(server, f"boot-{server[-1]}") for server in (S1, S2)}
        self.receipts = {server: Boot(server, f"receipts-{server[-1]}") for server in (S1, S2)}
        self.written = 0
        self.stream: Pipeline | None = None

    def closed(self, server: str, transport: str | None, day: Any = DAY, time: str = "12:00:00", **fields: Any) -> None:
        """Write the end of a transport that carried 10,000 bytes."""
        ends = {"transport": transport, "src": "a", "dst": "b", "secure": True, "by": "src", "reason": "unspecified"}
        counts = {"data_ab": 10_000, "data_ba": 0, "total_ab": 10_000, "total_ba": 0, "accept_ms": 3}
        self.boots[server].event("transport_close", day, time, **{**ends, **counts, **fields})

    def signed(self, server: str, transport: str, initiator: bool, day: Any = DAY, time: str = "12:01:00") -> None:
        """Write the receipt of one end of this transport."""
        who = ("s-a", "s-b") if initiator else ("s-b", "s-a")
        named = {"server": server, "transport": transport, "signer": who[0], "partner": who[1]}
        counts = {"delivered_out": 10_000 if initiator else 0, "delivered_in": 0 if initiator else 10_000}
        self.receipts[server].event("receipt_checked", day, time, **named, initiator=initiator, **counts)

    def taken_in(self) -> RunOutcome:
        """Run over the events that were written since the last run, with a file for each server."""
        self.written += 1
        for root, name, boots in ((self.new, "events", self.boots), (self.new_checked, "receipts", self.receipts)):
            for server, boot in boots.items():
                if rows := [row for row in boot.rows if "done" not in row]:
                    write_file(root / f"{name}-{self.written}-{server[-1]}.jsonl.gz", rows)
                    for row in rows:
                        row["done"] = True
        sources = [spool_source(str(self.new)), receipts_source(str(self.new_checked))]
        return (self.stream or Pipeline(SparkOnDemand(spark), str(self.out), now=NOW)).run(sources)

    def begin_with(self, name: str) -> None:
        """Begin with the files and tables of the runs that a method makes, and make these runs only once.

        The tables name the files by their former paths, so the files are where only :meth:`check_tables` reads them.
        """
        make = getattr(type(self), name)
        if make not in self._earlier:
            case = type(self)(self._testMethodName)
            case.setUp()
            make(case)
            self._earlier[make] = case
        earlier = self._earlier[make]
        shutil.copytree(earlier.out, self.out)
        shutil.copytree(earlier.new, self.spool / "earlier")
        shutil.copytree(earlier.new_checked, self.checked / "earlier")
        self.boots, self.receipts, self.written = deepcopy((earlier.boots, earlier.receipts, earlier.written))

    def check_tables(self) -> None:
        """Compare the tables with those that are computed from all events at once."""
        lake = self.pipeline().lake
        at_once = tables_at_once(lake)
        for name, rows in self.tables(GOLD).items():
            self.assertEqual(rows, at_once(name), name)
        for name in self.compared:
            self.assertEqual(self.table(name, "silver"), at_once(name), name)

    def two_runs(self) -> None:
        """Make runs over a transport of each server, both with the same name."""
        for server in (S1, S2):
            self.closed(server, "t")
            self.signed(server, "t", True)
            self.taken_in()


class SearchedFilesTests(TwoServersCase):
    """Files that are searched for the transports of late events."""

    def test_files_of_other_servers_are_not_read(self) -> None:
        self.begin_with("two_runs")
        table = self.pipeline().lake.table("", "bronze")
        for family, column in (("transport", "producer"), ("receipt", "server")):
            files = [file for file in table.files() if file.values["family"] == family]
            self.assertEqual(len(files), 2)
            wanted = pa.table({column: [S1], "transport": ["t"]})
            groups = Groups((column, "transport"), [wanted])
            reading = patch.object(
                pq.ParquetFile, "read_row_group", autospec=True, side_effect=pq.ParquetFile.read_row_group
            )
            with reading as read:
                found = find_events(table, files, family, groups, Budget(1_000_000))
                self.assertEqual(read.call_count, 1)
            # The other columns are read when they are first needed.
            self.assertEqual(found.column(column).to_pylist(), [S1])

    def test_row_groups_of_other_servers_are_not_searched(self) -> None:
        """Merged files have several row groups."""
        for server in (S1, S2):
            self.closed(server, "t")
        write_file(self.new / "events-both.jsonl.gz", [*self.boots[S1].rows, *self.boots[S2].rows])
        with patch.object(pq, "write_table", partial(pq.write_table, row_group_size=1)):
            Pipeline(SparkOnDemand(spark), str(self.out), now=NOW).run([spool_source(str(self.new))])
        table = self.pipeline().lake.table("", "bronze")
        files = [file for file in table.files() if file.values["family"] == "transport"]
        groups = Groups(("producer", "transport"), [pa.table({"producer": [S1], "transport": ["t"]})])
        original = pq.ParquetFile.read_row_group
        with patch.object(pq.ParquetFile, "read_row_group", autospec=True, side_effect=original) as read:
            found = find_events(table, files, "transport", groups, Budget(1_000_000))
        self.assertEqual(found.column("producer").to_pylist(), [S1])
        searched = [tuple(call.args[1:]) for call in read.call_args_list]
        self.assertEqual(searched, [(0, ["producer"]), (0, ["producer", "transport"]), (1, ["producer"])])

    def test_of_neighbouring_days_only_events_near_midnight_are_searched(self) -> None:
        for time in ("00:09:00", "12:00:00", "23:52:00"):
            self.closed(S1, "t", time=time)
        self.signed(S1, "t", True)
        self.signed(S1, "u", True, time="23:59:00")
        self.taken_in()
        table = self.pipeline().lake.table("", "bronze")
        wanted = pa.table({"producer": [S1, S1], "transport": ["t", "u"]})
        groups = Groups(("producer", "transport"), [wanted])
        for family, days, hours in (
            ("transport", (), [0, 12, 23]),
            ("transport", {str(DAY)}, [0, 23]),
            ("receipt", {str(DAY)}, [23]),
        ):
            files = [file for file in table.files() if file.values["family"] == family]
            own = groups.renamed((server_column(family), "transport"))
            found = find_events(table, files, family, own, Budget(1_000_000), days)
            times = found.column("ts").to_pylist()
            self.assertEqual([time // 3_600_000 % 24 for time in times], hours)
            self.assertEqual(len(found.column("transport")), len(hours))

    def test_a_run_searches_only_files_of_the_servers_of_late_events(self) -> None:
        self.begin_with("two_runs")
        self.closed(S1, "late")
        self.signed(S1, "t", False)
        searched: dict[str, bool] = {}
        original = FileTexts.can_contain

        def recorded(texts: FileTexts, path: str, column: str, wanted: pa.Array) -> bool:
            found = original(texts, path, column, wanted)
            searched[path] = searched.get(path, False) or found
            return found

        with patch.object(FileTexts, "can_contain", recorded):
            self.taken_in()
        # The first run read the file of S1, the second that of S2.
        for family in ("transport", "receipt"):
            source = "spool" if family == "transport" else "receipts"
            found = {path: seen for path, seen in searched.items() if f"family={family}/" in path}
            numbers = {path.partition(f"run=={source}.")[2][0]: seen for path, seen in found.items()}
            self.assertEqual(numbers, {"0": True, "1": False, "2": True}, family)
        self.check_tables()

    def test_a_process_with_many_runs_knows_which_files_have_other_transports(self) -> None:
        """In its third run, such as that of a stream, it does not read the files of its first run."""
        self.stream = Pipeline(SparkOnDemand(spark), str(self.out), now=NOW)
        original = FileHashes.can_contain
        read: dict[str, bool] = {}

        def recorded(hashes: FileHashes, path: str, column: str, wanted: pa.Array | None) -> bool:
            found = original(hashes, path, column, wanted)
            read[path] = read.get(path, False) or found
            return found

        # The files of the first run belong to the day of the late events and to the day before it.
        self.closed(S1, f"{1:032x}", DAY, "23:58:00")
        self.signed(S1, f"{1:032x}", True, NEXT, "00:01:00")
        self.taken_in()
        for number in (2, 3):
            self.closed(S1, f"{number:032x}", NEXT, "00:02:00")
            self.signed(S1, f"{number:032x}", False, NEXT, "00:02:10")
            read.clear()
            with patch.object(FileHashes, "can_contain", recorded):
                self.taken_in()
        of_first_run = {path: seen for path, seen in read.items() if ".0." in path.partition("/")[0]}
        self.assertEqual(set(of_first_run.values()), {False})
        self.assertEqual(len(of_first_run), 2)
        # The first run found these transports in no file, and knows nothing of the files of the second run.
        self.assertIn(True, read.values())
        self.check_tables()

    def test_transports_of_two_servers_with_one_name_are_different(self) -> None:
        self.begin_with("two_runs")
        self.signed(S2, "u", True)
        self.taken_in()
        # The server reports the transport ``u`` late, and S1 reports one of the same name.
        self.closed(S2, "u", total_ab=90_000)
        self.closed(S1, "u")
        self.taken_in()
        self.signed(S1, "u", True)
        self.signed(S1, "u", False)
        self.taken_in()
        self.check_tables()

    def test_a_day_is_affected_only_by_transports_of_the_same_server(self) -> None:
        self.closed(S1, "t", DAY, "23:59:59")
        self.closed(S2, "u", DAY, "23:59:59")
        self.taken_in()
        self.signed(S2, "t", True, NEXT, "00:00:01")
        self.assertEqual(self.taken_in().days, [str(NEXT)])
        self.signed(S1, "t", True, NEXT, "00:00:02")
        self.assertEqual(self.taken_in().days, [str(DAY), str(NEXT)])
        self.check_tables()

    def test_requests_near_midnight_need_no_transport(self) -> None:
        """All requests of a file may have been refused, and all its receipts rejected. Such events name no
        transport."""
        refused = {"by": "dst", "reason": "refused", "accept_ms": None}
        self.closed(S1, None, DAY, "23:59:58", **refused)
        self.taken_in()
        self.closed(S1, None, NEXT, "00:00:01", **refused)
        self.receipts[S1].event("receipt_checked", NEXT, "00:00:01", reason="the receipt is not signed")
        self.assertEqual(self.taken_in().days, [str(NEXT)])
        self.closed(S1, "t", NEXT, "00:00:02")
        self.signed(S1, "t", True, NEXT, "00:00:03")
        self.assertEqual(self.taken_in().days, [str(NEXT)])
        self.check_tables()


class AffectedServersTests(TwoServersCase):
    """Rows that late events replace: those of the servers of the late events."""

    def opened(self, server: str, session: int, day: Any = DAY, time: str = "12:10:00") -> None:
        self.boots[server].event("session_open", day, time, peer=f"p{session}", session=session, handshake_ms=4)

    def ended(self, server: str, session: int, time: str) -> None:
        end = {"reason": "connection_lost", "duration_ms": 60_000, "frames": 5, "bytes": 50}
        self.boots[server].event("session_close", DAY, time, peer=f"p{session}", session=session, **end)

    def two_sessions(self) -> None:
        """Make runs over the sessions of two servers, and over an event of the next day, which is the last day."""
        for server in (S1, S2):
            self.closed(server, "t")
            self.opened(server, 1)
            self.opened(server, 2)
            self.ended(server, 2, "12:12:00")
            self.taken_in()
        self.closed(S2, "v", NEXT)
        self.taken_in()

    def late_run(self) -> dict[str, set[str]]:
        """Make a run over late events, and compare all tables.

        :returns: servers of the computed rows, by table, for the tables of which only affected rows are computed.
        """
        servers: dict[str, set[str]] = {}
        original = AffectedTables.rows

        def recorded(tables: AffectedTables, name: str, days: tuple[str, ...]) -> Rows:
            found = original(tables, name, days)
            servers[name] = set(found.rows["server" if "server" in found.rows.column_names else "producer"].to_pylist())
            return found

        with patch.object(AffectedTables, "rows", recorded):
            self.taken_in()
        self.check_tables()
        return servers

    def versions(self, *names: str) -> list[int | None]:
        lake = self.pipeline().lake
        return [lake.table("silver" if name in SILVER else "gold", name).version() for name in names]

    def test_only_rows_of_the_servers_of_late_events_are_computed(self) -> None:
        self.begin_with("two_sessions")
        self.closed(S1, "late", rtt=[1] * 34)
        self.ended(S1, 1, "12:13:00")
        found = self.late_run()
        for name in ("traffic_hour", "close_day", "latency_hour", "pair_day", "verdicts", "settlement_day", "sessions"):
            self.assertEqual(found[name], {S1}, name)

    def test_many_verdicts_on_a_server_are_not_read_into_memory(self) -> None:
        self.begin_with("two_sessions")
        self.closed(S1, "late")
        with patch.object(affected_tables, "MEMORY_ROWS", 1):
            found = self.late_run()
        self.assertIn("verdicts", found)
        self.assertNotIn("settlement_day", found)

    def test_many_verdicts_are_read_in_parts(self) -> None:
        for server in (S1, S2):
            self.closed(server, "t")
        self.taken_in()
        for server in (S1, S2):
            self.closed(server, "late")
        with patch.object(affected_tables, "MEMORY_ROWS", 2), patch.object(affected_tables, "VERDICTS_AT_ONCE", 2):
            self.assertEqual(self.late_run()["settlement_day"], {S1, S2})

    def test_pairs_of_a_client_with_many_events(self) -> None:
        """The events of a pair are searched alone if its client has too many events."""
        for peer in "bccc":
            self.closed(S1, f"t-{self.written}-{peer}", dst=peer)
        self.taken_in()
        self.closed(S1, "late")
        with patch.object(affected_rows, "MAX_AFFECTED_EVENTS", 3):
            found = self.late_run()
        self.assertIn("pair_day", found)
        self.assertNotIn("abuse_day", found)

    def test_the_end_of_a_process_changes_its_lost_sessions(self) -> None:
        """A session that was lost with its process ends with the last event of the process."""
        self.begin_with("two_sessions")
        self.closed(S1, "late", time="12:14:00")
        self.assertEqual(self.late_run()["sessions"], {S1})
        (lost,) = (row for row in self.table("sessions", "silver") if row["server"] == S1 and row["session"] == 1)
        self.assertEqual((lost["reason"], lost["duration_ms"]), ("lost", 4 * 60_000))

    def test_a_start_changes_the_lost_sessions_of_earlier_processes(self) -> None:
        """After the start of another process of a server, the process before counts as lost."""
        for server in (S1, S2):
            self.opened(server, 1, time="23:50:00")
            self.closed(server, "t", time="23:55:00")
        self.closed(S1, "v", NEXT)
        self.taken_in()
        (former,) = (row for row in self.table("sessions", "silver") if row["server"] == S2)
        self.assertEqual(former["reason"], "open")
        # The start of the other process arrives after some of its events, so that no first or last event changes.
        self.boots[S2] = Boot(S2, "boot-of-restart")
        self.closed(S2, "t1", time="23:55:30")
        self.closed(S2, "t2", time="23:57:00")
        self.taken_in()
        self.boots[S2].event("start", DAY, "23:56:00", capacity=5)
        # The last line of each file is an event of a process of S1, so the sessions of S1 are computed, too.
        self.assertEqual(self.late_run()["sessions"], {S1, S2})
        (lost,) = (row for row in self.table("sessions", "silver") if row["server"] == S2)
        self.assertEqual(lost["reason"], "lost")

    def test_the_newest_event_of_the_last_day_changes_sessions_of_all_servers(self) -> None:
        for server in (S1, S2):
            self.opened(server, 1)
        self.taken_in()
        self.closed(S1, "t", time="12:40:00")
        self.assertNotIn("sessions", self.late_run())
        (lost,) = (row for row in self.table("sessions", "silver") if row["server"] == S2)
        self.assertEqual(lost["reason"], "lost")

    def test_the_former_last_day_is_computed_again(self) -> None:
        for server in (S1, S2):
            self.opened(server, 1)
        self.taken_in()
        self.closed(S1, "t", NEXT)
        self.assertNotIn("sessions", self.late_run())
        self.assertEqual({row["reason"] for row in self.table("sessions", "silver")}, {"lost"})

    def test_unchanged_sessions_are_not_written_again(self) -> None:
        """The transports of a server may be events of another process than its sessions."""
        self.begin_with("two_sessions")
        self.boots[S1] = Boot(S1, "boot-of-transports")
        self.closed(S1, "t1")
        self.taken_in()
        before = self.versions("sessions", "session_day")
        self.closed(S1, "t2", time="12:30:00")
        self.assertEqual(self.late_run()["sessions"], {S1})
        self.assertEqual(self.versions("sessions", "session_day"), before)
