"""The configuration file, and ``dmsg config``."""

from __future__ import annotations

import json
import os
import stat

from dmsg.keys import SecKey
from tests.cli.files.test_send_by_code import CodeCase
from tests.support import asynchronous


class ConfigTests(CodeCase):
    """Real processes; the file is ``config.toml`` in their directory."""

    async def config(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        return await self.run_command("config", *arguments, **environment)

    @asynchronous
    async def test_a_setting_is_set_printed_and_unset(self) -> None:
        file = self.directory / "config.toml"
        self.assertEqual(await self.config("path"), (0, "config.toml\n", ""))
        status, _, err = await self.config()
        self.assertEqual(status, 0)
        self.assertIn("nothing is set", err)
        file.write_text("# mine\nmin_servers = 1  # one is enough\n")
        file.chmod(0o640)
        for name, *values in (
            ("discovery", "http://a:1", "http://b:2"),
            ("send.words", "3"),
            ("receive.yes", "true"),
            ("min-servers", "4"),
        ):
            self.assertEqual((await self.config("set", name, *values))[0], 0, name)
        text = file.read_text()
        self.assertIn("# mine", text)
        self.assertIn("min_servers = 4 # one is enough", text.replace("  #", " #"))
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o640)
        status, out, _ = await self.config("show", "--json", DMSG_KEY_FILE="k")
        shown = {one["name"]: (one["value"], one["source"]) for one in map(json.loads, out.splitlines())}
        self.assertEqual(shown["discovery"], (["http://a:1", "http://b:2"], "config.toml"))
        self.assertEqual(shown["send.words"], (3, "config.toml"))
        self.assertEqual(shown["key-file"], ("k", "DMSG_KEY_FILE"))
        self.assertEqual((await self.config("unset", "send.words"))[0], 0)
        self.assertNotIn("words", file.read_text())
        status, _, err = await self.config("unset", "send.words")
        self.assertEqual((status, err), (2, "dmsg: send.words is not set in config.toml\n"))

    @asynchronous
    async def test_unusable_values_are_not_stored(self) -> None:
        for setting, words in (
            (("send.nonsense", "1"), "dmsg send has no option --nonsense"),
            (("send.words", "abc"), "words: 'abc' is not a valid integer"),
            (("send.words", "1"), "words: 1 is not in the range"),
            (("send.words", "3", "4"), "words takes one value"),
            (("nosuch.x", "1"), "there is no command dmsg nosuch"),
            (("discovery.list.json", "true"), "dmsg discovery list has no option --json"),
            (("min-servers", "many"), "min-servers: 'many'"),
            (("agent", "perhaps"), "agent must be true or false"),
            (("encryption", "maybe"), "encryption: 'maybe' is not one of"),
        ):
            status, _, err = await self.config("set", *setting)
            self.assertEqual((status, err.count("\n")), (2, 1), setting)
            self.assertIn(words, err)
        self.assertFalse((self.directory / "config.toml").exists())
        for setting in (
            ("agent", "false"),
            ("prefer", str(SecKey.generate().public)),
            ("cp.retry", "10"),
            ("key-file", "~/k"),
        ):
            self.assertEqual((await self.config("set", *setting))[0], 0, setting)
        status, out, _ = await self.config("--json")
        self.assertEqual((status, len(out.splitlines())), (0, 4))

    @asynchronous
    async def test_a_setting_that_breaks_all_commands_can_be_removed(self) -> None:
        file = self.directory / "config.toml"
        file.write_text("foo = 1\n[nope]\nx = 1\n[name]\nadd = 3\n")
        for name, status in (("foo", 0), ("nope.x", 0), ("name.add", 0), ("name.add", 2)):
            self.assertEqual((await self.config("unset", name))[0], status, name)
        self.assertEqual(file.read_text().strip(), "")
        file.write_text("[name]\nadd = 3\n")
        status, _, err = await self.config("set", "name.add.replace", "true")
        self.assertEqual((status, err), (2, "dmsg: config.toml: add is not a table\n"))
        file.write_text("[nope]\nx = 1\n")
        self.assertEqual((await self.config())[2], "dmsg: config.toml: [nope] is not a command of dmsg\n")

    @asynchronous
    async def test_a_linked_configuration_file_stays_a_link(self) -> None:
        (self.directory / "dotfiles").mkdir()
        (self.directory / "dotfiles" / "dmsg.toml").write_text("min-servers = 1\n")
        (self.directory / "config.toml").symlink_to("dotfiles/dmsg.toml")
        self.assertEqual((await self.config("set", "min-servers", "4"))[0], 0)
        self.assertTrue((self.directory / "config.toml").is_symlink())
        self.assertIn("min-servers = 4", (self.directory / "dotfiles" / "dmsg.toml").read_text())

    @asynchronous
    async def test_mistakes_in_settings_print_one_line(self) -> None:
        file = self.directory / "config.toml"
        for text, error in (
            ("nonsense\n", "config.toml: "),
            ("words = 3\n", "config.toml, line 1: 'words' cannot be set for all commands"),
            ("\n[send]\nword = 3\n", "config.toml, line 3: dmsg send has no option --word"),
            ("names = 3\n", "config.toml, line 1: the setting 'names' must be a text"),
            ("[send]\nwords = [1, 2]\n", "config.toml: words takes one value"),
            ("[send]\nwords = 1979-05-27\n", "words must be a text, a number"),
            ("agent = 5\n", "config.toml: agent must be true or false"),
            ("key-file = true\n", "config.toml: key-file must be a text or a number"),
            ("[recieve]\ndir = 'x'\n", "config.toml: [recieve] is not a command of dmsg"),
            ("min-servers = 'many'\n", "'many' is not a valid integer"),
            ("[send]\nwords = 99\n", "99 is not in the range"),
        ):
            file.write_text(text)
            status, out, err = await self.run_command("send", "--text", "x", "-d", "http://127.0.0.1:1")
            self.assertEqual((status, out), (2, ""), err)
            self.assertIn(error, err)
            self.assertEqual((await self.run_command("send", "--help"))[0], 0, "help is there all the same")
        for arguments, error in (
            (("set", "words", "3"), "for all commands"),
            (("set", "nonsense"), "Missing argument"),
        ):
            file.unlink(missing_ok=True)
            status, _, err = await self.config(*arguments)
            self.assertEqual(status, 2, err)
            self.assertIn(error, err)
        os.mkdir(file)
        self.assertEqual(await self.config(), (2, "", "dmsg: config.toml: Is a directory\n"))

    @asynchronous
    async def test_a_file_that_cannot_be_written_is_no_wrong_use(self) -> None:
        (self.directory / "file").touch()
        status, _, err = await self.config("set", "min-servers", "4", DMSG_CONFIG="file/config.toml")
        self.assertEqual((status, err.count("\n")), (1, 1), err)
        self.assertIn("dmsg: file/config.toml: ", err)

    @asynchronous
    async def test_the_command_line_precedes_the_environment_and_the_file(self) -> None:
        """The command line, the environment, the file; and no option at all is needed any more."""
        await self.network()
        home = str(self.directory.absolute())
        (self.directory / "config.toml").write_text(
            f'discovery = "{self.url}"\nmin-servers = 1\nnames = "~/book"\n[receive]\nyes = true\ndir = "~/inbox"\n'
        )
        (self.directory / "a").write_bytes(b"a")
        sender = self.start("send", "a", HOME=home)
        code = (await self.said(sender, r"code: (\S+)"))[1]
        status, out, err = await self.run_command("receive", code, HOME=home)
        self.assertEqual(status, 0, err)
        self.assertTrue((self.directory / "inbox" / "a").exists())
        await self.ends(sender, 0)
        for arguments, environment in (
            (["-d", "http://127.0.0.1:1"], {}),
            ([], {"DMSG_DISCOVERY": "http://127.0.0.1:1"}),
        ):
            status, _, err = await self.run_command("discovery", "list", *arguments, HOME=home, **environment)
            self.assertEqual(status, 1)
            self.assertIn("refused", err)
        self.assertEqual((await self.run_command("discovery", "list", HOME=home))[0], 0)
        key = SecKey.generate().public.hex()
        self.assertEqual((await self.run_command("name", "add", "x", key, HOME=home))[0], 0)
        self.assertTrue((self.directory / "book").exists())
