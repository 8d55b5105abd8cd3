"""Disks that become full while a file arrives: both ends say so, and the transfer resumes once there is space."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest

from dmsg.apps.partial_files import part_name
from dmsg.base.units import human_size
from tests.cli.files.test_send_by_code import CodeCase
from tests.cli.test_commands import Command
from tests.support import asynchronous

DISK, SIZE = 130_000_000, 120_000_000
CAUSE = "film: No space left on device"
BEGUN = 1_000_000
"""Bytes of the film after whose arrival the disk becomes full."""


class FullDiskTests(CodeCase):
    """A small disk, on which another program takes the free space during the transfer."""

    async def disk(self) -> Path:
        """Start a network, create the film, and mount the disk; return its directory."""
        if os.geteuid() != 0:
            raise SkipTest("only root can mount a disk")
        await self.network()
        self.film = os.urandom(1_000_000) * (SIZE // 1_000_000)
        (self.directory / "film").write_bytes(self.film)
        # If the tests are killed, a disk that is still mounted must not be in the way of their next run.
        inbox = Path(tempfile.mkdtemp())
        self.addCleanup(inbox.rmdir)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(inbox)], capture_output=True, text=True
        )
        if done.returncode:
            raise SkipTest(f"no disk can be mounted here: {done.stderr}")
        self.addCleanup(subprocess.run, ["umount", str(inbox)], check=True)
        return inbox

    async def fill(self, inbox: Path, writing: Command) -> None:
        """Wait until a transfer has begun, and take the free space of the disk while the writing command stands
        still.
        """
        part = inbox / part_name("film")
        await self.until(lambda: part.exists() and part.stat().st_size > BEGUN)
        process: Any = writing.transport
        os.kill(process.pid, signal.SIGSTOP)
        # The command may write some more until the signal stops all of its threads.
        block = bytes(1_000_000)
        with open(inbox / "other", "wb", buffering=0) as file, self.assertRaises(OSError) as full:
            while True:
                file.write(block)
        self.assertEqual(full.exception.errno, errno.ENOSPC)
        self.assertLess(part.stat().st_size, SIZE, "the transfer was over before the disk was full")
        os.kill(process.pid, signal.SIGCONT)

    def kept(self, inbox: Path) -> int:
        """Check what is on the disk, free the space, and return the size of the unfinished file."""
        self.assertEqual(set(os.listdir(inbox)), {part_name("film"), "other"})
        (inbox / "other").unlink()
        size = (inbox / part_name("film")).stat().st_size
        self.assertGreater(size, BEGUN)
        return size

    def assert_complete(self, inbox: Path) -> None:
        self.assertEqual(os.listdir(inbox), ["film"])
        self.assertEqual((inbox / "film").read_bytes(), self.film)

    @asynchronous
    async def test_receive(self) -> None:
        inbox = await self.disk()
        sender, code = await self.sends("film")
        receiver = self.tool("receive", code, "--yes", f"--dir={inbox}", "--min-servers=1")
        await self.fill(inbox, receiver)
        await self.ends(receiver, 1)
        self.assertRegex(receiver.err.decode(), rf"(?m)^dmsg: {CAUSE}$")
        await self.ends(sender, 4, CAUSE)
        size = self.kept(inbox)
        sender, code = await self.sends("film")
        status, out, err = await self.receives(code, "--yes", "--json", f"--dir={inbox}")
        self.assertEqual(status, 0, err)
        self.assertEqual(json.loads(out)["bytes"], SIZE - size)
        self.assert_complete(inbox)

    @asynchronous
    async def test_cp_from_a_peer(self) -> None:
        inbox = await self.disk()
        (self.directory / "shared").mkdir()
        (self.directory / "film").rename(self.directory / "shared" / "film")
        peer, key = await self.listens("shared")
        copying = self.tool("cp", f"{key}:film", f"{inbox}/film", "--min-servers=1", "-k", "me.key", "--create")
        await self.fill(inbox, copying)
        await self.ends(copying, 1)
        self.assertRegex(copying.err.decode(), rf"(?m)^dmsg: {CAUSE}$")
        await self.said(peer, CAUSE)
        await self.resumes(inbox, f"{key}:film", f"{inbox}/film")

    @asynchronous
    async def test_cp_to_a_peer(self) -> None:
        inbox = await self.disk()
        peer, key = await self.listens(str(inbox), "--writable")
        copying = self.tool("cp", "film", f"{key}:", "--min-servers=1", "-k", "me.key", "--create")
        await self.fill(inbox, peer)
        await self.ends(copying, 4)
        self.assertRegex(copying.err.decode(), rf"(?m)^dmsg: .*{CAUSE}$")
        await self.said(peer, CAUSE)
        await self.resumes(inbox, "film", f"{key}:", "--json")

    async def listens(self, *arguments: str) -> tuple[Command, str]:
        peer = self.tool("cp", "--listen", *arguments, "--anyone", "--min-servers=1", "-k", "peer.key", "--create")
        return peer, (await self.said(peer, r"is at ([a-z2-7]{53}):"))[1]

    async def resumes(self, inbox: Path, source: str, target: str, *options: str) -> None:
        size = self.kept(inbox)
        arguments = ("cp", source, target, "--min-servers=1", "-k", "me.key", "--create")
        status, out, err = await self.run_command(*arguments, *options, **self.environment)
        self.assertEqual(status, 0, err)
        if options:
            self.assertEqual(json.loads(out.splitlines()[-1])["bytes"], SIZE - size)
        else:
            self.assertTrue(out.startswith(f"film: {human_size(SIZE - size)} in "), out)
            self.assertTrue(out.endswith(f"; {human_size(size)} had arrived before\n"), out)
        self.assert_complete(inbox)
