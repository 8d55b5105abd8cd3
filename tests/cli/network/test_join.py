"""``dmsg join`` and ``leave``: what they write into the configuration file."""

from __future__ import annotations

import tomllib
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from dmsg.clients.invitations import Invitation
from dmsg.keys import SecKey
from tests.cli.test_commands import CommandCase
from tests.support import asynchronous

KEY = SecKey(bytes(31) + b"\x01").public


def invitation(name: str, host: str) -> str:
    """Return an invitation to the network of a host."""
    return Invitation(name, f"http://{host}:9090", KEY, f"{host}:8080").text


class ConfigurationTests(CommandCase):
    """Networks in the configuration file; nothing is asked of the network."""

    def content(self) -> dict[str, Any]:
        return tomllib.loads((self.directory / "config.toml").read_text())

    async def join(self, text: str, *more: str) -> tuple[int, str, str]:
        return await self.run_command("join", "--no-check", text, *more, DMSG_DISCOVERY="")

    @asynchronous
    async def test_the_first_network_is_the_default_and_others_are_named(self) -> None:
        (self.directory / "config.toml").write_text("# mine\n[send]\nwords = 3\n")
        self.assertEqual((await self.join(invitation("home", "10.0.0.1")))[0], 0)
        status, _, err = await self.join(invitation("work", "10.0.0.2"))
        self.assertEqual(status, 0)
        self.assertIn("--network work", err)
        content = self.content()
        self.assertEqual(content["discovery"], "home")
        self.assertEqual(
            content["networks"],
            {
                "home": {"discovery": "http://10.0.0.1:9090", "server": KEY.text},
                "work": {"discovery": "http://10.0.0.2:9090", "server": KEY.text},
            },
        )
        self.assertEqual(content["send"], {"words": 3})
        self.assertIn("# mine", (self.directory / "config.toml").read_text())

    @asynchronous
    async def test_a_name_that_is_taken_needs_another_one(self) -> None:
        await self.join(invitation("home", "10.0.0.1"))
        status, out, err = await self.join(invitation("home", "10.0.0.2"))
        self.assertEqual((status, out), (2, ""))
        self.assertIn("dmsg leave home", err)
        self.assertEqual((await self.join(invitation("home", "10.0.0.2"), "--name", "cabin"))[0], 0)
        self.assertEqual((await self.join(invitation("home", "10.0.0.1")))[0], 0)

    @asynchronous
    async def test_leaving_the_default_leaves_no_default(self) -> None:
        await self.join(invitation("home", "10.0.0.1"))
        await self.join(invitation("work", "10.0.0.2"))
        status, out, err = await self.run_command("leave", "home")
        self.assertEqual((status, out), (0, "left home\n"))
        self.assertIn("dmsg config set discovery work", err)
        self.assertEqual(sorted(self.content()), ["networks"])
        status, _, err = await self.run_command("leave", "home")
        self.assertEqual(status, 2)
        self.assertIn("joined: work", err)
        self.assertEqual((await self.run_command("leave", "work"))[0], 0)
        self.assertEqual(self.content(), {})

    @asynchronous
    async def test_the_error_for_an_unknown_network_lists_the_known_ones(self) -> None:
        await self.join(invitation("home", "10.0.0.1"))
        status, out, err = await self.run_command("discovery", "list", "--network", "hme", DMSG_DISCOVERY="")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("joined: home", err)

    @asynchronous
    async def test_a_malformed_table_is_one_line_with_its_place(self) -> None:
        (self.directory / "config.toml").write_text('[networks.home]\nurl = "http://10.0.0.1:9090"\n')
        status, out, err = await self.run_command("discovery", "list", "--network", "home", DMSG_DISCOVERY="")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("[networks.home] needs a setting 'discovery'", err)

    @asynchronous
    async def test_a_bad_invitation_is_one_line_and_nothing_is_written(self) -> None:
        text = invitation("home", "10.0.0.1")
        for bad in ("5274-guitar-alpha-juice", text[:-3], text.replace(text[20], "2" if text[20] != "2" else "3", 1)):
            status, out, err = await self.join(bad)
            self.assertEqual((status, out), (2, ""), bad)
            self.assertEqual(len(err.splitlines()), 1)
        self.assertFalse((self.directory / "config.toml").exists())

    @asynchronous
    async def test_the_whole_line_that_a_host_prints_can_be_pasted(self) -> None:
        text = invitation("home", "10.0.0.1")
        for words in ((f"dmsg join {text}",), ("dmsg", "join", text), (f"$ dmsg join {text[:30]}\n{text[30:]}\n",)):
            status, out, err = await self.run_command("join", "--no-check", *words, DMSG_DISCOVERY="")
            self.assertEqual(status, 0, err)
        self.assertIn("joined home", out)

    @asynchronous
    async def test_networks_joined_at_the_same_time_are_all_kept(self) -> None:
        joins = [self.join(invitation(f"n{number}", f"10.0.0.{number}")) for number in range(1, 4)]
        for one in await gatherResults([Deferred.fromCoroutine(one) for one in joins]):
            self.assertEqual(one[0], 0)
        content = self.content()
        self.assertEqual(sorted(content["networks"]), ["n1", "n2", "n3"])
        self.assertIn(content["discovery"], content["networks"])
