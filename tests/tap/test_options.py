"""Options of the twistd plugins, and what a wrong one says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from twisted.application.service import IServiceMaker
from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.logger import Logger, LogPublisher
from twisted.plugin import getPlugins
from twisted.python.usage import UsageError
from twisted.scripts._twistd_unix import ServerOptions
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.keys import SecKey, write_key_file
from dmsg.net.streams.address import DmsgAddress
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from dmsg.tap import collector, discovery, messaging, rmb_peer, rmb_registry, rmb_relay, server
from dmsg.tap.options import json_log
from dmsg.tap.telemetry import collector_address
from tests.support import asynchronous

TWIN_SECRET = "0x" + "11" * 32
"""Seed of a twin."""
KEY = SecKey.from_seed(b"collector").public.hex()


class DescriptorTests(SynchronousTestCase):
    """Limit of open files of an entity."""

    def test_each_entity_raises_its_limit_of_open_files(self) -> None:
        """With the usual soft limit of 1024, strangers could use up the connections of a discovery."""
        directory = Path(self.mktemp())
        directory.mkdir()
        key = [f"--key-file={directory / 'key'}", "--create"]
        twin = directory / "twin"
        write_secret(str(twin), TwinSecret(TWIN_SECRET, "sr25519"))
        registry, url = "--registry=http://127.0.0.1:9", "http://127.0.0.1:9"
        (directory / "senders").touch()
        limits = (1024, 4000)
        self.patch(resource, "getrlimit", lambda kind: limits)

        def set_limits(kind: int, wanted: tuple[int, int]) -> None:
            nonlocal limits
            limits = wanted

        self.patch(resource, "setrlimit", set_limits)
        for plugin, arguments in (
            (discovery, ["--store=memory:"]),
            (server, key),
            (messaging, key),
            (
                collector,
                [*key, f"--store={directory / 'store'}", f"--senders={directory / 'senders'}", f"--discovery={url}"],
            ),
            (rmb_registry, ["--store=memory:"]),
            (rmb_relay, [registry, "--domain=127.0.0.1", f"--queue=sqlite:{directory / 'queue'}"]),
            (rmb_peer, [registry, "--relay=ws://127.0.0.1:9", f"--key-file={twin}"]),
        ):
            limits = (1024, 4000)
            options: Any = plugin.Options()
            options.parseOptions(arguments)
            plugin.makeService(options, reactor)
            self.assertEqual(limits, (4000, 4000), plugin)


class ConfigTests(SynchronousTestCase):
    """Settings in a file, and what of them can change."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.file = self.directory / "server.toml"

    def parse(self, *arguments: str) -> Any:
        options = server.Options()
        options.parseOptions([f"--config={self.file}", f"--key-file={self.directory / 'key'}", "--create", *arguments])
        return options

    def test_the_command_line_goes_before_the_file(self) -> None:
        self.file.write_text(
            'listen = ["tcp:8081", "tcp:8082"]\npublic-address = "h:1"\nmax_connections = 77\nbyte-rate = 1000\n'
            'discovery = "http://127.0.0.1:9"\n'
        )
        options = self.parse("--max-connections=5")
        self.assertEqual(options["listen"], ["tcp:8081", "tcp:8082"])
        self.assertEqual(options["discovery"], ["http://127.0.0.1:9"])
        limits = options.limits()
        self.assertEqual((limits.max_connections, limits.byte_rate), (5, 1000))

    def test_mistakes_in_the_file_name_their_line(self) -> None:
        for text in (
            "nonsense",
            "no-such-setting = 1",
            "max-connections = 0",
            "max-connections = true",
            "listen = 5",
            "listen = [5]",
            "config = 'x'",
            "allow = '/nowhere'",
            "admission-hook = 'ftp://x'",
            "admission-down = 'maybe'",
            "drain-timeout = -1",
            "byte-rate = 'fast'",
            "key-file = ['x']",
            "\x00",
        ):
            self.file.write_text(text)
            with self.assertRaises(UsageError, msg=text) as caught:
                self.parse()
            self.assertNotIn("\n", str(caught.exception))
        self.file.write_bytes(b"\xff\xfe")
        self.assertRaises(UsageError, self.parse)
        self.file.unlink()
        self.assertRaises(UsageError, self.parse)

    def test_sighup_changes_reloadable_options(self) -> None:
        self.file.write_text("max-connections = 7")
        options = self.parse("--request-rate=9")
        self.file.write_text("max-connections = 8\nrequest-rate = 1")
        limits = options.read_again()[0].limits()
        self.assertEqual((limits.max_connections, limits.request_rate), (8, 9))
        self.file.write_text("max-connections = none")
        self.assertRaises(UsageError, options.read_again)


class OptionTests(SynchronousTestCase):
    """Bad input is a UsageError of one line."""

    def setUp(self) -> None:
        self.key_file = self.mktemp()

    def parse(self, *arguments: str) -> Any:
        options = server.Options()
        options.parseOptions([f"--key-file={self.key_file}", "--create", *arguments])
        return options

    def test_a_server_has_documented_defaults(self) -> None:
        options = self.parse()
        self.assertEqual((options["listen"], options["max-connections"]), (["tcp:8080"], 10_000))
        self.assertTrue(Path(self.key_file).exists())
        self.assertEqual(self.parse()["key"].public, options["key"].public)

    def test_mistakes_in_server_options_are_one_line(self) -> None:
        public = Path(self.mktemp())
        write_key_file(public, SecKey.generate())
        public.chmod(0o644)
        for arguments in (
            ("--listen=nonsense",),
            ("--listen=tcp:port",),
            ("--discovery=nonsense", "--public-address=h:1"),
            ("--discovery=ftp://x", "--public-address=h:1"),
            ("--discovery=http://user:secret@h:1", "--public-address=h:1"),
            ("--discovery=http://h",),  # The public address is missing.
            ("--public-address=nonsense",),
            ("--public-address=h:99999",),
            ("--public-address=h:0",),
            ("--max-connections=0",),
            ("--max-connections=many",),
            ("--max-transports=40000",),
            ("--log-format=xml",),
            ("--metrics=nonsense",),
            (f"--key-file={public}",),
            ("--telemetry=t", "--telemetry-keys=plain"),
            ("--telemetry=t", "--telemetry-secret=nowhere"),
            ("--telemetry=t", "--telemetry-secret=/dev/zero"),
            ("--telemetry=t", f"--telemetry-secret={public}"),
            ("--telemetry=t", "--telemetry-rotate=0"),
            ("--telemetry=t", "--telemetry-limit=much"),
            (f"--telemetry-to={KEY}", "--discovery=http://h", "--public-address=h:1"),  # The directory is missing.
            ("--telemetry=t", f"--telemetry-to={KEY}"),  # The discovery is missing.
            ("--telemetry=t", "--telemetry-to=02ab", "--discovery=http://h", "--public-address=h:1"),
            ("--telemetry=t", f"--telemetry-to={KEY}:0", "--discovery=http://h", "--public-address=h:1"),
            ("--unknown",),
            ("word",),
        ):
            error = self.assertRaises(UsageError, self.parse, *arguments)
            self.assertNotIn("\n", str(error))

    def test_mistakes_in_files_of_twistd_are_one_line(self) -> None:
        """twistd itself would print a traceback."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "file").touch()
        os.mkfifo(directory / "pipe")
        (directory / "away").symlink_to(directory / "no" / "log")
        for name in ("logfile", "pidfile"):
            for path, why in (
                (directory / "no" / "log", "No such file or directory"),
                (directory / "away", "No such file or directory"),
                (directory, "Is a directory"),
                (directory / "file" / "log", "Not a directory"),
                (directory / "pipe", "this is a pipe or a terminal, not a file"),
            ):
                said = self.said_by_twistd("-n", f"--{name}={path}")
                self.assertEqual(said, f"twistd dmsg-discovery: --{name}: {path}: {why}\n")
        self.assertEqual(
            self.said_by_twistd("-n", "--rundir=/nodir"), "twistd dmsg-discovery: --rundir: /nodir: no such directory\n"
        )
        for good in (
            ("-n", f"--logfile={directory / 'log'}", f"--pidfile={directory / 'pid'}"),
            ("-n", f"--logfile={directory / 'file'}", "--pidfile="),
            ("-n", "--logfile=-", f"--rundir={directory}"),
            ("-n", "--logfile=/dev/null"),
            ("-n", "--syslog", "--logfile=/nodir/x"),
            ("-n", f"--chroot={directory}", "--rundir=/nodir", "--pidfile=/nodir/x"),
        ):
            self.assertEqual(self.said_by_twistd(*good), "", good)
        self.assertEqual(sorted(os.listdir(directory)), ["away", "file", "pipe"])

    def said_by_twistd(self, *arguments: str) -> str:
        """Return what twistd prints to standard error when it parses these options and those of a discovery."""
        said = io.StringIO()
        self.patch(sys, "stderr", said)
        with contextlib.suppress(SystemExit):
            ServerOptions().parseOptions([*arguments, "dmsg-discovery", "--store=memory:"])
        return said.getvalue()

    def test_mistakes_in_discovery_options_are_one_line(self) -> None:
        for argument in (
            "--listen=nonsense",
            "--store=nonsense",
            "--store=sqlite:",
            "--rate-limit=-1",
            "--burst=0",
            "--server-ttl=soon",
            "--max-servers=0",
            "--log-format=xml",
            "--ranking=file",
            "--ranking-key=02ab",
            f"--ranking-key={SecKey.generate().public.hex()}",
        ):
            self.assertRaises(UsageError, discovery.Options().parseOptions, [argument])
        secure = ["--listen=unix:socket", "--telemetry=t", f"--telemetry-to={KEY}"]
        self.assertRaisesRegex(UsageError, "telemetry-discovery", discovery.Options().parseOptions, secure)

    def test_keys_in_either_form(self) -> None:
        key = SecKey.generate().public
        for text in (key.text, str(key)):
            self.assertEqual(collector_address(f"{text}:7"), DmsgAddress(key, 7))
            self.assertEqual(collector_address(f"dmsg:{text}:7"), DmsgAddress(key, 7))
            options = discovery.Options()
            options.parseOptions(["--listen=tcp:0", "--store=memory:", "--ranking=file", f"--ranking-key={text}"])
            self.assertEqual(options["ranking-key"], key)

    def test_collector_options_are_parsed(self) -> None:
        senders = Path(self.mktemp())
        senders.write_text(f"{KEY}  # a server\n")
        said = {
            "store": "s",
            "senders": str(senders),
            "discovery": "http://h",
            "key-file": self.key_file,
        }

        def parse(**changes: str | None) -> collector.Options:
            options = collector.Options()
            given = {name: value for name, value in (said | changes).items() if value is not None}
            options.parseOptions(["--create", *(f"--{name}={value}" for name, value in given.items())])
            return options

        options = parse(port="17", limit="2", reserve="3")
        self.assertEqual((options["port"], options["limit"], options["reserve"]), (17, 2 << 30, 3 << 20))
        self.assertEqual({str(key) for key in options["senders"].keys}, {KEY})
        wrong = Path(self.mktemp())
        wrong.write_text("not a key\n")
        for name, value in (
            ("store", None),
            ("senders", None),
            ("senders", "nowhere"),
            ("senders", str(wrong)),
            ("discovery", None),
            ("discovery", "ftp://h"),
            ("port", "0"),
            ("limit", "0"),
            ("reserve", "much"),
            ("metrics", "nonsense"),
            ("log-format", "xml"),
            ("key-file", "/dev/null/key"),
        ):
            error = self.assertRaises(UsageError, parse, **{name: value})
            self.assertNotIn("\n", str(error))

    def test_two_entities_run_from_one_directory(self) -> None:
        for daemon, expected in ((["-n"], ""), ([], "dmsg-server.pid"), (["-n", "--pidfile=x"], "x")):
            twistd = ServerOptions()
            twistd.parseOptions([*daemon, "dmsg-server", f"--key-file={self.key_file}", "--create"])
            self.assertEqual(Path(twistd["pidfile"]).name, expected)

    def test_every_plugin_is_found(self) -> None:
        names = {maker.tapname for maker in getPlugins(IServiceMaker)}
        self.assertLessEqual({"dmsg-server", "dmsg-discovery"}, names)


class JSONLogTests(SynchronousTestCase):
    """``--log-format json``."""

    def test_each_log_line_is_json(self) -> None:
        stream = io.StringIO()
        log = Logger(namespace="test", observer=LogPublisher(json_log(stream)))
        log.info("hello {peer}", peer="02ab")
        log.warn("two\nlines")
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        self.assertEqual([line["text"] for line in lines], ["hello 02ab", "two\nlines"])
        self.assertEqual((lines[0]["level"], lines[0]["system"], lines[0]["peer"]), ("info", "test", "02ab"))


class StartTests(TestCase):
    """An entity that cannot start says why, in one line, and ends with a status."""

    async def run_twistd(self, *arguments: str) -> tuple[int, str]:
        import sys

        directory = Path(self.mktemp())
        directory.mkdir()
        out, err, status = await getProcessOutputAndValue(
            sys.executable,
            ["-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=", *arguments],
            path=str(directory),
            env={**__import__("os").environ, "HOME": str(directory.resolve())},
            reactor=reactor,
        )
        return status, (out + err).decode()

    @asynchronous
    async def test_a_port_in_use(self) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for entity in ("dmsg-server", "dmsg-discovery"):
                status, text = await self.run_twistd(entity, f"--listen=tcp:{port}:interface=127.0.0.1")
                self.assertEqual(status, 1, text)
                self.assertIn("Address already in use", text)
                self.assertNotIn("Traceback", text)

    @asynchronous
    async def test_a_store_that_cannot_be_opened(self) -> None:
        status, text = await self.run_twistd(
            "dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=sqlite:/nonexistent/x"
        )
        self.assertEqual(status, 1, text)
        self.assertIn("dmsg-discovery: /nonexistent/x: unable to open database file", text)
        self.assertNotIn("Traceback", text)

    @asynchronous
    async def test_telemetry_that_cannot_be_written(self) -> None:
        for entity in ("dmsg-server", "dmsg-discovery"):
            status, text = await self.run_twistd(
                entity, "--listen=tcp:0:interface=127.0.0.1", "--telemetry=/dev/null/spool"
            )
            self.assertEqual(status, 1, text)
            self.assertIn("telemetry directory cannot be used", text)
            self.assertNotIn("Traceback", text)

    @asynchronous
    async def test_every_line_of_a_json_log_is_json(self) -> None:
        status, text = await self.run_twistd("dmsg-server", "--listen=tcp:0:interface=203.0.113.1", "--log-format=json")
        self.assertEqual(status, 1, text)
        lines = [json.loads(line) for line in text.splitlines()]
        self.assertTrue(any("Couldn't listen" in line["text"] for line in lines), text)

    @asynchronous
    async def test_a_wrong_option(self) -> None:
        status, text = await self.run_twistd("dmsg-server", "--max-connections=many")
        self.assertEqual(status, 1, text)
        self.assertEqual(text, "twistd dmsg-server: max-connections: 'many' is not a number\n")
