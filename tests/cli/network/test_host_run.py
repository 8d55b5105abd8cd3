"""``dmsg host`` and ``dmsg join``: a network in one command, as two people use it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.network import host_run
from dmsg.cli.network.host_run import Host, HostSettings, NotAHost, checked_host
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.service.reached_at import REACHED_AT
from dmsg.keys import SecKey, write_key_file
from dmsg.net.carriers.names import Carrier
from tests.cli.qr_reader import qr_rows, read_qr
from tests.cli.test_commands import Command, CommandCase
from tests.support import asynchronous

PORTS = 3
"""Number of consecutive ports of one ``dmsg host``: of the server, of its page, and of discovery's page."""


def free_ports() -> list[int]:
    """Return a port for discovery, and three consecutive ones, all free a moment ago."""
    while True:
        with socket.socket() as one, socket.socket() as first:
            one.bind(("127.0.0.1", 0))
            first.bind(("127.0.0.1", 0))
            begin = first.getsockname()[1]
            try:
                for port in range(begin + 1, begin + PORTS):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port))
            except OSError:
                continue
            return [one.getsockname()[1], *range(begin, begin + PORTS)]


class SettingsTests(SynchronousTestCase):
    """Programs that ``dmsg host`` starts, and the text that tells others how to join."""

    def settings(self, address: str, **others: Any) -> HostSettings:
        return HostSettings(
            Path("/state"), SecKey(bytes(31) + b"\x01"), "home", address, 9090, 8080, 9180, **{"allow": None, **others}
        )

    def test_the_files_of_another_directory_are_recorded_as_files_of_dmsg(self) -> None:
        here = Path(self.mktemp()).absolute()
        (here / "net").mkdir(parents=True, mode=0o700)
        (here / "file").touch()
        tls = (here / "cert.pem", here / "key.pem")
        settings = replace(self.settings("127.0.0.1", tls=tls), directory=here / "net")
        for data in ("file", "data"):  # If the record cannot be written, the network runs all the same.
            self.patch(os, "environ", {**os.environ, "XDG_DATA_HOME": str(here / data)})
            settings.hold().release()
        recorded = json.loads((here / "data" / "dmsg" / "own-files.json").read_text())["files"]
        for name in ("net/server.key", "net/page.token", "net/discovery.sqlite", "net/network.json", "key.pem"):
            self.assertIn(str(here / name), recorded)

    def test_a_network_of_loopback_listens_on_loopback_alone(self) -> None:
        settings = self.settings("127.0.0.1")
        for arguments in (settings.discovery_arguments(), settings.server_arguments()):
            listens = [one for one in arguments if one.startswith(("--listen", "--metrics"))]
            self.assertTrue(listens)
            for one in listens:
                self.assertIn("interface=127.0.0.1", one)
        self.assertIn("this machine alone", settings.admission_text)

    def test_a_network_for_others_says_so_with_its_ports(self) -> None:
        text = self.settings("203.0.113.5").admission_text
        self.assertIn("open to anyone", text)
        for port in ("9090", "8080"):
            self.assertIn(port, text)
        self.assertIn("--allow", text)
        self.assertNotIn("anyone", self.settings("203.0.113.5", allow=Path("members")).admission_text)

    def test_an_address_of_a_local_network_is_called_one(self) -> None:
        self.assertIn("--public-address", self.settings("192.168.1.7").admission_text)
        self.assertNotIn("--public-address", self.settings("relay.example.org").admission_text)

    def test_an_address_that_was_not_found_is_asked_for(self) -> None:
        self.assertIn("name one with --public-address", self.settings("127.0.0.1", is_found=True).admission_text)
        text = self.settings("192.168.1.7", is_found=True, others=("2606:4700::7", "172.17.0.1")).admission_text
        self.assertTrue(text.endswith("Other addresses of this machine: 2606:4700::7, 172.17.0.1"), text)

    def test_the_address_at_which_a_peer_came_is_advice(self) -> None:
        """A peer may lie, so the invitation stays, and only a person changes it."""
        line = f"2026-11-27T07:00:00+0000 [dmsg.discovery#info] 1.0.0.9 {REACHED_AT} 1.1.1.1"
        found = self.settings("192.168.1.7", is_found=True, others=("1.1.1.2",))
        self.assertIn("--public-address 1.1.1.1", found.address_advice(line))
        self.assertEqual(found.address_advice(line.replace("1.1.1.1", "1.1.1.2")), "")
        self.assertEqual(found.address_advice(line + " or not"), "")
        self.assertEqual(self.settings("relay.example.org").address_advice(line), "")

    def test_live_pages_are_for_this_machine_alone(self) -> None:
        settings = self.settings("203.0.113.5")
        for arguments in (settings.discovery_arguments(), settings.server_arguments()):
            self.assertTrue([one for one in arguments if re.fullmatch(r"--metrics=tcp:\d+:interface=127.0.0.1", one)])
            self.assertIn("--page-token=/state/page.token", arguments)

    def test_with_tls_the_server_reaches_discovery_over_loopback(self) -> None:
        settings = self.settings("relay.example.org", tls=(Path("/etc/c:1.pem"), Path("/etc/k.pem")))
        arguments = settings.discovery_arguments()
        self.assertIn("--listen=ssl:9090:privateKey=/etc/k.pem:certKey=/etc/c\\:1.pem", arguments)
        self.assertIn("--listen=tcp:9091:interface=127.0.0.1", arguments)
        self.assertIn("--discovery=http://127.0.0.1:9091", settings.server_arguments())
        self.assertEqual(settings.invitation.discovery, "https://relay.example.org:9090")

    def test_with_ipv6_no_port_is_asked_for_twice(self) -> None:
        """An endpoint at [::] takes IPv4, too."""
        settings = self.settings("2606:4700::7")
        listens = [one for one in settings.discovery_arguments() if one.startswith("--listen")]
        self.assertEqual(listens, ["--listen=tcp6:9090:interface=\\:\\:"])
        self.assertIn("--discovery=http://[::1]:9090", settings.server_arguments())
        self.assertIn(f"--check-at={settings.key.public}@[::1]:8080", settings.discovery_arguments())
        alone = self.settings("::1")
        self.assertIn("--listen=tcp6:9090:interface=\\:\\:1", alone.discovery_arguments())
        secure = self.settings("2606:4700::7", tls=(Path("/c"), Path("/k")))
        self.assertIn("--listen=ssl:9090:privateKey=/k:certKey=/c:interface=\\:\\:", secure.discovery_arguments())
        self.assertIn("--discovery=http://127.0.0.1:9091", secure.server_arguments())
        proxied = self.settings("2606:4700::7", proxy_url="https://example.org")
        self.assertIn("--discovery=http://127.0.0.1:9090", proxied.server_arguments())

    def test_behind_a_proxy_discovery_listens_for_the_proxy_alone(self) -> None:
        settings = self.settings("203.0.113.5", proxy_url="https://example.org/dmsg")
        arguments = settings.discovery_arguments()
        self.assertIn("--listen=tcp:9090:interface=127.0.0.1", arguments)
        self.assertIn("--proxied", arguments)
        self.assertIn("--trusted-proxy=127.0.0.1", settings.server_arguments())
        self.assertNotIn("--trusted-proxy=127.0.0.1", self.settings("203.0.113.5").server_arguments())
        self.assertEqual(settings.invitation.discovery, "https://example.org/dmsg")

    def test_other_ways_to_the_server_are_named_to_it(self) -> None:
        settings = self.settings("relay.example.org", carriers=(Carrier("wss", 443), Carrier("tls", 8443)))
        found = [one for one in settings.server_arguments() if one.startswith("--carrier")]
        self.assertEqual(found, ["--carrier=wss:443", "--carrier=tls:8443"])

    def test_a_host_is_a_name_or_an_address_without_a_port(self) -> None:
        for good in ("relay.example.org", "203.0.113.5", "2001:db8::1", "[2001:db8::1]"):
            self.assertEqual(checked_host(good), good.strip("[]"))
        for bad in ("relay.example.org:80", "http://a", "", "a b", "ä", "fe80::1%eth0"):
            with self.subTest(bad=bad):
                self.assertRaises(NotAHost, checked_host, bad)


class ListedTests(CommandCase):
    """The invitation of ``dmsg host`` waits until discovery lists the server."""

    async def waiting(self) -> tuple[Any, SecKey, str]:
        """Return the wait of a ``dmsg host`` whose discovery runs in this process, its server's key, and the URL."""
        url = await self.start_discovery()
        key = SecKey.generate()
        settings = HostSettings(
            self.directory, key, "home", "127.0.0.1", int(url.rpartition(":")[2]), 8080, 9180, allow=None
        )
        return Deferred.fromCoroutine(Host(reactor, settings)._until_listed()), key, url

    @asynchronous
    async def test_a_server_whose_first_check_takes_time(self) -> None:
        self.patch(host_run, "notice", self.fail)
        waiting, key, url = await self.waiting()
        lookup = Lookup(reactor, url)
        self.addCleanup(lookup.close)
        for _ in range(20):
            self.assertFalse(await lookup.available_servers())
        self.assertFalse(waiting.called)
        write_key_file(self.directory / "server.key", key)
        await self.start_server(f"--discovery={url}", f"--key-file={self.directory / 'server.key'}")
        await waiting

    @asynchronous
    async def test_a_server_that_discovery_does_not_reach(self) -> None:
        said: list[str] = []
        self.patch(host_run, "notice", said.append)
        self.patch(host_run, "LISTED_WITHIN", 0.2)
        waiting, _, _ = await self.waiting()
        await waiting
        self.assertEqual(len(said), 1)
        self.assertIn("does not list the server yet", said[0])


class HostCase(CommandCase):
    """A network of its own on loopback."""

    def setUp(self) -> None:
        super().setUp()
        self.discovery, self.server, self.status, _ = free_ports()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of ``dmsg host`` for this network."""
        return (
            "host",
            "--public-address=127.0.0.1",
            f"--discovery-port={self.discovery}",
            f"--server-port={self.server}",
            f"--status-port={self.status}",
            "--directory=state",
        )

    def host(self, *more: str) -> Command:
        return self.start(*self.arguments, *more)

    async def until_said(self, command: Command, pattern: str, *, err: bool = False) -> re.Match[str]:
        """Wait for a text in the output of a command."""
        for _ in range(600):
            text = (command.err if err else command.out).decode(errors="replace")
            if found := re.search(pattern, text):
                return found
            if command.ended.called:
                break
            await deferLater(reactor, 0.05)
        raise AssertionError(f"no {pattern!r} in {command.out!r} {command.err!r}")

    def process_of(self, name: str) -> int:
        """Process id of an entity, by the port of its status page. A forked process has no command line of its own."""
        port = self.status + (name == "discovery")
        (listening,) = (
            fields[9]
            for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
            if fields[1] == f"0100007F:{port:04X}" and fields[3] == "0A"
        )
        for found in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(found) == f"socket:[{listening}]":
                    return int(found.parts[2])
        raise AssertionError(f"no process of {name}")

    async def until_gone(self, process: int) -> None:
        """Wait for the end of a process that is no child of this one."""
        for _ in range(400):
            try:
                os.kill(process, 0)
                if "\nState:\tZ" in Path(f"/proc/{process}/status").read_text():
                    return
            except OSError:
                return
            await deferLater(reactor, 0.05)
        raise AssertionError(f"process {process} goes on")


class DoctorTests(HostCase):
    """``dmsg doctor`` of a person who runs a network and has joined none."""

    async def examined(self, *arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Run ``dmsg doctor`` for the user of the network; return its exit status and the last result of each check."""
        status, out, err = await self.run_command("doctor", "--json", *arguments, **self.user(**environment))
        self.assertEqual(err, "")
        return status, {one["check"]: one for one in map(json.loads, out.splitlines())}

    def user(self, **environment: str) -> dict[str, str]:
        """Environment of the user, whose network is in the default directory."""
        home = str(self.directory.absolute())
        return {"XDG_DATA_HOME": home, "DMSG_NAMES": "names", "DMSG_DISCOVERY": "", **environment}

    def hosting(self, *more: str) -> Command:
        default = [one for one in self.arguments if not one.startswith("--directory")]
        return self.start(*default, *more, **self.user())

    @asynchronous
    async def test_a_network_is_found_and_checked_without_its_url(self) -> None:
        host = self.hosting("--name=club")
        invitation = (await self.until_said(host, r"dmsg join (dmsg1\w+)"))[1]
        status, found = await self.examined()
        self.assertEqual((status, found["host"]["verdict"]), (0, "ok"), found)
        self.assertIn(f"club, which you host, is up; others type: dmsg join {invitation}", found["host"]["text"])
        self.assertEqual({found[one]["verdict"] for one in ("discovery", "server", "stream")}, {"ok"}, found)
        _, found = await self.examined("-d", f"http://127.0.0.1:{self.discovery}")
        self.assertNotIn("host", found, "the user has named what to check")
        # The record is not for other users of the machine.
        (record,) = self.directory.glob("dmsg/host/network.json")
        self.assertEqual(stat.S_IMODE(record.stat().st_mode), 0o600)

    @asynchronous
    async def test_the_pages_are_for_the_user_alone(self) -> None:
        """Other users of the machine cannot read the token, which the command does not print."""
        tokens = set()
        for _ in range(2):
            host = self.hosting()
            await self.until_said(host, r"dmsg join (dmsg1\w+)")
            path = (await self.until_said(host, r"any user name and the password in (\S+)", err=True))[1]
            token = Path(path).read_text().strip()
            tokens.add(token)
            self.assertEqual(stat.S_IMODE(Path(path).stat().st_mode), 0o600)
            for port in (self.status, self.status + 1):
                page = f"http://127.0.0.1:{port}/"
                for auth, expected in ((None, 401), (("me", "x" * len(token)), 401), (("me", token), 200)):
                    response = await treq.get(page, auth=auth, persistent=False)
                    await response.content()
                    self.assertEqual(response.code, expected, (page, auth is None))
                for known in ("metrics", "health"):
                    response = await treq.get(page + known, persistent=False)
                    # What every user may read names nobody.
                    self.assertNotRegex(await response.text(), r"0[23][0-9a-f]{64}|a[i-p][a-z2-7]{51}")
                    self.assertEqual(response.code, 200)
            os.kill(int(host.transport.pid), signal.SIGINT)  # type: ignore[union-attr]
            await host.ended
            self.assertNotIn(token, (host.out + host.err).decode())
        self.assertEqual(len(tokens), 1, "a browser that has stored the password can open the page again")

    @asynchronous
    async def test_a_token_that_others_can_read_is_refused(self) -> None:
        directory = self.directory / "dmsg" / "host"
        directory.mkdir(parents=True)
        (directory / "page.token").write_text("a token of 24 characters".replace(" ", "-"))
        (directory / "page.token").chmod(0o644)
        host = self.hosting()
        self.assertEqual(await host.ended, 1)
        self.assertRegex(host.err.decode(), r"^dmsg: \S+page.token is accessible by others .*do: chmod 600 .*\n$")
        (directory / "page.token").chmod(0o600)
        await self.until_said(self.hosting(), r"dmsg join (dmsg1\w+)")

    @asynchronous
    async def test_a_network_that_is_not_up_is_named_with_the_command_that_starts_it(self) -> None:
        host = self.hosting()
        invitation = (await self.until_said(host, r"dmsg join (dmsg1\w+)"))[1]
        os.kill(int(host.transport.pid), signal.SIGINT)  # type: ignore[union-attr]
        await host.ended
        status, found = await self.examined()
        self.assertEqual((status, found["host"]["verdict"]), (1, "wrong"), found)
        self.assertIn("is not up", found["host"]["text"])
        self.assertIn("`dmsg host`", found["host"]["advice"])
        self.assertNotIn("discovery", found, "one fault is one result")
        # For someone who uses another network, the end of this one may be intended.
        url = await self.start_discovery()
        _, found = await self.examined(DMSG_DISCOVERY=url)
        self.assertEqual((found["host"]["verdict"], found["discovery"]["verdict"]), ("note", "wrong"))
        status, _, err = await self.run_command("send", "film", **self.user(DMSG_AGENT="off"))
        self.assertIn(f"the one that you host:   dmsg join {invitation}\n", err)

    @asynchronous
    async def test_an_invitation_that_leads_nowhere_from_inside_is_told_from_a_network_that_is_down(self) -> None:
        """The address is that of a router, which does not forward connections from inside."""
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"https://127.0.0.1:{nobody.getsockname()[1]}"
            host = self.hosting("--behind-proxy", address)
            await self.until_said(host, r"dmsg join (dmsg1\w+)")
            status, found = await self.examined()
        self.assertEqual((status, found["host"]["verdict"]), (0, "note"), found)
        self.assertIn("is up, but its invitation leads nowhere", found["host"]["text"])
        self.assertIn(address, found["host"]["text"])
        self.assertEqual(found["stream"]["verdict"], "ok")

    @asynchronous
    async def test_a_damaged_record_is_as_good_as_none(self) -> None:
        (self.directory / "dmsg/host").mkdir(parents=True)
        for content in (
            "",
            "[]",
            "{}",
            '{"invitation": "dmsg1aaaa", "local": "http://x"}',
            '{"invitation": 7}',
            "\0" * 9,
        ):
            (self.directory / "dmsg/host/network.json").write_text(content)
            status, found = await self.examined()
            self.assertEqual((status, found["discovery"]["text"]), (1, "no discovery is set"), content)
            self.assertNotIn("that you host", found["discovery"]["advice"])


class NetworkTests(HostCase):
    """Processes of a person who runs a network and of one who joins it."""

    @asynchronous
    async def test_who_joins_by_the_invitation_sends_a_file_and_a_killed_server_comes_back(self) -> None:
        host = self.host()
        invitation = (await self.until_said(host, r"dmsg join (dmsg1\w+)"))[1]
        status, out, err = await self.run_command("join", invitation, DMSG_DISCOVERY="")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("joined home", out)
        status, out, _ = await self.run_command("discovery", "list", DMSG_DISCOVERY="")
        self.assertEqual(status, 0)
        self.assertIn(f"127.0.0.1:{self.server}", out)
        os.kill(self.process_of("server"), signal.SIGKILL)
        await self.until_said(host, "server is up again", err=True)
        (self.directory / "film").write_bytes(os.urandom(100_000))
        sender = self.start("send", "film", "--no-qr", "--network", "home", DMSG_AGENT="off", DMSG_DISCOVERY="http://x")
        code = (await self.until_said(sender, r"code: (\S+)"))[1]
        arguments = ("receive", code, "--yes", "--dir", "inbox")
        status, _, err = await self.run_command(*arguments, DMSG_AGENT="off", DMSG_DISCOVERY="home")
        self.assertEqual(status, 0, err)
        self.assertEqual((self.directory / "inbox/film").read_bytes(), (self.directory / "film").read_bytes())

    @asynchronous
    async def test_a_terminal_of_24_rows_shows_the_invitation_below_its_qr_code(self) -> None:
        host, _ = self.start_at_terminal(*self.arguments, size=(80, 24))
        invitation = (await self.until_said(host, r"(dmsg join dmsg1[a-z2-7]+)\r\n"))[1]
        text = host.out.decode()
        self.assertEqual(read_qr(text), invitation)
        rows = qr_rows(text)
        below = text[text.rindex(rows[-1]) :].splitlines()[1:]
        self.assertEqual(below, [invitation])
        lines_of_invitation = -(-len(invitation) // 80)
        self.assertLess(len(rows) + lines_of_invitation, 24, "one row is for the cursor")

    @asynchronous
    async def test_a_terminal_that_is_too_small_for_the_qr_code_shows_none(self) -> None:
        """Nobody can read a part of the code, and its lines would move others away."""
        for size in ((80, 20), (30, 50)):
            host, process = self.start_at_terminal(*self.arguments, size=size)
            await self.until_said(host, r"dmsg join dmsg1[a-z2-7]+\r\n")
            self.assertNotIn("█", host.out.decode())
            process.signalProcess("INT")
            await host.ended

    @asynchronous
    async def test_a_peer_that_came_by_another_address_is_heard(self) -> None:
        ports = (f"--discovery-port={self.discovery}", f"--server-port={self.server}", f"--status-port={self.status}")
        host = self.start("host", *ports, "--directory=state")
        await self.until_said(host, r"dmsg join (dmsg1\w+)")
        request = b"GET /health HTTP/1.1\r\nHost: 1.1.1.1:9090\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.discovery)) as asking:
            asking.sendall(request)
            await self.until_said(host, r"reached discovery at 1\.1\.1\.1: .*--public-address 1\.1\.1\.1", err=True)

    @asynchronous
    async def test_the_processes_end_with_the_one_that_was_killed(self) -> None:
        host = self.host()
        await self.until_said(host, "dmsg join")
        entities = [self.process_of("discovery"), self.process_of("server")]
        found = [one for one in Path("/proc").glob("[0-9]*") if one.name == str(entities[0])]
        parent = int(re.search(r"\nPPid:\t(\d+)", (found[0] / "status").read_text())[1])  # type: ignore[index]
        os.kill(parent, signal.SIGKILL)
        for one in entities:
            await self.until_gone(one)

    @asynchronous
    async def test_a_taken_port_is_one_line_that_names_the_options(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", self.server))
            taken.listen()
            host = self.host("--quiet")
            self.assertEqual(await host.ended, 1)
        (line,) = host.err.decode().splitlines()
        self.assertIn("server cannot start", line)
        self.assertIn("--server-port", line)

    @asynchronous
    async def test_the_server_of_a_network_registers_in_no_other_discovery(self) -> None:
        """Another discovery has the port, so the server, whose process starts at the same time, must not run."""
        url = await self.start_discovery()
        self.discovery = int(url.rpartition(":")[2])
        host = self.host()
        self.assertEqual(await host.ended, 1)
        self.assertIn(b"discovery cannot start", host.err)
        self.assertNotIn(b"server: ", host.err)
        self.assertEqual(await Lookup(reactor, url).available_servers(), [])

    @asynchronous
    async def test_an_invitation_leads_to_no_other_network(self) -> None:
        """Another discovery has the address of the one in the invitation."""
        url = await self.start_discovery()
        ports = f"--discovery-port={url.rpartition(':')[2]}"
        arguments = ("--invitation", "--public-address=127.0.0.1", "--directory=other", ports)
        _, out, _ = await self.run_command("host", *arguments)
        status, out, err = await self.run_command("join", out.strip(), DMSG_DISCOVERY="")
        self.assertEqual((status, out), (1, ""))
        self.assertIn("does not know the server of this invitation", err)
        self.assertFalse((self.directory / "config.toml").exists())
