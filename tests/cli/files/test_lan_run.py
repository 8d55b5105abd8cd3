"""``--lan`` where no code is used, and ways that fail before anything is sent to a network."""

from __future__ import annotations

from dmsg.keys import SecKey
from tests.cli.test_tools import ToolCase
from tests.support import asynchronous

KEY = SecKey.from_seed(b"lan option").public.text


class LanOptionTests(ToolCase):
    """Uses of the option that cannot mean anything."""

    @asynchronous
    async def test_the_option_is_for_codes(self) -> None:
        (self.directory / "film").write_bytes(b"film")
        network = "http://127.0.0.1:9"
        for arguments in (
            ("send", "--lan", "also", "film", KEY),
            ("send", "--lan", "only", "--text", "hello", KEY),
            ("receive", "--listen", "--anyone", "--lan", "only"),
        ):
            status, _, error = await self.run_command(*arguments, DMSG_DISCOVERY=network)
            self.assertEqual(status, 2, error)
            self.assertIn("--lan needs a code", error)

    @asynchronous
    async def test_a_default_in_the_configuration_file_concerns_codes_only(self) -> None:
        (self.directory / "config.toml").write_text('[send]\nlan = "only"\n')
        status, _, error = await self.run_command(
            "send", "absent", KEY, DMSG_DISCOVERY="http://127.0.0.1:9", DMSG_CONFIG="config.toml"
        )
        self.assertEqual(status, 2, error)
        self.assertIn("absent: No such file", error)

    @asynchronous
    async def test_both_ways_need_a_discovery(self) -> None:
        (self.directory / "film").write_bytes(b"film")
        status, _, error = await self.run_command("send", "--lan", "also", "film", DMSG_DISCOVERY="")
        self.assertEqual(status, 2, error)
        self.assertIn("discovery", error)
