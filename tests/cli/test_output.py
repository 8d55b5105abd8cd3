"""Messages of the commands on terminals of different widths."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli import output
from dmsg.cli.output import wrap
from tests.cli.test_commands import CommandCase
from tests.support import asynchronous

INVITATION = "dmsg1" + "a" * 80


class WrapTests(SynchronousTestCase):
    """``wrap``, which breaks the lines of a message between words."""

    def test_no_word_is_broken(self) -> None:
        text = f"dmsg: the host has stopped; its invitation was {INVITATION}, and others may still have it"
        for width in (20, 40, 60, 80, 120, 400):
            lines = wrap(text, width).split("\n")
            self.assertEqual(" ".join(line.strip() for line in lines), text)
            self.assertTrue(all(len(line) <= width or line.strip().startswith("dmsg1") for line in lines), lines)

    def test_a_command_to_type_stays_on_one_line(self) -> None:
        command = "dmsg receive 5274-guitar-alpha-juice"
        self.assertEqual(
            wrap(f"dmsg: on the other machine: {command}", 50), f"dmsg: on the other machine:\n  {command}"
        )
        sentence = "dmsg: not started: dmsg needs a key that no other program of yours uses now"
        self.assertEqual(
            wrap(sentence, 40), "dmsg: not started: dmsg needs a key that\n  no other program of yours uses now"
        )
        # The name of this program, with which a message begins, is no command to type.
        self.assertEqual(wrap("dmsg: dmsg cp is already running", 20), "dmsg: dmsg cp is\n  already running")

    def test_lines_keep_their_indentation(self) -> None:
        text = "ways:\n  one of your friends: dmsg join INVITATION"
        self.assertEqual(wrap(text, 30), "ways:\n  one of your friends:\n    dmsg join INVITATION")
        self.assertEqual(wrap(text, 80), text)


class TerminalTests(CommandCase):
    """Errors and results at a narrow terminal."""

    @asynchronous
    async def test_errors_and_checks_are_broken_between_words(self) -> None:
        home = str(self.directory.absolute())
        environment = {"DMSG_DISCOVERY": "", "HOME": home, "XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home}
        for arguments, words in (
            (("send", "x"), "peers that want to meet use the same discovery:"),
            (("doctor",), "each command creates a new key for its run"),
            (("join", "dmsg1aaaa"), "this invitation was not copied whole: its checksum does not match"),
            (
                ("send", "x", "nobody", "-d", "http://127.0.0.1:1"),
                "'nobody' is neither a public key (53 characters) nor a",
            ),
        ):
            command, _ = self.start_at_terminal(*arguments, environment=environment, size=(50, 40))
            await command.ended
            lines = command.out.decode().replace("\r", "").splitlines()
            long = [line for line in lines if len(line) > 50 and " " in line.strip()]
            self.assertEqual(long, [])
            self.assertIn(words, " ".join(" ".join(lines).split()))

    @asynchronous
    async def test_the_end_of_input_leaves_the_line_of_the_prompt(self) -> None:
        command, process = self.start_at_terminal("receive", "-d", "http://127.0.0.1:1")
        await self.until(lambda: b"code: " in command.out)
        process.write(b"\x04")
        self.assertEqual(await command.ended, 2)
        self.assertIn(b"code: \r\nUsage:", command.out)


class FailedOutputTests(SynchronousTestCase):
    """Notices after standard output has failed."""

    def test_no_notice_follows_a_failed_output(self) -> None:
        said: list[str] = []
        self.patch(output, "say", lambda text, **options: said.append(text))
        self.patch(output, "state", output._Output())
        output.notice("use the code")
        output.state.status = 1
        output.notice("use the code that is dead")
        self.assertEqual(said, ["dmsg: use the code"])
