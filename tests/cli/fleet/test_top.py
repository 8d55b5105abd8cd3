"""``dmsg top``: what entities say of themselves, in one table."""

from __future__ import annotations

import io
import json
import select
import socket
from typing import cast

from rich.console import Console
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.fleet.entity_metrics import Snapshot, read, row
from dmsg.cli.fleet.top_run import draw_table
from tests.cli.test_commands import CommandCase
from tests.net.support import LOOPBACK
from tests.support import asynchronous

SERVER = """\
dmsg_server_connections {clients}
dmsg_server_available_connections {free}
dmsg_server_held_bytes {held}
dmsg_server_memory_limit_bytes 1000
dmsg_server_registered {registered}
dmsg_server_frames_total {frames}
dmsg_server_frame_bytes_total {bytes}
dmsg_server_drops_total{{reason="flood"}} {drops}
dmsg_server_drops_total{{reason="refused"}} 1
dmsg_server_relay_seconds_bucket{{le="0.001"}} {quick}
dmsg_server_relay_seconds_bucket{{le="0.01"}} {slow}
dmsg_server_relay_seconds_bucket{{le="+Inf"}} {slow}
"""
NUMBERS = dict(clients=10, free=90, held=1, registered=1, frames=0, bytes=0, drops=0, quick=0, slow=0)


def seen(at: float, health: dict[str, object] | None = None, **numbers: float) -> Snapshot:
    """A look at a server."""
    return read(at, SERVER.format(**{**NUMBERS, **numbers}), json.dumps(health or {"status": "ok"}))


class NumbersTests(SynchronousTestCase):
    """Rates from two samples, and problems of entities."""

    def test_rates_are_the_growth_between_two_polls(self) -> None:
        before = seen(10.0, frames=100, bytes=1000, drops=5, quick=10, slow=10)
        one = row("a", seen(12.0, frames=300, bytes=9000, drops=9, quick=10, slow=30), before)
        self.assertEqual((one.kind, one.status, one.worse, one.why), ("server", "ok", 0, ""))
        self.assertEqual((one.in_rate, one.byte_rate, one.refused_rate), (100.0, 4000.0, 2.0))
        self.assertEqual((one.slowest, one.memory, one.clients, one.free), (0.01, 0.001, 10, 90))
        first = row("a", before, None)
        self.assertEqual((first.in_rate, first.byte_rate, first.slowest), (None, None, None))

    def test_a_restarted_entity_has_no_negative_rate(self) -> None:
        self.assertEqual(row("a", seen(12.0, frames=50), seen(10.0, frames=1000)).in_rate, 25.0)

    def test_problems_are_displayed_with_their_reason(self) -> None:
        for look, why in (
            (seen(0, {"status": "draining"}), "draining"),
            (seen(0, registered=0), "not registered"),
            (seen(0, {"status": "ok", "reachable": False}), "cannot connect to its public address"),
            (
                seen(0, {"status": "ok", "shared_with": "10.0.0.1:8080"}),
                "another server with its key is at 10.0.0.1:8080",
            ),
            (seen(0, clients=95, free=5), "nearly full"),
            (seen(0, held=950), "memory 95% used"),
            (seen(0, {"status": "full"}, clients=100, free=0), "full, nearly full"),
            (Snapshot(0, error="nothing listens there"), "nothing listens there"),
        ):
            one = row("a", look, None)
            self.assertEqual(one.why, why)
            self.assertGreater(one.worse, 0)

    def test_an_address_that_is_no_entity_is_reported(self) -> None:
        for metrics, health in (
            ("", "{}"),
            ("up 1\n", '{"status": "ok"}'),
            ("dmsg_server_frames_total x\n", '{"status": "ok"}'),
            (SERVER.format(**NUMBERS), "[]"),
            (SERVER.format(**NUMBERS), "<html>"),
        ):
            with self.assertRaises(ValueError):
                read(0.0, metrics, health)

    def test_control_characters_in_names_are_escaped(self) -> None:
        self.assertNotIn("\x1b", seen(0, {"status": "\x1b[2Jok"}).status)

    def test_a_discovery_without_servers_is_a_problem(self) -> None:
        told = 'dmsg_discovery_entries_by_kind{{kind="client"}} 5\ndmsg_discovery_entries_by_kind{{kind="{}"}} {}\n'
        for kind, number, why in (("server", 0, "no server has an entry"), ("both", 1, "")):
            one = row("a", read(0, told.format(kind, number), '{"status": "ok"}'), None)
            self.assertEqual(one.why, why)


class TableTests(SynchronousTestCase):
    """The table on terminals of several widths."""

    def lines(self, width: int, *names: str) -> list[str]:
        rows = [row(name, seen(0), None) for name in names]
        rows.append(row("127.0.0.1:1", Snapshot(0.0, error="nothing listens there"), None))
        console = Console(width=width, file=io.StringIO())
        console.print(draw_table(rows, width))
        return cast(io.StringIO, console.file).getvalue().splitlines()

    def test_ports_and_words_stay_whole(self) -> None:
        for width in (40, 50, 60, 70, 80, 90, 100, 110, 120, 160):
            lines = self.lines(width, "127.0.0.1:39905")
            self.assertTrue(any("127.0.0.1:39905 " in line for line in lines), lines)
            self.assertTrue(any("listens" in line for line in lines), lines)
            self.assertLessEqual(max(map(len, lines)), width)

    def test_a_long_name_is_broken_before_its_port(self) -> None:
        words = " ".join(self.lines(80, "relay-number-one.example.org:39905")).split()
        self.assertIn(":39905", words)


class TopTests(CommandCase):
    """The command, over real entities."""

    async def network(self) -> list[str]:
        url = await self.start_discovery(f"--metrics={LOOPBACK}")
        server = await self.start_server(f"--discovery={url}", f"--metrics={LOOPBACK}")
        full = await self.start_server(f"--metrics={LOOPBACK}", "--max-connections=1")
        await self.raw_client(full)
        ports = [one.metrics_port.getHost().port for one in (self.discovery, server, full)]
        return [f"http://127.0.0.1:{port}" for port in ports]

    @asynchronous
    async def test_top_once_prints_a_table_or_json(self) -> None:
        urls = await self.network()
        status, out, err = await self.run_command("top", "--once", "--every", "0.5", *urls)
        self.assertEqual((status, err), (1, ""))
        lines = out.splitlines()
        self.assertRegex(lines[0], r"^\d\d:\d\d:\d\d  3 watched, 1 to be looked at")
        rows = [line.split() for line in lines if "127.0.0.1" in line]
        self.assertEqual(rows[0][1:3], ["full,", "nearly"])
        self.assertEqual(sorted(row[2] for row in rows[1:]), ["discovery", "server"])
        status, out, err = await self.run_command(
            "top", "--once", "--every", "0.5", "--json", *urls, "http://127.0.0.1:1"
        )
        self.assertEqual((status, err), (1, ""))
        told = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([one["why"] for one in told], ["nothing listens there", "full, nearly full", "", ""])
        status, out, err = await self.run_command("top", "--once", "--every", "0.5", "--only", "discovery", urls[0])
        self.assertEqual((status, err), (0, ""))
        self.assertIn("nothing wrong", out)

    @asynchronous
    async def test_the_table_fits_the_terminal_and_restores_the_screen(self) -> None:
        """The table fits any width of the terminal; Ctrl-C ends the command and restores the screen."""
        urls = await self.network()
        for width in (40, 80, 160):
            text, status = await self.on_terminal(width, ["top", "--every", "0.5", *urls])
            self.assertEqual(status, 130)
            self.assertIn("\x1b[?1049h", text)  # The program switches to the alternate screen and back.
            self.assertIn("\x1b[?1049l", text)
            self.assertIn("3 watched", text)
            self.assertEqual("bytes/s" in text, True)
            self.assertEqual("99 of 100" in text, width >= 90)

    @asynchronous
    async def test_ctrl_c_ends_top_while_an_entity_hangs(self) -> None:
        """An entity that takes connections and says nothing, as one that hangs."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            told = ["top", "--every", "0.5", "--timeout", "1", url]
            text, status = await self.on_terminal(80, told)
            self.assertEqual(status, 130)
            self.assertIn("no answer", text)
        # The exit status is the same if Ctrl-C arrives during the first request, when nothing is shown yet.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            text, status = await self.on_terminal(80, ["top", "--timeout", "60", url], asked=silent)
            self.assertEqual(status, 130)

    @asynchronous
    async def test_the_exit_status_matches_the_displayed_problems(self) -> None:
        urls = await self.network()
        status, out, _ = await self.run_command("top", "--once", "--every", "0.5", "--only", "server", *urls)
        self.assertEqual(status, 1)
        self.assertIn("2 watched, 1 to be looked at", out)
        status, out, _ = await self.run_command("top", "--once", "--every", "0.5", "--only", "discovery", *urls)
        self.assertEqual(status, 0)
        self.assertIn("1 watched, nothing wrong", out)

    async def on_terminal(
        self, width: int, arguments: list[str], asked: socket.socket | None = None
    ) -> tuple[str, int]:
        """Output and status of the command, for which Ctrl-C is typed after three looks.

        :param asked: type Ctrl-C when a connection to this socket is there, instead.
        """
        command, process = self.start_at_terminal(*arguments, size=(width, 24))

        def is_ready() -> bool:
            if asked is None:
                return command.out.count(b"watched") >= 3
            return bool(select.select([asked], [], [], 0)[0])

        await self.until(lambda: is_ready() or command.ended.called)
        process.write(b"\x03")
        status = await command.ended
        return command.out.decode(errors="replace"), status
