"""Manual pages, colours, and bars on narrow terminals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from dmsg.cli.main import main
from dmsg.cli.manual import STATUSES, pages
from dmsg.cli.output import EXIT_CUT, EXIT_FAILED, EXIT_NOBODY, EXIT_UNWANTED, EXIT_USAGE
from tests.cli.json_output import leaves
from tests.cli.test_commands import CommandCase
from tests.cli.test_tools import ToolCase
from tests.forking import COMMAND
from tests.support import asynchronous

DMSG = [sys.executable, "-c", COMMAND]


class PageTests(CommandCase):
    """Manual pages as man(1) shows them."""

    def test_every_command_has_a_manual_page(self) -> None:
        found = dict(pages(main, ("dmsg",)))
        for command in leaves(main):
            name = f"dmsg-{command.replace(' ', '-')}.1"
            self.assertIn(name, found)
            for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES"):
                self.assertIn(f".SH {section}\n", found[name], name)

    def test_documented_exit_statuses_match_the_commands(self) -> None:
        numbers = [int(number) for number, _ in STATUSES if number.isdigit()]
        self.assertEqual(numbers, [0, EXIT_FAILED, EXIT_USAGE, EXIT_NOBODY, EXIT_UNWANTED, EXIT_CUT])

    @asynchronous
    async def test_man_renders_each_page(self) -> None:
        status, out, err = await self.run_command("man", "--write", "pages", "--json")
        self.assertEqual((status, err), (0, ""))
        written = sorted((self.directory / "pages").iterdir())
        self.assertGreater(len(written), 60)
        status, out, err = await self.run_command("man", "discovery", "show")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out, (self.directory / "pages" / "dmsg-discovery-show.1").read_text())
        status, out, err = await self.run_command("man", "nonsense")
        self.assertEqual(status, 2)
        (self.directory / "full").mkdir()
        (self.directory / "full" / "dmsg.1").symlink_to("/dev/full")
        status, out, err = await self.run_command("man", "--write", "full")
        self.assertEqual((status, out, err), (1, "", "dmsg: full/dmsg.1: No space left on device\n"))
        if shutil.which("man") is None:
            raise SkipTest("there is no man here")
        for path in written[::7]:  # Each call of man takes a quarter of a second.
            done = await deferToThread(
                subprocess.run,
                ["man", "-l", "--warnings", "-E", "UTF-8", "-P", "cat", str(path)],
                capture_output=True,
                text=True,
                env={**os.environ, "MANWIDTH": "80"},
            )
            self.assertEqual((done.returncode, done.stderr), (0, ""), path.name)


class TerminalTests(ToolCase):
    """Colours and progress bars on a terminal."""

    async def on_terminal(self, width: int, *arguments: str, **environment: str) -> str:
        """Return the output of a command at a terminal of this width."""
        environment = {**self.environment, **environment}
        command, _ = self.start_at_terminal(*arguments, environment=environment, size=(width, 24))
        self.assertEqual(await command.ended, 0, command.out)
        return command.out.decode(errors="replace")

    @asynchronous
    async def test_progress_bars_fit_in_one_line(self) -> None:
        """A progress bar fits in one line, however narrow the terminal and however long the name."""
        await self.network()
        (self.directory / "inbox").mkdir()
        name = "a rather long name of a film, part one of three.mkv"
        (self.directory / name).write_bytes(os.urandom(1_000_000) * 20)
        listening = self.tool("cp", "--listen", "inbox", "--writable", "--anyone", "--overwrite", "-k", "alice.key")
        await self.said(listening, "is at")
        for width in (30, 60, 120):
            said = await self.on_terminal(width, "cp", name, "alice:")
            self.assertIn("sha256", said)
            # Text that is drawn between two moves of the cursor is at most as wide as the terminal.
            for drawn in re.split(r"\r|\n|\x1b\[\d*[AK]", said.partition("sha256")[0]):
                text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
                if "%" in text or "MB" in text:
                    self.assertLessEqual(len(text), max(width, len(name) + 60) if "MB in" in text else width, text)

    @asynchronous
    async def test_no_color_turns_colours_off(self) -> None:
        await self.network()
        await self.until_listed(self.url, 1)
        colour = r"\x1b\[[0-9;]*m"
        listing = await self.on_terminal(120, "discovery", "list")
        self.assertRegex(listing, colour)
        for name in ("discovery", "doctor"):
            arguments = (name, "list") if name == "discovery" else (name,)
            said = await self.on_terminal(120, *arguments, NO_COLOR="1")
            self.assertNotRegex(said, r"\x1b\[[0-9;]*3[0-7]m", name)


class WithoutTerminalTests(SynchronousTestCase):
    """A pipe gets no colours."""

    def test_help_in_a_pipe_has_no_colours(self) -> None:
        said = subprocess.run([*DMSG, "--help"], capture_output=True, text=True, check=True)
        self.assertNotIn("\x1b", said.stdout)
