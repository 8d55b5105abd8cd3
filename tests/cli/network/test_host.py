"""``dmsg host --invitation``: the invitation of the network that runs, or of one that would run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from tests.cli.network.test_host_run import HostCase
from tests.cli.test_commands import Command
from tests.support import asynchronous


class InvitationTests(HostCase):
    """A person who asks again for an invitation, and has forgotten the options of the network."""

    def setUp(self) -> None:
        super().setUp()
        home = self.directory.absolute() / "home"
        home.mkdir()
        self.data_home = {"XDG_DATA_HOME": str(home)}

    async def asked(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        return await self.run_command("host", "--invitation", *arguments, **self.data_home, **environment)

    async def hosted(self, *more: str) -> tuple[Command, str]:
        """Start the network, and return its process and its invitation."""
        host = self.host("--name=club", *more)
        return host, (await self.until_said(host, r"dmsg join (dmsg1\w+)"))[1]

    @asynchronous
    async def test_the_invitation_of_the_running_network_needs_no_other_option(self) -> None:
        _, invitation = await self.hosted("--behind-proxy=https://relay.example.org")
        self.assertEqual(await self.asked("--directory=state"), (0, f"{invitation}\n", ""))
        status, out, err = await self.asked("--directory=state", "--name=other", "--json")
        self.assertEqual((status, err), (0, ""))
        found = json.loads(out)
        self.assertEqual((found["invitation"], found["name"]), (invitation, "club"))
        self.assertEqual(found["discovery"], "https://relay.example.org")
        self.assertEqual(found["address"], f"127.0.0.1:{self.server}")

    @asynchronous
    async def test_the_default_directory_may_be_the_one(self) -> None:
        default = [one for one in self.arguments if not one.startswith("--directory")]
        host = self.start(*default, **self.data_home)
        invitation = (await self.until_said(host, r"dmsg join (dmsg1\w+)"))[1]
        self.assertEqual(await self.asked(), (0, f"{invitation}\n", ""))
        status, out, err = await self.asked("--directory=other")
        self.assertEqual(status, 0)
        self.assertNotEqual(out.strip(), invitation, "no network runs with that directory")
        self.assertIn("other", err)

    @asynchronous
    async def test_a_network_that_was_killed_is_not_taken_for_a_running_one(self) -> None:
        host, invitation = await self.hosted()
        os.kill(int(host.transport.pid), signal.SIGKILL)  # type: ignore[union-attr]
        await host.ended
        state = self.directory / "state"
        self.assertTrue((state / "host.lock").exists() and (state / "network.json").exists(), "it left both")
        address = "--public-address=203.0.113.5"
        status, out, err = await self.asked("--directory=state", address)
        self.assertEqual(status, 0)
        self.assertRegex(out, r"^dmsg1\w+\n$")
        self.assertNotEqual(out.strip(), invitation)
        (line,) = err.splitlines()
        self.assertIn(f"no dmsg host runs with the directory {state.absolute()}", line)
        self.assertIn("203.0.113.5:8080", line)
        status, _, err = await self.asked("--directory=state", address, "--quiet")
        self.assertEqual((status, err), (0, ""))
        status, out, _ = await self.asked("--directory=state", address, "--json")
        self.assertEqual(json.loads(out)["address"], "203.0.113.5:8080")

    @asynchronous
    async def test_a_network_that_has_ended_as_asked_leaves_no_other_answer(self) -> None:
        host, invitation = await self.hosted()
        os.kill(int(host.transport.pid), signal.SIGINT)  # type: ignore[union-attr]
        await host.ended
        status, out, err = await self.asked(*self.arguments[1:], "--name=club")
        self.assertEqual((status, out), (0, f"{invitation}\n"), "the same options lead to the same invitation")
        self.assertIn("no dmsg host runs", err)

    @asynchronous
    async def test_a_running_network_without_a_readable_record_is_an_error(self) -> None:
        """The options may be others than those of the running network, so its invitation is unknown."""
        await self.hosted()
        for content in ("", "{}", None):
            record = Path(self.directory / "state/network.json")
            record.unlink() if content is None else record.write_text(content)
            status, out, err = await self.asked("--directory=state")
            self.assertEqual((status, out), (1, ""), content)
            self.assertTrue(re.search(r"network\.json.*cannot be read", err), err)
