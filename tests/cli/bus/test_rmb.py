"""``dmsg twin`` and ``dmsg rmb``: real processes against a real relay."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner
from twisted.internet.task import deferLater

from dmsg.cli.bus.rmb import rmb
from dmsg.cli.bus.twin import twin
from dmsg.rmb.registry.service import RegistryService, RegistrySettings
from dmsg.rmb.relay.server import RmbRelay
from dmsg.rmb.relay.settings import RelaySettings
from tests.cli.json_output import check
from tests.cli.test_commands import CommandCase
from tests.ports import port_of
from tests.support import asynchronous


class TwinTests(CommandCase):
    """Twins in a file."""

    @asynchronous
    async def test_twins_are_created_listed_displayed_and_changed(self) -> None:
        """A secret of mode 0600; a number; changes that its owner signs."""
        registry = f"--registry=file:{(self.directory / 'twins.json').resolve()}"
        self.assertEqual((0, "1\n", ""), await self.run_command("twin", "create", "a.twin", registry))
        self.assertEqual(0o600, (self.directory / "a.twin").stat().st_mode & 0o777)
        relay = "--relay=wss://relay.example"
        self.assertEqual("2\n", (await self.run_command("twin", "create", "b.twin", registry, relay, "--words=24"))[1])
        _, out, _ = await self.run_command("twin", "list", registry)
        self.assertEqual(3, len(out.splitlines()))
        self.assertIn("relay.example", out)
        status, shown, _ = await self.run_command("twin", "show", "a.twin", registry)
        self.assertEqual((0, "twin     1"), (status, shown.splitlines()[0]))
        changed = await self.run_command("twin", "set", "-k", "a.twin", registry, "--relay=r.example", "--strict")
        self.assertIn("relays   r.example", changed[1])
        self.assertIn("counter  2", changed[1])
        for arguments, count in (
            (("twin", "list", registry), 2),
            (("twin", "show", "a.twin", registry), 1),
            (("twin", "set", "-k", "a.twin", registry, "--no-strict"), 1),
            (("twin", "create", "c.twin", registry), 1),
        ):
            status, out, err = await self.run_command(*arguments, "--json")
            self.assertEqual((status, err, len(out.splitlines())), (0, "", count))
        status, _, err = await self.run_command("twin", "create", "a.twin", registry)
        self.assertEqual((1, "dmsg: this secret belongs to twin 1 already\n"), (status, err))
        words = (self.directory / "a.twin").read_text().splitlines()[1]
        stored = (self.directory / "twins.json").read_text()
        self.assertNotIn(words, stored + out + shown)

    @asynchronous
    async def test_mistakes_print_one_line_and_a_status(self) -> None:
        """The exit status tells the kind of mistake."""
        (self.directory / "open.twin").write_text("0x" + "11" * 32)
        good = f"--registry=file:{(self.directory / 'none.json').resolve()}"
        for arguments, words, expected in (
            (("twin", "list", "--registry=http://127.0.0.1:1"), "refused", 1),
            (("twin", "show", "5", good), "twin not found 5", 3),
            (("twin", "show", "open.twin", good), "chmod 600", 1),
        ):
            status, out, err = await self.run_command(*arguments)
            self.assertEqual((expected, ""), (status, out), arguments)
            self.assertIn(words, err.splitlines()[-1], arguments)

    def test_usage_mistakes_end_with_status_2(self) -> None:
        """A usage mistake is reported before the command does anything."""
        good = "--registry=file:none.json"
        for command, arguments, words in (
            (twin, ("list",), "Missing option"),
            (twin, ("list", "--registry=x"), "is not a registry"),
            (twin, ("create", "c.twin", good, "--relay=a b"), "is not a relay"),
            (rmb, ("call", "0", "x", good, "-r", "ws://x"), "is not a twin's number"),
            (rmb, ("call", "9" * 5000, "x", good, "-r", "ws://x"), "is not a twin's number"),
            (rmb, ("call", "1", "x", good, "-r", "ws://x", "--timeout=nan"), "nan"),
            (rmb, ("call", "1", "\udcff", good, "-r", "ws://x"), "is not UTF-8"),
            (rmb, ("call", "1", "", good, "-r", "ws://x"), "is empty"),
            (rmb, ("ping", good, "-r", "http://x"), "is not the URL of a relay"),
            (rmb, ("ping", good, *"-r ws://a -r ws://b -r ws://c -r ws://d -r ws://e".split()), "should not exceed 4"),
            (rmb, ("serve", good, "-r", "ws://x", "--command", "", "x"), "is not NAME=PROGRAM"),
        ):
            result = CliRunner().invoke(command, arguments)
            self.assertEqual(2, result.exit_code, (arguments, result.output))
            self.assertIn(words, result.output.splitlines()[-1], arguments)


class CallTests(CommandCase):
    """Calls over a relay and a registry on TCP."""

    timeout = 120

    async def bus(self) -> dict[str, str]:
        from twisted.internet import reactor

        registry = RegistryService(reactor, ["tcp:0:interface=127.0.0.1"], ":memory:", RegistrySettings(rate=0))
        registry.startService()
        self.addCleanup(registry.stopService)
        url = f"http://127.0.0.1:{port_of((await registry.ready)[0])}"
        relay = RmbRelay(
            reactor, RelaySettings(["tcp:0:interface=127.0.0.1"], url, frozenset({"http://pending"}), token_reuse=True)
        )
        relay.startService()
        self.addCleanup(relay.stopService)
        port = port_of((await relay.ready)[0])
        domains = frozenset({f"http://127.0.0.1:{port}"})
        relay.switch.rules.domains = relay.switch.federation._domains = domains  # type: ignore[union-attr]
        return {"RMB_REGISTRY": url, "RMB_RELAY": f"ws://127.0.0.1:{port}"}

    @asynchronous
    async def test_a_served_program_answers_calls(self) -> None:
        """A program answers; errors are one line; several twins are lines of JSON; ping."""
        from twisted.internet import reactor

        env = await self.bus()

        async def run(*arguments: str) -> tuple[int, str, str]:
            return await self.run_command(*arguments, **env)

        for name in ("a.twin", "b.twin"):
            await run("twin", "create", name)
        programs = ("--command", "upper", "tr a-z A-Z", "--command", "fail", "echo no >&2; exit 3")
        serving = self.start("rmb", "serve", "-k", "b.twin", *programs, **env)
        while b"answers" not in serving.out:
            await deferLater(reactor, 0.05)
        (self.directory / "data").write_text("from a file")
        self.assertEqual((0, "FROM A FILE\n", ""), await run("rmb", "call", "2", "upper", "@data", "-k", "a.twin"))
        for arguments, words, status in (
            (("2", "fail"), "dmsg: no\n", 1),
            (("1", "upper"), "dmsg: destination offline\n", 3),
        ):
            self.assertEqual((status, "", words), await run("rmb", "call", *arguments, "-k", "a.twin"))
        status, out, _ = await run("rmb", "call", "1,2", "upper", "x", "-k", "a.twin")
        lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        self.assertEqual((0, "destination offline", "X"), (status, lines[0]["error"], lines[1]["data"]))
        self.assertIn(b"dmsg: open to every twin; --allow TWIN to restrict", serving.err)
        only = ("--session", "only", "--allow", "2", "--json", "--command", "upper", "tr a-z A-Z")
        restricted = self.start("rmb", "serve", "-k", "b.twin", *only, **env)
        while b"answers" not in restricted.out:
            await deferLater(reactor, 0.05)
        check(("rmb", "serve"), restricted.out.decode())
        answer = await run("rmb", "call", "2", "upper", "x", "--session", "only", "-k", "a.twin")
        self.assertEqual((1, "", "dmsg: this twin is not answered here\n"), answer)
        for options in ((), ("--json",)):
            status, out, _ = await run("rmb", "ping", "-k", "a.twin", "-c", "2", *options)
            self.assertEqual((0, 2), (status, len(out.splitlines())))
