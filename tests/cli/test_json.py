"""``--json``: every command has its schema, and keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.words import EXAMPLE
from dmsg.cli.main import main
from dmsg.keys import SecKey
from tests.cli.json_output import AS_IT_IS, check, command_of, document, leaves
from tests.cli.test_tools import ToolCase
from tests.support import asynchronous


class SchemaTests(SynchronousTestCase):
    """The schema itself."""

    def test_the_schema_has_every_command(self) -> None:
        commands = set(leaves(main))
        described = set(document()["$defs"]["commands"])
        self.assertEqual(described & AS_IT_IS, set())
        self.assertEqual(commands, described | AS_IT_IS)

    def test_the_schema_refuses_other_objects(self) -> None:
        for arguments, line in (
            (("ping", "x"), '{"number": 1}'),
            (("ping", "x"), '{"number": 1, "seconds": -1}'),
            (("ping", "x"), '{"number": 1, "seconds": 1, "more": 2}'),
            (("key", "new", "x"), '{"public": "02ab"}'),
            (("down",), "down"),
        ):
            with self.assertRaises(AssertionError):
                check(arguments, line)
        self.assertEqual(check(("ping", "x"), '{"error": "NobodyThere", "text": "t", "status": 3}'), 1)
        self.assertEqual(command_of(("analytics", "run", "--json")), "analytics run")

    def test_each_command_is_on_the_page(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
        self.assertIn("json-output.json", page)
        for name in sorted(AS_IT_IS):
            self.assertIn(f"`{name}`", page)


class OutputTests(ToolCase):
    """Commands, one after the other; ``run_command`` looks at what each says."""

    async def objects(self, *arguments: str, status: int = 0) -> list[dict[str, object]]:
        ended, out, err = await self.run_command(*arguments, "--json", **self.environment)
        self.assertEqual(ended, status, (arguments, out, err))
        return [json.loads(line) for line in out.splitlines()]

    @asynchronous
    async def test_key_name_discovery_and_config_commands_match_the_schema(self) -> None:
        await self.network()
        self.assertEqual(len(await self.objects("key", "new", "k1")), 1)
        self.assertEqual(len(await self.objects("key", "new", "k2")), 1)
        self.assertEqual(len(await self.objects("key", "show", "k1")), 1)
        self.assertEqual(len(await self.objects("key", "succeed", "k1", "k2")), 1)
        self.assertEqual(len(await self.objects("name", "list")), 1)
        self.assertEqual(len(await self.objects("name", "show", "alice")), 1)
        (server,) = await self.objects("discovery", "list")
        self.assertEqual(len(await self.objects("discovery", "show", str(server["static"]))), 1)
        self.assertEqual(len(await self.objects("discovery", "delete", "-k", "k1")), 1)
        self.assertEqual(len(await self.objects("config", "path")), 1)
        self.assertEqual(await self.objects("config", "set", "timeout", "5"), [])
        self.assertGreaterEqual(len(await self.objects("config", "show")), 1)
        self.assertGreater(len(await self.objects("doctor")), 3)

    @asynchronous
    async def test_peer_commands_match_the_schema(self) -> None:
        await self.network()
        key = self.key.public.hex()
        serving = [
            self.tool("iperf", "--serve", "-k", "alice.key", "--json"),
            self.tool("bench", "--serve", "--json"),
            self.tool("serve", ".", "--json"),
            self.tool("expose", "9", "--json"),
            self.tool("forward", "0", "alice:5201", "--json"),
            self.tool("socks", "--listen", "0", "--json"),
            self.tool("cp", "--listen", ".", "--writable", "--anyone", "--json"),
            self.tool("receive", "--listen", "--anyone", "--dir", ".", "--json"),
        ]
        for one in serving:
            await self.until(lambda one=one: b"}\n" in one.out)
        names = ("iperf", "bench", "serve", "expose", "forward", "socks", "cp", "receive")
        for name, one in zip(names, serving, strict=True):
            self.assertEqual(check((name,), one.out.decode()), 1)
        self.assertEqual(len(await self.objects("ping", key, "-c", "2")), 4)
        self.assertGreaterEqual(len(await self.objects("iperf", key, "-t", "0.3")), 2)
        benched = json.loads(serving[1].out)["serving"]
        self.assertEqual(len(await self.objects("bench", benched, "--seconds", "0.1", "--size", "64")), 2)
        self.assertEqual(len(await self.objects("trace", key)), 1)
        at = json.loads(serving[6].out)["at"]
        (self.directory / "photo.jpg").write_bytes(b"x")
        self.assertEqual(len(await self.objects("cp", "photo.jpg", f"{at}:copied")), 1)
        await self.until(lambda: serving[6].out.count(b"\n") == 2)
        self.assertEqual(check(("cp",), serving[6].out.decode()), 2)
        receiving = json.loads(serving[7].out)["receiving"]
        (self.directory / "sent").mkdir()
        (self.directory / "sent" / "new.txt").write_text("hello")
        self.assertEqual(len(await self.objects("send", "sent/new.txt", receiving)), 1)
        await self.until(lambda: serving[7].out.count(b"\n") == 2)
        self.assertEqual(check(("receive",), serving[7].out.decode()), 2)

    @asynchronous
    async def test_code_commands_match_the_schema(self) -> None:
        await self.network()
        (self.directory / "film").write_bytes(b"x" * 1000)
        (self.directory / "in").mkdir()
        for what, words in ((("film",), ()), (("--text", "hello"), ())):
            sending = self.tool("send", *what, "--json", *words)
            await self.until(lambda sending=sending: b"}\n" in sending.out)
            code = json.loads(sending.out.splitlines()[0])["code"]
            self.assertEqual(len(await self.objects("receive", code, "--yes", "--dir", "in")), 1)
            self.assertEqual(await sending.ended, 0, sending.err)
            self.assertEqual(check(("send",), sending.out.decode()), 2)
        pairing = self.tool("pair", "bob", "-k", "alice.key", "--json")
        await self.until(lambda: b"}\n" in pairing.out)
        code = json.loads(pairing.out.splitlines()[0])["code"]
        self.assertEqual(len(await self.objects("pair", "carol", code, "-k", "new.key", "--create")), 1)
        self.assertEqual(await pairing.ended, 0)
        self.assertEqual(check(("pair",), pairing.out.decode()), 2)

    @asynchronous
    async def test_failures_before_any_connection_have_an_object_too(self) -> None:
        broken = self.directory.absolute() / "broken.toml"
        broken.write_text("discovery = [")
        (self.directory / "k1").write_text("")
        for arguments, name, status in (
            (("key", "new", "k1"), "KeyFileError", 1),
            (("key", "show", "absent"), "KeyFileError", 1),
            (("status",), "NoAgent", 3),
            (("ping", "alice"), "ConfigError", 2),
        ):
            environment = {"DMSG_AGENT": str(broken.with_name("absent.sock"))}
            if name == "ConfigError":
                environment["DMSG_CONFIG"] = str(broken)
            ended, out, err = await self.run_command(*arguments, "--json", **environment)
            self.assertEqual(out.count("\n"), 1, (arguments, err))
            failed = json.loads(out)
            self.assertEqual((failed["error"], failed["status"], ended), (name, status, status), err)
            self.assertEqual(" ".join(err.split()), f"dmsg: {failed['text']}")

    @asynchronous
    async def test_failures_match_the_schema(self) -> None:
        """The object comes in addition to the line for people, and has the exit status of the process."""
        await self.network()
        stranger = SecKey.generate().public.hex()
        for arguments, status, kind in (
            (("ping", stranger), 3, "EntryNotFound"),
            (("ping", f"{self.key.public}:9"), 3, "EntryNotFound"),
            (("key", "show", "nowhere"), 1, None),
            (("receive", EXAMPLE), 3, None),
            (("down",), 2, None),
        ):
            ended, out, err = await self.run_command(*arguments, "--json", **self.environment)
            self.assertEqual(ended, status, (arguments, out, err))
            if kind is not None:
                told = json.loads(out)
                self.assertEqual((told["error"], told["status"]), (kind, status))
                self.assertIn(told["text"], err)

    @asynchronous
    async def test_json_and_quiet_work_before_the_command(self) -> None:
        """``dmsg --json COMMAND`` is ``dmsg COMMAND --json``; so is -q."""
        await self.network()
        status, out, _ = await self.run_command("--json", "name", "list", **self.environment)
        self.assertEqual((status, json.loads(out)["name"]), (0, "alice"))
        status, out, err = await self.run_command("-q", "name", "list", **self.environment)
        self.assertEqual((status, err), (0, ""))
