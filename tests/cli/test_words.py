"""What the command says to people who type from habit, or have nothing yet; all in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.habits import BELOW, COMMANDS as HABITS
from dmsg.cli.main import COMMANDS, main
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


class HabitTests(WordsCase):
    def test_commands_of_other_programs(self) -> None:
        for habit, line in HABITS.items():
            self.assertNotIn(habit, COMMANDS, "it is a command now")
            self.assertIn(f"No such command '{habit}'; say: {line}", self.told(habit, "bob"))

    def test_what_they_are_told_to_type_is_there(self) -> None:
        for line in HABITS.values():
            words = line.split()
            if words[0] == "dmsg" and not words[1].startswith("-"):
                self.assertIn(words[1].rstrip(","), COMMANDS, line)

    def test_typing_errors(self) -> None:
        self.assertIn("say: dmsg send", self.told("sned", "x"))
        self.assertIn("say: dmsg name remove", self.told("name", "rm", "x"))
        self.assertIn("say: dmsg discovery list", self.told("discovery", "ls"))
        self.assertIn("say: dmsg key new", self.told("key", "create", "x"))
        self.assertNotIn("say:", self.told("qqqq"))
        self.assertEqual(set(BELOW) & {"add", "list", "show", "remove", "new"}, set())

    def test_arguments_of_other_programs(self) -> None:
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

    def test_one_version(self) -> None:
        shown = {
            self.dmsg(*words).output for words in (("-V",), ("--version",), ("ping", "-V"), ("name", "list", "-V"))
        }
        self.assertEqual(len(shown), 1, shown)


class DiscoveryTests(WordsCase):
    """One who has no discovery is told what it is, and how to get one."""

    def test_every_command_says_the_same(self) -> None:
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
            "twistd -n dmsg-discovery",
        ):
            self.assertIn(word, text)
        self.assertTrue(all(len(line) <= 80 for line in text.splitlines()))
