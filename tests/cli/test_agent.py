"""One agent for several commands: dmsg up, status and down, and commands that work through the agent."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.agent.log import LOG_SIZE
from dmsg.keys import PubKey, SecKey, write_key_file
from tests.cli.test_commands import Command
from tests.cli.test_tools import ToolCase
from tests.support import asynchronous


class AgentCase(ToolCase):
    """A network, and a home for one person."""

    async def network(self) -> None:
        await super().network()
        self.home = Path(tempfile.mkdtemp(prefix="dmsg-agent-"))  # The path of a socket must be short.
        self.addCleanup(lambda: os.system(f"rm -rf {self.home}"))
        self.environment |= {
            "DMSG_AGENT": str(self.home / "run" / "agent.sock"),
            "HOME": str(self.home),
            "DMSG_CONFIG": str(self.home / "config" / "dmsg" / "config.toml"),
            "XDG_STATE_HOME": str(self.home / "state"),
        }
        self.addCleanup(self.take_down)

    async def take_down(self) -> None:
        await self.run_command("down", **self.environment)

    async def up(self, *options: str) -> dict[str, Any]:
        status, out, err = await self.run_command("up", "--json", *options, **self.environment)
        self.assertEqual(status, 0, err)
        told: dict[str, Any] = json.loads(out)
        return told

    async def asked(self) -> dict[str, Any]:
        """Return the answer of ``dmsg status``."""
        status, out, err = await self.run_command("status", "--json", **self.environment)
        self.assertEqual(status, 0, err)
        told: dict[str, Any] = json.loads(out)
        return told

    async def run_it(self, *arguments: str) -> str:
        """A command that has to succeed."""
        status, out, err = await self.run_command(*arguments, **self.environment)
        self.assertEqual(status, 0, (arguments, out, err))
        return out

    async def service(self, *arguments: str, says: str) -> Command:
        command = self.tool(*arguments)
        await self.said(command, says)
        return command


class LogTests(SynchronousTestCase):
    """Log of an agent in the background."""

    def test_a_long_log_is_rotated(self) -> None:
        path = Path(self.mktemp()) / "deep" / "agent.log"
        program = (
            "import sys, pathlib\n"
            "from dmsg.cli.agent.log import LOG_SIZE, Log\n"
            f"log = Log(pathlib.Path({os.fspath(path)!r}))\n"
            "for number in range(5):\n"
            "    sys.stderr.write(f'{number}' * LOG_SIZE)\n"
            "    log.rotate_if_long()\n"
            "    print('line', number, flush=True)\n"
            "    log.rotate_if_long()\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertEqual(sorted(one.name for one in path.parent.iterdir()), ["agent.log", "agent.log.1"])
        self.assertEqual(path.read_text(), "")
        self.assertEqual(path.with_name("agent.log.1").read_text(), "4" * LOG_SIZE + "line 4\n")

    def test_a_log_that_cannot_be_rotated_continues(self) -> None:
        path = Path(self.mktemp()) / "agent.log"
        program = (
            "import sys, pathlib\n"
            "from dmsg.cli.agent.log import LOG_SIZE, Log\n"
            f"path = pathlib.Path({os.fspath(path)!r})\n"
            "log = Log(path)\n"
            "sys.stderr.write('x' * (LOG_SIZE + 1))\n"
            "path.with_name('agent.log.1').mkdir()\n"
            "log.rotate_if_long()\n"
            "print('goes on', flush=True)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(path.read_text()[LOG_SIZE + 1 :], "goes on\n")


class UpTests(AgentCase):
    """An agent's life."""

    @asynchronous
    async def test_the_agent_starts_prints_status_and_stops(self) -> None:
        await self.network()
        status, _, err = await self.run_command("status", **self.environment)
        self.assertEqual((status, err), (3, "dmsg: no agent is up; start it with: dmsg up\n"))
        told = await self.up()
        again = await self.up()
        self.assertEqual((again["up"], again["pid"]), (told["up"], told["pid"]))
        self.assertEqual(len(told["servers"]), 1)
        (server,) = (await self.asked())["servers"]
        self.assertEqual((server["carrier"], server["carriers_failed"]), ("tcp", {}))
        for name, mode in (("run/agent.sock", 0o600), ("config/dmsg/key", 0o600), ("state/dmsg/agent.log", 0o600)):
            self.assertEqual(stat.S_IMODE((self.home / name).stat().st_mode), mode, name)
        out = await self.run_it("status")
        shown = PubKey.from_hex(told["up"]).text
        self.assertRegex(out, rf"(?s)^{shown}\nthe agent is online, process {told['pid']}, up for \d+ s\n")
        # The round trip is unknown until the first PONG arrives, which takes longer on a busy machine.
        self.assertRegex(out, r"1 server\n  [a-z2-7]{53}  (\d+\.\d\d ms|\?)  by tcp\n")
        self.assertEqual((await self.run_it("down")), "down\n")
        self.assertFalse((self.home / "run" / "agent.sock").exists())
        status, _, err = await self.run_command("down", **self.environment)
        self.assertEqual((status, err), (3, "dmsg: no agent is up; start it with: dmsg up\n"))
        # A person's own key does not change.
        self.assertEqual((await self.up())["up"], told["up"])

    @asynchronous
    async def test_a_failed_start_prints_one_line(self) -> None:
        await self.network()
        (self.home / "bad.key").write_text("rubbish")
        os.chmod(self.home / "bad.key", 0o600)
        (self.home / "open").mkdir()
        os.chmod(self.home / "open", 0o777)
        for options, environment, expected in (
            (("-k", str(self.home / "bad.key")), {}, r"bad\.key: not a key file"),
            (("-k", str(self.home / "none.key")), {}, r"none\.key: there is no such key file"),
            ((), {"DMSG_AGENT": str(self.home / ("x" * 120))}, r"more than 100 bytes"),
            ((), {"DMSG_AGENT": "off"}, r"DMSG_AGENT is off"),
            (
                (),
                {"DMSG_AGENT": str(self.home / "open" / "s")},
                r"open is a directory where others may write .mode 0777",
            ),
            ((), {"XDG_STATE_HOME": "/dev/null/x"}, r"agent\.log: Not a directory"),
        ):
            status, out, err = await self.run_command("up", *options, **{**self.environment, **environment})
            self.assertIn(status, (1, 2), err)
            self.assertEqual(out, "")
            self.assertRegex(err.splitlines()[-1], expected)

    @asynchronous
    async def test_the_agent_retries_without_a_network(self) -> None:
        await self.network()
        elsewhere = {**self.environment, "DMSG_DISCOVERY": "http://127.0.0.1:1"}
        command = self.start("up", "--foreground", **elsewhere)
        await self.said(command, "agent of")
        status, out, err = await self.run_command("status", **elsewhere)
        self.assertEqual(status, 3)
        self.assertRegex(out, "searching")
        self.assertRegex(err, r"^dmsg: the agent is not online yet: .*127\.0\.0\.1:1")
        command.transport.signalProcess("INT")  # type: ignore[union-attr]
        self.assertEqual(await command.ended, 130)
        self.assertFalse((self.home / "run" / "agent.sock").exists())

    @asynchronous
    async def test_commands_with_the_agents_key_use_the_agent(self) -> None:
        """A command without a key, or with the agent's key, works through the agent; a command with another key or
        other settings does not.
        """
        await self.network()
        told = await self.up("-k", "alice.key")
        self.assertEqual(told["up"], str(self.key.public))
        write_key_file(self.directory / "other.key", SecKey.generate())
        listening = await self.service("iperf", "--serve", says="measured at")
        self.assertIn(self.key.public.text.encode(), listening.out)
        for options, status, expected in (
            (("-k", "alice.key", "-p", "5"), None, str(self.key.public)),
            (("-k", "other.key", "-p", "6"), None, ""),
            (("--no-agent", "-p", "7"), None, ""),
            (("-k", "alice.key", "--no-agent"), 1, r"in use by .*up \(process \d+"),
            (("-k", "alice.key", "--min-servers", "3"), 1, r"in use by .*up \(process \d+"),
        ):
            command = self.tool("iperf", "--serve", *options)
            if status is None:
                found = await self.said(command, r"measured at (\w+)")
                self.assertEqual(found[1] == self.key.public.text, bool(expected), options)
            else:
                self.assertEqual(await command.ended, status)
                self.assertRegex(command.err.decode(), expected)
        ports = [one["port"] for one in (await self.asked())["services"]]
        self.assertEqual(ports, [5, 5201])

    @asynchronous
    async def test_commands_need_no_discovery_option_while_an_agent_is_up(self) -> None:
        """Commands need none while an agent is up."""
        await self.network()
        await self.up()
        environment = {**self.environment, "DMSG_DISCOVERY": ""}
        key = (await self.asked())["key"]
        status, out, err = await self.run_command("ping", "-c", "2", key, **environment)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"(?s)^connected to .* in .* ms\n1: .* ms\n2: .* ms\n2 sent, 0 lost; min ")
        status, out, err = await self.run_command("ping", "-c", "1", key, "--json", **environment)
        self.assertEqual(
            [sorted(json.loads(line)) for line in out.splitlines()][1:],
            [["number", "seconds"], ["lost", "max", "mean", "min", "sent"]],
        )
        status, out, err = await self.run_command("trace", key, **environment)
        self.assertEqual((status, err), (0, ""))
        await self.take_down()
        status, _, err = await self.run_command("ping", key, **environment)
        self.assertEqual(status, 2)
        self.assertIn("no discovery is set", err)

    @asynchronous
    async def test_exit_statuses_are_the_same_with_and_without_an_agent(self) -> None:
        await self.network()
        await self.up()
        stranger = str(SecKey.generate().public)
        key = (await self.asked())["key"]
        for arguments in (
            ("ping", stranger),
            ("ping", f"{key}:99"),
            ("connect", stranger),
            ("nc", f"{key}:99"),
            ("cp", "alice.key", f"{key}:"),
            ("curl", f"dmsg://{stranger}/"),
        ):
            with_agent = await self.run_command(*arguments, **self.environment)
            without = await self.run_command(*arguments, "--no-agent", **self.environment)
            self.assertEqual(with_agent[0], without[0], (arguments, with_agent, without))
            self.assertEqual(len(with_agent[2].splitlines()), len(without[2].splitlines()), (with_agent, without))
