"""An option is said once, in its row, and found wherever people meet it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twisted.python.usage import UsageError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.options import FLAG, Number, Text, option, rows_of
from dmsg.pages.settings import PageSettings
from dmsg.servers.settings import ServerSettings
from dmsg.tap import rmb_relay, server
from dmsg.tap.options import EntityOptions
from dmsg.v2019.core.policing import Limits
from tests.docs.option_tables import PAGES, PLUGINS, table, with_tables


@dataclass(frozen=True, slots=True)
class MoreLimits(Limits):
    """Limits with one option more."""

    max_streams: int = option(64, "streams of one connection", Number(2, 1000, "streams"), reloads=True)


class MoreOptions(server.Options):
    """Options of a server with that of :class:`MoreLimits`."""

    limits_class = MoreLimits
    rows = (*server.Options.rows, *(row for row in rows_of(MoreLimits) if row.name == "max-streams"))


class OneRowTests(SynchronousTestCase):
    """``--max-streams``, which is one field of a class of limits."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.file = self.directory / "server.toml"

    def parse(self, *arguments: str) -> Any:
        options = MoreOptions()
        options.parseOptions([f"--key-file={self.directory / 'key'}", "--create", *arguments])
        return options

    def test_the_usage_shows_the_option(self) -> None:
        self.assertRegex(
            str(MoreOptions()), r"--max-streams= +streams of one connection\. \[2 to 1000 streams;\s+default: 64\]\n"
        )
        self.assertEqual(str(MoreOptions()).count("--max-transports="), 1)

    def test_a_value_is_read_from_the_command_line(self) -> None:
        self.assertEqual(self.parse().limits().max_streams, 64)
        self.assertEqual(self.parse("--max-streams=7").limits().max_streams, 7)
        self.assertEqual(self.parse("--max-str", "7").limits().max_streams, 7)

    def test_a_value_out_of_bounds_is_refused(self) -> None:
        for text in ("1", "1001"):
            error = self.assertRaises(UsageError, self.parse, f"--max-streams={text}")
            self.assertEqual(str(error), f"max-streams: {text} is not between 2 and 1000 streams")
        error = self.assertRaises(UsageError, self.parse, "--max-streams=few")
        self.assertEqual(str(error), "max-streams: 'few' is not a number")

    def test_a_value_is_read_from_the_configuration_file(self) -> None:
        self.file.write_text("max_transports = 9\nmax_streams = 5\n")
        config = f"--config={self.file}"
        self.assertEqual(self.parse(config).limits().max_streams, 5)
        # An abbreviated option also takes precedence over the file.
        for arguments in (("--max-streams=6",), ("--max-str=6",)):
            self.assertEqual(self.parse(config, *arguments).limits().max_streams, 6)
        self.file.write_text("max-streams = 0\n")
        error = self.assertRaises(UsageError, self.parse, config)
        self.assertEqual(str(error), f"{self.file}, line 1: max-streams: 0 is not between 2 and 1000 streams")

    def test_a_reload_changes_the_value(self) -> None:
        self.file.write_text("")
        options = self.parse(f"--config={self.file}")
        self.file.write_text("max-streams = 8\nmemory = 5\n")
        fresh, needs_restart = options.read_again()
        self.assertEqual((fresh.limits().max_streams, needs_restart), (8, ["memory"]))

    def test_the_documentation_has_the_row(self) -> None:
        line = "| `--max-streams` | 2 to 1000 streams | 64 | streams of one connection | yes |"
        self.assertIn(line, table(MoreOptions.rows).splitlines())


class RowTests(SynchronousTestCase):
    """Rules that all rows of options keep."""

    def test_documented_option_tables_match_the_rows(self) -> None:
        """``python -m tests.docs.option_tables`` writes them."""
        found = ""
        for page in PAGES:
            text = page.read_text()
            self.assertEqual(text, with_tables(text), page.name)
            found += text
        for plugin in PLUGINS:
            self.assertIn(f"<!-- options: {plugin}", found)

    def test_each_option_has_one_row(self) -> None:
        for name, options in PLUGINS.items():
            names = [row.name for row in options.rows]
            self.assertEqual(len(names), len(set(names)), name)
            letters = [row.short for row in options.rows if row.short]
            self.assertEqual(len(letters), len(set(letters)), name)

    def test_defaults_are_within_their_bounds(self) -> None:
        """The default in the usage is a valid value of the option."""
        for name, options in PLUGINS.items():
            for row in options.rows:
                if not isinstance(row.kind, Number) or row.default_text or row.default is None:
                    continue
                self.assertEqual(row.kind.read(row.default_in_words), row.default, f"{name} --{row.name}")

    def test_values_of_secrets_are_hidden(self) -> None:
        self.assertNotIn("token-of-the-page", repr(ServerSettings(page_token=b"token-of-the-page")))
        self.assertNotIn("token-of-the-page", repr(PageSettings(page_token=b"token-of-the-page")))

    def test_a_no_flag_turns_off_a_default(self) -> None:
        """A flag turns off what is on by default."""

        @dataclass(frozen=True)
        class Settings:
            looks: bool = option(True, "do not look", FLAG, name="no-checks")
            wide: bool = option(False, "look far", FLAG)
            several: tuple[int, ...] = option((1, 2), "numbers", Text("number", int), repeated=True)

        class Options(EntityOptions):
            rows = rows_of(Settings)

        for arguments, expected in (
            ([], Settings(True, False, (1, 2))),
            (["--no-checks", "--several=5", "--several=6"], Settings(False, False, (5, 6))),
            (["--wide"], Settings(True, True, (1, 2))),
        ):
            options = Options()
            options.parseOptions(arguments)
            self.assertEqual(options.make(Settings, several=tuple(options["several"])), expected)

    def test_short_names_of_repeated_options(self) -> None:
        self.assertIn("  -l, --listen=", str(rmb_relay.Options()))
