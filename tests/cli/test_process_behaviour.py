"""Commands among other programs: a key in use, pings, closed pipes, a discovery that is away, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli import output
from dmsg.keylock import KeyInUse, hold_key
from dmsg.keys import SecKey, write_key_file
from tests.cli.test_commands import CommandCase
from tests.forking import COMMAND, DEBUGGED
from tests.support import asynchronous

DMSG = [sys.executable, "-c", COMMAND]

INTERRUPTED = """
import os, signal, click
from twisted.internet.defer import Deferred
from dmsg.cli.client_run import run
async def main(reactor):
    os.kill(os.getpid(), signal.SIGINT)
    %s
click.command()(lambda: run(main))()
"""
"""Code of a command that Ctrl-C reaches as soon as it begins; its last line is to be filled in."""


class ToolCase(CommandCase):
    """A network, and commands in its directory."""

    async def network(self, servers: int = 2) -> None:
        self.url = await self.start_discovery()
        for _ in range(servers):
            await self.start_server(f"--discovery={self.url}")
        await self.until_listed(self.url, servers)
        self.environment = {"DMSG_DISCOVERY": self.url, "DMSG_NAMES": str((self.directory / "names").absolute())}
        self.key = SecKey.generate()
        write_key_file(self.directory / "bob.key", self.key)

    async def shell(self, text: str) -> tuple[int, str, str]:
        """A line of bash in which ``dmsg`` is this one; status, output, errors."""
        program = " ".join(f"'{word}'" for word in DMSG)
        done = await deferToThread(
            subprocess.run,
            ["bash", "-c", f'dmsg() {{ {program} "$@"; }}\nset -o pipefail\n{text}'],
            cwd=self.directory,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr


class RemovedDirectoryTests(ToolCase):
    """A working directory that was removed while the shell was in it."""

    @asynchronous
    async def test_the_error_names_the_removed_directory(self) -> None:
        self.environment = {"DMSG_DISCOVERY": "http://127.0.0.1:9", "PYTHONSAFEPATH": "1"}
        hint = "No such file or directory; the working directory has been removed: change to another directory"
        path = (self.directory / "file").absolute()
        gone = "mkdir gone; cd gone; rmdir ../gone"
        self.assertEqual(await self.shell(f"{gone}; dmsg key new x.key"), (1, "", f"dmsg: {hint}\n"))
        # Commands that do not need the directory work.
        status, out, err = await self.shell(f"{gone}; dmsg key new {path}.key")
        self.assertEqual((status, err), (0, ""))
        # Sending looks up dmsg's own files, whose paths are relative here.
        code = "from dmsg.apps.exposure import own_files; own_files()"
        look = f"export DMSG_AGENT=off; '{sys.executable}' -c '{code}'"
        self.assertEqual(await self.shell(f"{gone}; {look}"), (0, "", ""))
        self.assertEqual(await self.shell("dmsg key show x.key"), (1, "", "dmsg: x.key: No such file or directory\n"))


class KeyInUseTests(ToolCase):
    """Two programs with one key file."""

    @asynchronous
    async def test_the_error_names_the_program_that_uses_the_key(self) -> None:
        await self.network()
        receiving = self.start("receive", "--listen", "--anyone", "--dir", ".", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"receiving at" in receiving.out)
        status, out, err = await self.run_command("cp", "--listen", ".", "-k", "bob.key", **self.environment)
        self.assertEqual((status, out), (1, ""))
        self.assertRegex(err, r"^dmsg: .*bob\.key is in use by .*receive \(process \d+, since .*--share.*\n$")
        # The first program can still be reached.
        status, _, err = await self.run_command("ping", self.key.public.hex(), "-c", "1", **self.environment)
        self.assertEqual((status, err), (0, ""))

    @asynchronous
    async def test_programs_that_share_a_key_are_notified_by_the_server(self) -> None:
        """Both programs run, and each is notified of the other. The newer one can be reached. When one stops, the entry
        of the other stays.
        """
        await self.network()
        first = self.start("receive", "--listen", "--anyone", "--dir", ".", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"receiving at" in first.out)
        second = self.start("cp", "--listen", ".", "-k", "bob.key", "--share", **self.environment)
        await self.until(lambda: b"is at" in second.out)
        await self.until(lambda: b"another program at 127.0.0.1 is connected with this key" in second.err)
        first.transport.signalProcess("INT")  # type: ignore[union-attr]
        await first.ended
        status, _, err = await self.run_command("ping", self.key.public.hex(), "-c", "1", **self.environment)
        self.assertEqual((status, err), (0, ""))

    def test_a_lock_is_released_when_its_process_ends(self) -> None:
        """Freed by the end of a process, however that comes; the same process may hold it twice."""
        path = self.directory / "x.key"
        write_key_file(path, SecKey.generate())
        code = (
            "import sys\nfrom dmsg.keylock import hold_key\nlock = hold_key(sys.argv[1], 'other')\n"
            "print('held', flush=True)\nsys.stdin.read()"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        self.assertEqual(other.stdout.readline(), "held\n")
        with self.assertRaisesRegex(KeyInUse, rf"in use by other \(process {other.pid}"):
            hold_key(path, "me")
        hold_key(path, "me", share=True).release()
        other.kill()
        other.wait()
        one, two = hold_key(path, "me"), hold_key(path, "me")
        one.release()
        self.assertTrue(Path(f"{path}.lock").exists())
        two.release()
        two.release()
        self.assertFalse(Path(f"{path}.lock").exists())

    def test_the_key_file_is_locked_in_a_read_only_directory(self) -> None:
        """If the directory is read-only, the key file itself is locked."""
        path = self.directory / "x.key"
        write_key_file(path, SecKey.generate())
        real_open = os.open

        def read_only(name: object, flags: int, *mode: int) -> int:
            if str(name).endswith(".lock"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real_open(name, flags, *mode)  # type: ignore[arg-type]

        self.patch(os, "open", read_only)
        lock = hold_key(path, "me")
        self.assertFalse(Path(f"{path}.lock").exists())
        code = "import sys\nfrom dmsg.keylock import _hold_itself\n_hold_itself(sys.argv[1], False)"
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        self.assertIn("in use by another program", done.stderr)
        lock.release()


class PingTests(ToolCase):
    """Pings and traces are no business of programs."""

    @asynchronous
    async def test_programs_are_not_notified_of_pings(self) -> None:
        await self.network()
        key = self.key.public.hex()
        listening = self.start("listen", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"listening" in listening.err)
        for arguments in (("ping", key, "-c", "2"), ("ping", f"{key}:0", "-c", "1"), ("trace", key)):
            status, out, err = await self.run_command(*arguments, **self.environment)
            self.assertEqual((status, err), (0, ""), arguments)
        self.assertNotIn(b"connected", listening.err)
        listening.transport.closeStdin()  # type: ignore[union-attr]
        # The command still accepts the one stream that it is for.
        status, _, err = await self.shell(f"echo hello | dmsg connect {key}")
        self.assertEqual(status, 0, err)
        self.assertEqual(await listening.ended, 0)
        self.assertEqual(listening.out, b"hello\n")

    @asynchronous
    async def test_ping_needs_a_listener_only_for_an_explicit_port(self) -> None:
        await self.network()
        key = self.key.public.hex()
        receiving = self.start("receive", "--listen", "--anyone", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"receiving" in receiving.out)
        status, out, _ = await self.run_command("ping", key, "-c", "1", "--json", **self.environment)
        self.assertEqual(status, 0)
        self.assertEqual([sorted(json.loads(line)) for line in out.splitlines()][1], ["number", "seconds"])
        status, _, err = await self.run_command("ping", f"{key}:7", "-c", "1", **self.environment)
        self.assertEqual(status, 3)
        self.assertIn("nobody listens at", err)
        status, _, err = await self.run_command("ping", f"{key}:7", "-p", "8", **self.environment)
        self.assertEqual(status, 2)
        self.assertNotIn(b"did not arrive", receiving.err)


class OutputTests(ToolCase):
    """Standard output and error that are closed, full, or read by nobody any more."""

    @asynchronous
    async def test_a_reader_that_goes_away(self) -> None:
        await self.network()
        measured = self.start("iperf", "--serve", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"measured at" in measured.out)
        key = self.key.public.hex()
        for text in (
            f"dmsg iperf {key} -t 20 | head -1",
            f"dmsg ping {key} -c 100000 -i 0 | head -1",
            "dmsg discovery list | true",
            f"dmsg trace {key} | true",
            "dmsg --help | head -1",
        ):
            status, _, err = await self.shell(text)
            self.assertIn(status, (0, output.EXIT_PIPE), (text, err))
            self.assertEqual(err, "", text)

    @asynchronous
    async def test_closed_and_full(self) -> None:
        await self.network()
        key = self.key.public.hex()
        for text, statuses, errors in (
            ("dmsg discovery list >&-", (1,), r"dmsg: standard output: Bad file descriptor\n"),
            ("dmsg discovery list > /dev/full", (1,), r"dmsg: standard output: No space left on device\n"),
            ("dmsg discovery list 2>&-", (0,), ""),
            ("dmsg discovery list <&- >&- 2>&-", (1,), ""),
            (f"dmsg ping {key} 2>&-", (3,), ""),
            ("dmsg key show bob.key > /dev/full", (1,), r"dmsg: standard output: No space left on device\n"),
            ("dmsg discovery list --json > /dev/full", (1,), r"dmsg: standard output: No space left on device\n"),
        ):
            status, _, err = await self.shell(text)
            self.assertIn(status, statuses, (text, err))
            self.assertRegex(err, f"^{errors}$", text)


class WaitingTests(ToolCase):
    """A command that waits prints what it waits for."""

    @asynchronous
    async def test_a_discovery_that_is_away(self) -> None:
        self.environment = {"DMSG_DISCOVERY": "http://127.0.0.1:1"}
        command = self.start("ping", SecKey.generate().public.hex(), **self.environment)
        began = time.monotonic()
        await self.until(lambda: command.err)
        # A busy machine starts a command late. Only the end of the wait matters.
        self.assertLess(time.monotonic() - began, 12)
        self.assertRegex(
            command.err.decode(),
            r"^dmsg: waiting, at the latest until \d\d:\d\d:\d\d: discovery http://127.0.0.1:1: connection refused\n",
        )
        self.assertEqual(await command.ended, 1)
        self.assertRegex(
            command.err.decode(),
            r"\ndmsg: the client waited .* no server is connected: .*http://127.0.0.1:1: connection refused\n$",
        )

    @asynchronous
    async def test_interrupted_at_any_time(self) -> None:
        """Ctrl-C prints nothing and no traceback, even while modules are imported."""
        self.environment = {"DMSG_DISCOVERY": "http://127.0.0.1:1"}
        for delay in (0.15, 0.3, 0.5, 0.8):
            command = self.start("ping", SecKey.generate().public.hex(), **self.environment)
            reactor.callLater(delay, command.transport.signalProcess, "INT")  # type: ignore[union-attr]
            await command.ended
            self.assertNotIn(b"Aborted", command.err)
            self.assertNotIn(b"cli/client_run", command.err)

    @asynchronous
    async def test_interrupted_in_the_first_and_the_last_turn(self) -> None:
        """No traceback is printed. A command starts after its signal handler is set; it may have ended when the signal
        is handled.
        """
        for last, status in (("await Deferred()", 130), ("return", 0)):
            command = self.start(code=INTERRUPTED % last)
            self.assertEqual((await command.ended, command.out, command.err), (status, b"", b""))

    @asynchronous
    async def test_a_name_in_an_error(self) -> None:
        await self.network()
        nobody = SecKey.generate().public.hex()
        await self.run_command("name", "add", "carol", nobody, **self.environment)
        status, _, err = await self.run_command("ping", "carol", **self.environment)
        self.assertEqual(status, 3)
        self.assertRegex(err, rf"^dmsg: discovery {self.url} has no entry of carol: .*\n$")


class ServeTests(ToolCase):
    """``dmsg serve`` of a directory that holds other things than files."""

    @asynchronous
    async def test_listings_skip_hidden_files_and_pipes_do_not_block(self) -> None:
        await self.network()
        public = self.directory / "public"
        public.mkdir()
        (public / "a.txt").write_text("hello")
        (public / "b<x>&.txt").write_text("y" * 2000)
        (public / "in").symlink_to("a.txt")
        (public / "out").symlink_to("/etc/passwd")
        (public / "outdir").symlink_to("/etc")
        os.mkfifo(public / "fifo")
        serving = self.start("serve", "public", "-k", "bob.key", **self.environment)
        await self.until(lambda: b"is at" in serving.out)
        url = f"dmsg://{self.key.public.hex()}"
        status, page, _ = await self.run_command("curl", f"{url}/?sort=size&order=desc", **self.environment)
        self.assertEqual(status, 0)
        self.assertEqual(re.findall(r'href="\./([^"]+)"', page), ["b%3Cx%3E%26.txt", "a.txt", "in"])
        self.assertIn("b&lt;x&gt;&amp;.txt", page)
        self.assertIn("2.0 kB", page)
        self.assertIn(f"<title>{self.key.public.short}...: /</title>", page)
        for path in ("fifo", "out", "outdir/passwd", "%00", "%ff", "a.txt%00"):
            status, out, err = await self.run_command("curl", "-f", "-I", f"{url}/{path}", **self.environment)
            self.assertEqual(status, 22, (path, out, err))
            self.assertIn("404", out)
        status, out, _ = await self.run_command(
            "curl", "-s", f"{url}/a.txt", "-w", "%{http_code}\\n", **self.environment
        )
        self.assertEqual((status, out), (0, "hello200\n"))
        self.assertNotIn(b"Traceback", serving.out + serving.err)


class UnhandledTests(ToolCase):
    """No command ends with an unhandled error."""

    RUNS = int(os.environ.get("COMMAND_RUNS", "1"))

    @asynchronous
    async def test_every_command_again_and_again(self) -> None:
        """Four servers, so that the race for two has losers.  ``COMMAND_RUNS=100`` does it at length."""
        await self.network(servers=4)
        key = self.key.public.hex()
        (self.directory / "file").write_bytes(b"x" * 1000)
        (self.directory / "inbox").mkdir()
        receiving = self.start(
            "receive", "--listen", "--anyone", "--dir", "inbox", "--overwrite", "-k", "bob.key", **self.environment
        )
        await self.until(lambda: b"receiving" in receiving.out)
        commands = (
            ("ping", key, "-c", "1", "-i", "0"),
            ("trace", key),
            ("send", "file", key),
            ("discovery", "list"),
            ("bench", "--seconds", "0.1", "--size", "64"),
            ("connect", f"{key}:9"),
        )
        for _ in range(self.RUNS):
            for arguments in commands:
                command = self.start(*arguments, code=DEBUGGED, **self.environment)
                command.transport.closeStdin()  # type: ignore[union-attr]
                status, said = await command.ended, command.err.decode()
                self.assertNotIn("Unhandled", said, arguments)
                self.assertNotIn("Traceback", said, arguments)
                self.assertEqual(status, 3 if arguments[0] == "connect" else 0, (arguments, said))


class DescribeTests(SynchronousTestCase):
    """Errors name the file that they are about."""

    def test_descriptor_limit_for_files(self) -> None:
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "some/file")
        self.assertEqual(output.describe(error), "some/file: No such file or directory")
        self.assertEqual(output.describe(OSError(errno.EIO, "Input/output error")), "Input/output error")
