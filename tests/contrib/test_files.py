"""Units, filters and rules of contrib/, as the programs that read them see them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"
EXPOSED = 25
"""Tenths of what systemd-analyze calls the exposure of a unit, at most: 2.5, which it calls OK."""
EXPOSED_USER = 80
"""The same of a unit of a user, to whom much of it is not to be had."""


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A program; skips where there is none."""
    if shutil.which(command[0]) is None:
        raise SkipTest(f"there is no {command[0]} here")
    # trial's workers have the modules of their Python on PYTHONPATH. A program in another Python could not import them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, check=False, env=environment, **options
    )


class UnitTests(SynchronousTestCase):
    """systemd's units."""

    def units(self) -> list[Path]:
        """Copies whose programs are there, with an instance where one is needed."""
        directory = Path(self.mktemp()).absolute()
        directory.mkdir(parents=True)
        found = []
        for unit in sorted((CONTRIB / "systemd").rglob("*.service")):
            copy = directory / unit.parent.name / unit.name.replace("@.", "@8080.")
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(unit.read_text().replace("/opt/dmsg/bin", str(Path(sys.executable).parent)))
            found.append(copy)
        return found

    def test_units_pass_systemd_analyze_verify(self) -> None:
        for unit in self.units():
            done = run("systemd-analyze", "verify", "--man=no", str(unit))
            said = [line for line in done.stderr.splitlines() if unit.name in line]
            self.assertEqual((done.returncode, said), (0, []), unit.name)

    def test_units_pass_systemd_analyze_security(self) -> None:
        for unit in self.units():
            most = EXPOSED_USER if unit.parent.name == "user" else EXPOSED
            done = run("systemd-analyze", "security", "--offline=true", f"--threshold={most}", str(unit))
            self.assertEqual(done.returncode, 0, done.stdout[-600:])

    def test_unit_files_use_existing_options(self) -> None:
        """The plugin itself parses the commands in the files."""
        from dmsg.tap import collector, discovery, messaging, rmb_peer, rmb_registry, rmb_relay, server

        taps = {
            "dmsg-server": server,
            "dmsg-discovery": discovery,
            "dmsg-messaging-server": messaging,
            "dmsg-collector": collector,
            "rmb-peer": rmb_peer,
            "rmb-relay": rmb_relay,
            "rmb-registry": rmb_registry,
        }
        seen = set()
        for unit in sorted((CONTRIB / "systemd" / "system").glob("*.service")):
            words = re.search(r"^ExecStart=\S+ -n --pidfile= (.*)$", unit.read_text(), re.MULTILINE)
            assert words is not None
            name, *options = words[1].replace("%i", "8080").split()
            seen.add(name)
            known = taps[name].Options()
            for option in options:
                if option.startswith("--"):
                    self.assertIn(option[2:], _names(known), unit.name)
        self.assertEqual(seen, set(taps))


def _names(options: object) -> set[str]:
    """Long options of a plugin."""
    return {name.rstrip("=") for name in getattr(options, "longOpt", [])}


class FilterTests(SynchronousTestCase):
    """Filter rules in front of a server."""

    def test_the_nftables_rules_load(self) -> None:
        done = run("nft", "--check", "-f", str(CONTRIB / "nftables" / "dmsg.nft"))
        if "Operation not permitted" in done.stderr:
            raise SkipTest("nft may not look at its rules here")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_fail2ban_filters_match_lines_of_a_server(self) -> None:
        """Lines as a server writes them."""
        log = Path(self.mktemp())
        log.write_text(
            "2026-11-25T08:12:59+0000 [dmsg.net.links.refusal_log#info] stranger 192.0.2.7: handshake_failed "
            "(handshake message is not authentic)\n"
            "2026-11-25T08:13:59+0000 [dmsg.net.links.refusal_log#info] stranger 2001:db8::7: failed_before, 4 more\n"
            "2026-11-25T08:13:59+0000 [dmsg.net.links.refusal_log#info] stranger 192.0.2.8: flood\n"
            "2026-11-25T08:13:59+0000 [dmsg.net.listening#info] server listens on 192.0.2.9\n"
        )
        done = run("fail2ban-regex", str(log), str(CONTRIB / "fail2ban" / "filter.d" / "dmsg.conf"))
        self.assertIn("4 lines, 0 ignored, 2 matched, 2 missed", done.stdout, done.stdout + done.stderr)

    def test_ban_filters_match_the_documented_lines(self) -> None:
        page = (ROOT / "docs" / "howto" / "operate.md").read_text()
        for name in ("filter.d/dmsg.conf", "jail.d/dmsg.conf"):
            lines = (CONTRIB / "fail2ban" / name).read_text().splitlines()[1:]
            self.assertIn("\n".join(lines), page, name)

    def test_tmpfiles_removes_old_logs_only(self) -> None:
        """Old logs go, new ones stay."""
        root = Path(self.mktemp()).absolute()
        logs = root / "var" / "log" / "dmsg"
        logs.mkdir(parents=True)
        for name, days in (("server.log", 0), ("server.log.1", 3), ("server.log.2", 30)):
            (logs / name).write_text("x")
            os.utime(logs / name, (time.time() - days * 86400,) * 2)
        done = run("systemd-tmpfiles", "--clean", f"--root={root}", str(CONTRIB / "tmpfiles" / "dmsg.conf"))
        self.assertEqual(done.returncode, 0, done.stderr)
        # systemd-tmpfiles also checks the time of the inode's change, which utime cannot set. So the test only shows
        # that the file is understood.
        self.assertTrue((logs / "server.log").exists())


class ContainerTests(SynchronousTestCase):
    """The image is built from what it copies, and from nothing else."""

    def test_the_image_copies_all_files_that_its_build_needs(self) -> None:
        text = (CONTRIB / "container" / "Containerfile").read_text()
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
            *sources, target = line.split()
            for source in sources:
                self.assertTrue((ROOT / source).exists(), source)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, root / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, root / target)
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-1500:])
        for needed in (
            "dmsg/pages/page.css",
            "dmsg/pages/page.js",
            "dmsg/discovery/service/openapi.json",
            "dmsg/py.typed",
            "twisted/plugins/dmsg_plugins.py",
        ):
            self.assertTrue((root / "built" / needed).exists(), needed)

    def test_the_commands_of_the_image_exist(self) -> None:
        text = (CONTRIB / "container" / "Containerfile").read_text()
        self.assertIn("USER dmsg\n", text)
        self.assertIn("STOPSIGNAL SIGTERM\n", text)
        self.assertRegex(text, r"(?m)^ARG BASE=docker\.io/library/python:3\.1\d-slim$")
        self.assertEqual(re.findall(r"^FROM (\S+)", text, re.MULTILINE), ["${BASE}", "${BASE}"])
