"""Messages for people who type a command of another program, or who have no configuration yet; all in this process."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner, Result
from rich.console import Console
from rich.table import Table
from twisted.trial.unittest import SynchronousTestCase

from dmsg.agent.wire import error_line, raise_error
from dmsg.cli import output
from dmsg.cli.agent import status_run
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.files.cp_run import jobs_of
from dmsg.cli.files.send_by_key import transfer_progress
from dmsg.cli.files.urls import http_url
from dmsg.cli.main import COMMANDS, GROUPS, main
from dmsg.cli.params import client_options_of
from dmsg.cli.screen import print_table
from dmsg.cli.suggestions import COMMANDS as HABITS, SUBCOMMANDS
from dmsg.clients.address_book import AddressBook
from dmsg.errors import ConnectFailed, ConnectTimeout, EntryNotFound, WrongUse
from dmsg.keys import SecKey

KEY = SecKey.from_seed(b"words").public.text


class WordsCase(SynchronousTestCase):
    def dmsg(self, *arguments: str, **environment: str | None) -> Result:
        home = Path(self.mktemp())
        home.mkdir()
        mine = {"HOME": str(home), "DMSG_AGENT": str(home / "agent"), "XDG_CONFIG_HOME": None, "DMSG_CONFIG": None}
        mine |= {"DMSG_DISCOVERY": None, "DMSG_KEY_FILE": None, "DMSG_NAMES": None}
        return CliRunner().invoke(main, list(arguments), env=mine | environment, prog_name="dmsg")

    def told(self, *arguments: str) -> str:
        """The error of a command that is typed wrong."""
        result = self.dmsg(*arguments)
        self.assertEqual(result.exit_code, 2, (arguments, result.output))
        return str(result.stderr)


class SuggestionTests(WordsCase):
    def test_commands_of_other_programs_get_a_suggestion(self) -> None:
        for habit, line in HABITS.items():
            self.assertNotIn(habit, COMMANDS, "it is a command now")
            self.assertIn(f"No such command '{habit}'; say: {line}", self.told(habit, "bob"))

    def test_suggested_commands_exist(self) -> None:
        for line in HABITS.values():
            words = line.split()
            if words[0] == "dmsg" and not words[1].startswith("-"):
                self.assertIn(words[1].rstrip(","), COMMANDS, line)

    def test_typing_errors_get_a_suggestion(self) -> None:
        self.assertIn("say: dmsg send", self.told("sned", "x"))
        self.assertIn("say: dmsg name remove", self.told("name", "rm", "x"))
        self.assertIn("say: dmsg discovery list", self.told("discovery", "ls"))
        self.assertIn("say: dmsg key new", self.told("key", "create", "x"))
        self.assertNotIn("say:", self.told("qqqq"))
        self.assertEqual(set(SUBCOMMANDS) & {"add", "list", "show", "remove", "new"}, set())

    def test_arguments_of_other_programs_get_a_suggestion(self) -> None:
        for typed, line in (
            (f"nc {KEY} 80", f"dmsg nc {KEY}:80"),
            (f"ping {KEY} 80", f"dmsg ping {KEY}:80"),
            (f"forward -L 8000:{KEY}:80", f"dmsg forward 8000 {KEY}:80"),
            (f"forward -L8000:{KEY}:80", f"dmsg forward 8000 {KEY}:80"),
            (f"forward 8000:{KEY}:80", f"dmsg forward 8000 {KEY}:80"),
            (f"forward {KEY}:80 8000", f"dmsg forward 8000 {KEY}:80"),
            ("expose localhost:22", "dmsg expose 22"),
            ("expose 10.0.0.1:22", "dmsg expose 22 --host 10.0.0.1"),
            ("socks 1080", "dmsg socks --listen 1080"),
            ("serve 8080", "dmsg serve . --port 8080"),
        ):
            self.assertTrue(self.told(*typed.split(), "-d", "http://x").endswith(f"; say: {line}\n"), typed)

    def test_help_is_a_command(self) -> None:
        self.assertEqual(self.dmsg("help").output, self.dmsg("--help").output)
        self.assertEqual(self.dmsg("help", "cp").output, self.dmsg("cp", "--help").output)
        self.assertEqual(self.dmsg("help", "name", "add").output, self.dmsg("name", "add", "--help").output)
        self.assertEqual(self.dmsg("name", "help", "add").output, self.dmsg("name", "add", "--help").output)

    def test_help_shows_a_commands_own_options(self) -> None:
        """The options of the network, which all commands share, are shown only on request."""
        short, whole = (self.dmsg("cp", option).output for option in ("--help", "--help-all"))
        self.assertIn("--writable", short)
        self.assertNotIn("--min-servers", short)
        self.assertIn("dmsg cp --help-all\n", short)
        self.assertIn("--writable", whole)
        self.assertIn("--min-servers", whole)
        self.assertNotIn("--help-all", whole)

    def test_help_shows_examples_before_the_description(self) -> None:
        said = self.dmsg("cp", "--help").output
        places = [
            said.index(words) for words in ("Copy files to and from", "Examples:", "Repeat the command", "Options:")
        ]
        self.assertEqual(places, sorted(places))

    def test_help_of_all_is_in_groups(self) -> None:
        """Each command is listed once, with a verb and an object, on one line."""
        said = self.dmsg("--help").output
        for title, rows in GROUPS.items():
            part = " ".join(said.partition(f"\n{title}:\n")[2].partition("\n\n")[0].split())
            for name, (_, text) in rows.items():
                self.assertIn(f"{name} {text}", part)

    def test_every_version_option_prints_the_same(self) -> None:
        shown = {
            self.dmsg(*words).output for words in (("-V",), ("--version",), ("ping", "-V"), ("name", "list", "-V"))
        }
        self.assertEqual(len(shown), 1, shown)


class DiscoveryTests(WordsCase):
    """A user without a discovery is told what a discovery is and how to get one."""

    def test_every_command_explains_the_missing_discovery(self) -> None:
        file = self.mktemp()
        Path(file).write_text("x")
        told = {
            self.told(*words)
            for words in (
                ("ping", KEY),
                ("send", file),
                ("cp", file, f"{KEY}:"),
                ("up",),
                ("socks",),
                ("discovery", "list"),
                ("discovery", "show", KEY),
                ("key", "succeed", file, file),
                ("messaging", "listen"),
                ("analytics", "send", str(Path(file).parent), KEY),
            )
        }
        self.assertEqual(len(told), 1, told)
        (text,) = told
        for word in (
            "A discovery is",
            "dmsg config set discovery URL",
            "DMSG_DISCOVERY=URL",
            "dmsg join INVITATION",
            "dmsg host",
        ):
            self.assertIn(word, text)
        self.assertTrue(all(len(line) <= 80 for line in output.wrap(text, 80).splitlines()))


class MistakeTests(WordsCase):
    """Wrong usage ends with status 2, and changes nothing."""

    def test_unknown_names_keys_settings_and_files_are_one_line(self) -> None:
        for typed, words in (
            ("name add bob 02ab", "a public key has 53 characters, or 66 in hexadecimal, not 4"),
            (f"name add no_name {KEY}", "is not a name"),
            (f"name add {KEY} {KEY}", "is a public key: choose a name that is not one"),
            ("name show nobody", "neither a public key"),
            ("config set nonsense x", "cannot be set for all commands"),
            ("config set ping.nonsense x", "has no option"),
            ("send no-file -d http://x", "no-file: No such file"),
            (f"ping {KEY}:99999 -d http://x", "is not a port"),
        ):
            self.assertIn(words, self.told(*typed.split()), typed)

    def test_errors_of_running_commands_are_one_line(self) -> None:
        with self.assertRaises(SystemExit) as ended:
            output.fail(WrongUse("x"))
        self.assertEqual(ended.exception.code, 2)
        for url in ("http://x", "dmsg://", f"dmsg://{KEY}:99999/"):
            with self.assertRaises(WrongUse):
                http_url(url)
        with self.assertRaises(WrongUse):
            jobs_of(("a",), "b", recursive=False)


class ErrorTests(SynchronousTestCase):
    """An error speaks of the remote, by the name that its person gave it."""

    def setUp(self) -> None:
        path = self.mktemp()
        key = SecKey.from_seed(b"words").public
        self.short = key.short
        self.key = str(key)
        names = AddressBook(Path(path))
        names.add("bob", key)
        self.patch(os, "environ", {**os.environ, "DMSG_NAMES": path})

    def test_errors_name_the_remote(self) -> None:
        text = f"nobody listens at {self.short}:80, or not for this key"
        error = ConnectFailed(text, (("03cd", text),), self.key)
        said = "nobody listens at bob:80, or not for this key (asked through server 03cd)"
        self.assertEqual(output.describe(error), said)
        self.assertEqual(output.describe(ConnectFailed(text)), text)
        self.assertEqual(output.describe(EntryNotFound(f"no entry of {self.short}", self.key)), "no entry of bob")

    def test_errors_through_the_agent_name_the_remote(self) -> None:
        with self.assertRaises(ConnectFailed) as caught:
            raise_error(error_line(ConnectTimeout(f"{self.short}: not connected within 3 s", (), self.key)))
        self.assertIsInstance(caught.exception, ConnectTimeout)
        self.assertEqual(output.describe(caught.exception), "bob: not connected within 3 s")


class ResumeTimeoutTests(SynchronousTestCase):
    def test_peers_with_temporary_keys_are_awaited_briefly(self) -> None:
        """A peer that is killed has lost its temporary key, so it cannot resume its streams. A given ``--resume`` is
        used as it is.
        """
        for words, expected in (((), 30.0), (("--resume", "90"), 90.0), (("--resume", "4"), 4.0)):
            found: list[float] = []

            @click.command()
            @client_options_of(by_agent=None, loads=False)
            def command(settings: ClientSettings, found: list[float] = found) -> None:
                found.append(settings.with_own_key().resume_timeout)

            result = CliRunner().invoke(command, ["-d", "http://x", *words])
            self.assertEqual((result.exit_code, found), (0, [expected]), result.output)


class HelpTests(WordsCase):
    def test_help_has_no_sphinx_markup(self) -> None:
        """Docstrings are written for Sphinx, and read in a terminal and in man(1)."""

        def each(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
            context = click.Context(command, parent=parent, info_name=name)
            yield command.get_help(context)
            if isinstance(command, click.Group):
                for one in command.list_commands(context):
                    below = command.get_command(context, one)
                    assert below is not None
                    yield from each(below, one, context)

        shown = list(each(main, "dmsg", None))
        self.assertGreater(len(shown), 60)
        self.assertEqual([line for text in shown for line in text.splitlines() if "`" in line], [])
        self.assertIn("'dmsg receive'", " ".join(self.dmsg("send", "--help").output.split()))
        self.assertNotIn("`", self.dmsg("man", "send").output)


class NarrowTests(SynchronousTestCase):
    """All output can be read on terminals of 40 to 60 columns."""

    def printed(self, width: int, *, terminal: bool = True) -> str:
        table = Table("", "server", "address", box=None, pad_edge=False)
        table.add_row("*", KEY, "relay.example.org:8080")
        table.add_row("", "02ab12cd...", "127.0.0.1:80")
        file = io.StringIO()
        print_table(Console(file=file, width=width, force_terminal=terminal, color_system=None), table)
        return file.getvalue()

    def test_a_table_that_has_no_room(self) -> None:
        lines = self.printed(60).splitlines()
        self.assertEqual("".join(lines[:2]), f"* server: {KEY}")
        self.assertEqual(lines[-1], "address: 127.0.0.1:80")
        self.assertTrue(all(len(line) <= 60 for line in lines))
        self.assertIn(KEY, self.printed(120).splitlines()[1])
        self.assertNotIn("server:", self.printed(120))
        self.assertNotIn("server:", self.printed(60, terminal=False))

    def test_a_mark_without_a_header_is_beside_its_row(self) -> None:
        lines = self.printed(60).splitlines()
        self.assertEqual(lines[0].split(":")[0], "* server")
        self.assertNotIn("*", [line.strip() for line in lines])

    def test_a_long_name_leaves_room_for_the_numbers_of_a_transfer(self) -> None:
        for width in (40, 60, 80, 90, 120, 200):
            console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
            progress = transfer_progress(console)
            progress.add_task("a picture, " * 30, total=206_000_000, completed=33_400_000)
            with console.capture() as capture:
                console.print(progress.get_renderable())
            lines = capture.get().rstrip("\n").split("\n")
            self.assertEqual(len(lines), 1, lines)
            self.assertLessEqual(len(lines[0]), width)
            self.assertIn("33.4/206.0 MB" if width >= 60 else "16%", lines[0])
            self.assertIn("a picture", lines[0])

    def test_status_fits_narrow_terminals(self) -> None:
        said: list[str] = []
        self.patch(status_run, "say", lambda text="": said.append(text))
        for width, expected in ((40, 4), (100, 2)):
            self.patch(status_run, "columns", lambda width=width: width)
            said.clear()
            status_run._table("services", [("port 5201", "dmsg iperf --serve (process 12345)", "17 taken")])
            self.assertEqual(len(said), expected, said)
            self.assertTrue(all(len(line) <= width for line in said), said)
