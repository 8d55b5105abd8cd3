"""Completion in shells, called in the same way as shells call it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from twisted.trial.unittest import SkipTest

from dmsg.clients.address_book import AddressBook
from dmsg.clients.groups import Groups
from dmsg.keys import SecKey
from tests.cli.test_commands import CommandCase
from tests.forking import COMMAND
from tests.support import asynchronous


class CompletionTests(CommandCase):
    """Completion with an address book of two names."""

    def setUp(self) -> None:
        super().setUp()
        book = AddressBook(self.directory / "names")
        for name in ("alice", "albert", "bob"):
            book.add(name, SecKey.from_seed(name.encode()).public)
        for group in ("family", "friends"):
            Groups(book).add(group, ("bob",))
        (self.directory / "dmsg").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{COMMAND}' \"$@\"\n")
        (self.directory / "dmsg").chmod(0o755)
        (self.directory / "album.zip").write_bytes(b"")
        path = os.pathsep.join([str(self.directory.absolute()), os.environ["PATH"]])
        self.environment = {
            **os.environ,
            "PATH": path,
            "DMSG_NAMES": "names",
            "DMSG_CONFIG": "config.toml",
            "COVERAGE_PROCESS_START": "",
        }

    def run_(self, *arguments: str, **environment: str) -> str:
        return subprocess.run(
            arguments,
            cwd=self.directory,
            env={**self.environment, **environment},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    async def completed(self, line: str) -> list[str]:
        """Return what the command prints in the environment in which bash calls it at Tab."""
        words = line.split(" ")
        environment = {"_DMSG_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        status, out, err = await self.run_command(DMSG_NAMES="names", **environment)
        self.assertEqual((status, err), (0, ""))
        return out.splitlines()

    @asynchronous
    async def test_commands_options_names_codes_and_files_are_completed(self) -> None:
        key = SecKey.from_seed(b"bob").public
        for line, expected in (
            ("dmsg rec", ["plain,receive"]),
            ("dmsg receive 7-gui", ["plain,7-guide-", "plain,7-guilt-", "plain,7-guitar-"]),
            ("dmsg receive 7-cat-guitar-zo", ["plain,7-cat-guitar-zone", "plain,7-cat-guitar-zoo"]),
            ("dmsg ping al", ["plain,albert", "plain,alice"]),
            ("dmsg cp al", ["plain,albert:", "plain,alice:"]),
            ("dmsg cp x", ["file,x"]),
            (f"dmsg ping {str(key)[:6]}", [f"plain,{key}"]),
            (f"dmsg cp {str(key)[:6]}", [f"plain,{key}:"]),
            (f"dmsg ping {key.text[:6]}", [f"plain,{key.text}"]),
            ("dmsg send film.mkv bo", ["plain,bob"]),
            ("dmsg send fi", ["file,fi"]),
            ("dmsg send film.mkv @", ["plain,@family", "plain,@friends"]),
            ("dmsg send film.mkv @FA", ["plain,@family"]),
            ("dmsg send film.mkv @x", ["file,@x"]),
            ("dmsg receive --listen --allow @fr", ["plain,@friends"]),
            ("dmsg name group add fa", ["plain,family"]),
            ("dmsg pair bob --group @fr", ["plain,@friends"]),
            ("dmsg name remove b", ["plain,bob"]),
            ("dmsg ping --key-file a", ["file,a"]),
            ("dmsg completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
            ("dmsg ping --quie", ["plain,--quiet"]),
        ):
            self.assertEqual(await self.completed(line), expected, line)

    @asynchronous
    async def test_a_book_that_cannot_be_read(self) -> None:
        (self.directory / "names").write_text("nonsense\n")
        self.assertEqual("".join(await self.completed("dmsg ping al")), "")

    def test_bash_completes_at_tab(self) -> None:
        script = (
            "source <(dmsg completion bash); COMP_WORDS=(dmsg receive 7-cat-guitar-zo); COMP_CWORD=2; "
            '_dmsg_completion dmsg; echo "${COMPREPLY[@]}"'
        )
        bash = shutil.which("bash")
        assert bash is not None
        self.assertEqual(self.run_(bash, "-c", script), "7-cat-guitar-zone 7-cat-guitar-zoo\n")

    def test_bash_completes_groups_whose_mark_it_takes_for_a_word(self) -> None:
        bash = shutil.which("bash")
        assert bash is not None
        script = (
            "source <(dmsg completion bash); COMP_WORDS=(dmsg send film.mkv @ fa); COMP_CWORD=4; "
            '_dmsg_completion dmsg; echo "${COMPREPLY[@]}"'
        )
        self.assertEqual(self.run_(bash, "-c", script), "@family\n")

    def test_no_blank_in_the_middle_of_a_code(self) -> None:
        """In bash, a code is completed as a whole from its third word on."""
        bash = shutil.which("bash")
        assert bash is not None
        for typed, found in (("7-cat-guita", "nospace 7-cat-guitar-"), ("7-cat-guitar-zon", "7-cat-guitar-zone")):
            script = (
                'source <(dmsg completion bash); compopt() { echo -n "${2} "; }; '
                f'COMP_WORDS=(dmsg receive {typed}); COMP_CWORD=2; _dmsg_completion dmsg; echo "${{COMPREPLY[@]}}"'
            )
            self.assertEqual(self.run_(bash, "-c", script), f"{found}\n")

    def test_fish_completes_at_tab(self) -> None:
        fish = shutil.which("fish")
        if fish is None:
            raise SkipTest("there is no fish here")
        script = "dmsg completion fish | source; complete --do-complete 'dmsg receive 7-cat-guitar-zo'"
        said = self.run_(fish, "--no-config", "-c", script, HOME=str(self.directory.absolute()))
        self.assertEqual(said.split(), ["7-cat-guitar-zone", "7-cat-guitar-zoo"])

    def test_zsh_completes_at_tab(self) -> None:
        """The test presses Tab in a terminal of its own."""
        zsh = shutil.which("zsh")
        if zsh is None:
            raise SkipTest("there is no zsh here")
        (self.directory / ".zshrc").write_text("autoload -U compinit; compinit -u; source <(dmsg completion zsh)\n")
        script = (
            "zmodload zsh/zpty; zpty shell zsh -i; zpty -w shell 'PS1=ready; echo go'; "
            "zpty -r shell seen '*go*ready*'; zpty -wn shell $'dmsg receive 7-cat-guitar-zo\t'; "
            "zpty -r shell seen '*zone*zoo*'; print -r -- $seen; zpty -d shell"
        )
        home = str(self.directory.absolute())
        said = self.run_(zsh, "-f", "-c", script, HOME=home, ZDOTDIR=home, TERM="xterm")
        self.assertIn("7-cat-guitar-zone", said)
        self.assertIn("7-cat-guitar-zoo", said)

    def test_unknown_shells_are_refused(self) -> None:
        self.assertIn("#compdef dmsg", self.run_("dmsg", "completion", "zsh"))
        self.assertIn("complete --no-files --command dmsg", self.run_("dmsg", "completion", SHELL="/usr/bin/fish"))
