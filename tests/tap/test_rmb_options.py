"""Options of the message bus' plugins, and what a wrong one says."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.python.usage import UsageError
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.keylock import hold_key
from dmsg.rmb.twins.secrets import SECRET, TwinSecret, write_secret
from dmsg.tap import rmb_peer, rmb_registry, rmb_relay
from tests.support import asynchronous

URL = "--registry=http://127.0.0.1:9"


def parse(module: Any, *arguments: str) -> Any:
    options = module.Options()
    options.parseOptions(list(arguments))
    return options


class RelayOptionsTests(SynchronousTestCase):
    """Names and short forms of the reference, and our own."""

    def test_options_of_the_reference_are_accepted(self) -> None:
        """-m, -l ADDRESS:PORT, -r redis, -w and -u, --limit with two words, -p, -d."""
        options = parse(
            rmb_relay, URL, "-m", "a.example", "-m", "http://127.0.0.1:8080", "-l", "[::]:8080", "-l", "127.0.0.1:81",
            "-r", "redis://localhost:6379", "-w", "2", "-u", "5", "--limit", "100", "5000", "-p", "60", "-d",
        )  # fmt: skip
        settings = options.settings()
        self.assertEqual({"a.example", "http://127.0.0.1:8080"}, settings.domains)
        self.assertEqual(["tcp6:8080:interface=\\:\\:", "tcp:81:interface=127.0.0.1"], settings.listen)
        self.assertEqual(
            ("redis://localhost:6379", (100, 5000), 60.0), (settings.queue, settings.limit, settings.ranker_period)
        )
        self.assertEqual((10, 1), (settings.max_sessions, options["debug"]))

    def test_a_chain_registry_is_accepted(self) -> None:
        """-s NODE... as --registry tfchain:NODE; several values behind one name; what is not needed is said."""
        said = io.StringIO()
        self.patch(sys, "stderr", said)
        words = ("-s", "wss://a:443", "wss://b:443", "-m", "a.example", "b.example", "--catchup-threshold", "600")
        settings = parse(rmb_relay, *words).settings()
        self.assertEqual(settings.registry, "tfchain:wss://a:443")
        self.assertEqual(settings.domains, {"a.example", "b.example"})
        self.assertIn("only the first is used", said.getvalue())
        self.assertIn("--catchup-threshold does nothing", said.getvalue())
        for arguments, words_of_error in (
            ((URL, "-s", "wss://a:443"), "give only one of the two"),
            ((), "tfchain:wss://HOST:PORT"),
            (("--registry=nonsense",), "tfchain:wss://HOST:PORT"),
            (("--registry=wss://a:443",), "write tfchain:wss://a:443"),
            ((URL, "alone"), "Wrong number of arguments"),
        ):
            error = self.assertRaises(UsageError, parse, rmb_relay, *arguments)
            self.assertIn(words_of_error, str(error))

    def test_version_option_prints_the_version(self) -> None:
        said = io.StringIO()
        self.patch(sys, "stdout", said)
        for word in ("-V", "--version"):
            self.assertRaises(SystemExit, parse, rmb_relay, word)
        self.assertEqual(said.getvalue(), 2 * f"dmsg {version('dmsg')}\n")

    def test_relay_defaults_need_only_a_registry(self) -> None:
        settings = parse(rmb_relay, URL).settings()
        self.assertEqual(
            (["tcp:8080"], "sqlite:rmb-relay.sqlite", None), (settings.listen, settings.queue, settings.limit)
        )
        self.assertEqual(
            (86400, False, 10_000), (settings.max_token_ttl, settings.token_reuse, settings.queue_limits.messages)
        )
        self.assertIsNone(parse(rmb_relay, URL, "--token-ttl=0").settings().max_token_ttl)
        # The option accepts one word or two, with a comma and a blank as in the reference's document.
        for words in (
            ["--limit=7,8"],
            ["--limit", "7,8"],
            ["--limit", "7, 8"],
            ["--limit", "7,", "8"],
            ["--limit=7,", "8"],
        ):
            self.assertEqual((7, 8), parse(rmb_relay, URL, *words).settings().limit, words)
        self.assertTrue(parse(rmb_relay, URL, "--durable").settings().durable)

    def test_mistakes(self) -> None:
        """Each mistake is reported in one line."""
        for arguments in (
            (),
            ("--registry=",),
            ("--registry=ftp://x",),
            (URL, "--domain=a b"),
            (URL, "--domain="),
            (URL, "--domain=http://x/y"),
            (URL, "--listen=nonsense"),
            (URL, "--listen=127.0.0.1:99999"),
            (URL, "--queue=memory:"),
            (URL, "--queue=sqlite:"),
            (URL, "--limit=5"),
            (URL, "--limit=0,5"),
            (URL, "--limit=-1,5"),
            (URL, "--limit=nan,5"),
            (URL, "--workers=0"),
            (URL, "--max-sessions=0"),
            (URL, "--token-ttl=-1"),
            (URL, "--queue-length=x"),
            (URL, "--log-format=xml"),
        ):
            error = self.assertRaises(UsageError, parse, rmb_relay, *arguments)
            self.assertNotIn("\n", str(error), arguments)


class PeerOptionsTests(SynchronousTestCase):
    """Options of the peer, whose secret is never an argument."""

    def setUp(self) -> None:
        self.key = str(Path(self.mktemp()))
        write_secret(self.key, TwinSecret("0x" + "11" * 32, "ed25519"))
        self.good = (URL, "--relay=ws://127.0.0.1:1", f"--key-file={self.key}")

    def test_the_command_line_overrides_the_file(self) -> None:
        settings = parse(rmb_peer, *self.good, "--relay=wss://r.example", "--no-update").settings()
        self.assertEqual(("ed25519", False, False), (settings.key_type, settings.update, settings.strict))
        self.assertEqual(["ws://127.0.0.1:1", "wss://r.example"], list(settings.relays))
        self.assertEqual("sr25519", parse(rmb_peer, *self.good, "-k", "SR25519").settings().key_type)

    def test_the_secret_is_read_from_the_environment(self) -> None:
        """RMB_SECRET, when no file is said."""
        self.patch(os, "environ", {**os.environ, SECRET: "0x" + "22" * 32})
        self.assertEqual("0x" + "22" * 32, parse(rmb_peer, *self.good[:2]).settings().secret)

    def test_mistakes(self) -> None:
        """Each mistake is reported in one line; other words on the command line are refused and not repeated in the
        message.
        """
        Path(self.key + ".open").write_text("0x" + "11" * 32)
        Path(self.key + ".empty").touch(0o600)
        uploads = f"--uploads={self.key}"
        for arguments in (
            self.good[1:],
            (self.good[0], self.good[2]),
            self.good[:2],
            (*self.good[:2], "--key-file=/nowhere"),
            (*self.good[:2], f"--key-file={self.key}.open"),
            (*self.good[:2], f"--key-file={self.key}.empty"),
            (*self.good[:2], "--key-file=/"),
            (*self.good, "--relay=http://x"),
            (*self.good, *("--relay=ws://a", "--relay=ws://b", "--relay=ws://c", "--relay=ws://d")),
            (*self.good, "--key-type=rsa"),
            (*self.good, "--redis=http://x"),
            (*self.good, "--redis=redis://u:secret@h"),
            (*self.good, uploads),
            (*self.good, "-m", "bottom drive obey"),
            (*self.good, "--seed", "0x" + "11" * 32),
        ):
            error = self.assertRaises(UsageError, parse, rmb_peer, *arguments)
            self.assertNotIn("\n", str(error), arguments)
            for secret in ("bottom", "11111", "secret@"):
                self.assertNotIn(secret, str(error))


class HelpTests(SynchronousTestCase):
    def test_every_plugin_has_help(self) -> None:
        """Every plugin can say what it takes."""
        for module, word in ((rmb_relay, "--domain"), (rmb_peer, "--relay"), (rmb_registry, "--store")):
            self.assertIn(word, module.Options().getUsage())

    def test_help_in_a_pipe_whose_reader_has_ended_prints_no_traceback(self) -> None:
        """As in ``twistd rmb-peer --help | head``."""
        for option in ("--help", "-h", "--version"):
            reading, writing = os.pipe()
            os.close(reading)
            with open(writing, "wb") as pipe:
                done = subprocess.run(
                    [sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "rmb-peer", option],
                    stdout=pipe,
                    stderr=subprocess.PIPE,
                    text=True,
                    timeout=60,
                )
            self.assertEqual((done.returncode, done.stderr), (128 + signal.SIGPIPE, ""), option)


class RegistryOptionsTests(SynchronousTestCase):
    def test_registry_stores_are_parsed(self) -> None:
        """Stores, and what is none."""
        self.assertEqual(":memory:", parse(rmb_registry, "--store=memory:")["store"])
        self.assertEqual("x", parse(rmb_registry, "--store=sqlite:x")["store"])
        for wrong in ("--store=x", "--store=sqlite:", "--store=memory:x", "--listen=x", "--rate-limit=-1", "--burst=0"):
            self.assertRaises(UsageError, parse, rmb_registry, wrong)


class ProcessTests(TestCase):
    """Output for a person who starts a process that cannot start."""

    timeout = 60

    async def run_twistd(self, *arguments: str) -> tuple[int, str]:
        directory = Path(self.mktemp())
        directory.mkdir()
        out, err, status = await getProcessOutputAndValue(
            sys.executable,
            ["-c", "from twisted.scripts.twistd import run; run()", "-n", "--pidfile=", *arguments],
            path=str(directory),
            env={**os.environ, "HOME": str(directory.resolve())},
            reactor=reactor,
        )
        text = (out + err).decode()
        self.assertNotIn("Traceback", text)
        return status, text

    @asynchronous
    async def test_processes_that_cannot_start_say_why(self) -> None:
        """A port in use, a queue that is none, Redis that does not answer."""
        key = str(Path(self.mktemp()).resolve())
        write_secret(key, TwinSecret("0x" + "11" * 32, "ed25519"))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listen = f"--listen=tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
            for arguments, words in (
                (("rmb-relay", URL, listen), "Couldn't listen"),
                (("rmb-relay", URL, "--listen=tcp:0", "--queue=sqlite:/nowhere/q"), "unable to open"),
                (
                    ("rmb-peer", URL, "--relay=ws://127.0.0.1:1", f"--key-file={key}", "--redis=redis://127.0.0.1:1"),
                    "Redis",
                ),
            ):
                status, text = await self.run_twistd(*arguments)
                self.assertEqual(1, status, text)
                self.assertIn(words, text)
                self.assertEqual(text.count("#critical"), 1, text)
                self.assertNotIn("retry", text)

    @asynchronous
    async def test_a_second_relay_in_one_directory(self) -> None:
        queue = Path(self.mktemp()).absolute()
        held = hold_key(queue, "twistd rmb-relay")
        self.addCleanup(held.release)
        status, text = await self.run_twistd("rmb-relay", URL, "--listen=tcp:0", f"--queue=sqlite:{queue}")
        self.assertEqual(1, status, text)
        self.assertIn(f"{queue} is in use by twistd rmb-relay (process {os.getpid()}, since ", text)
        self.assertIn("give this relay another --queue", text)
