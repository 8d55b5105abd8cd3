"""Files that are written into a shared directory into which another user has put directories and links."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import click
from twisted.trial.unittest import SkipTest

from dmsg.cli.main import main
from dmsg.cli.options import WrittenPath
from tests.cli.test_commands import CommandCase
from tests.support import asynchronous

STRANGER = 65534


class PlantedTests(CommandCase):
    """Commands refuse the directory, file or link, and say whose it is."""

    @asynchronous
    async def test_nothing_is_written_where_another_user_put_a_directory(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        shared, own = Path(tempfile.mkdtemp()), self.directory.absolute() / "own"
        self.addCleanup(shutil.rmtree, shared)
        shared.chmod(0o1777)
        own.mkdir()
        (shared / "inbox").mkdir()
        (shared / "link").symlink_to(own)
        (self.directory / "a").write_bytes(b"a")
        for name in ("inbox", "link"):
            os.lchown(shared / name, STRANGER, STRANGER)
            at = str(shared / name)
            for arguments in (
                ("receive", "5274-guitar-alpha-juice", "--yes", "--dir", at),
                ("receive", "--listen", "--anyone", "--dir", f"{at}/new"),
                ("cp", "--listen", at, "--writable", "--anyone"),
                ("cp", "ak" + "a" * 51 + ":a", f"{at}/a"),
            ):
                status, _, err = await self.run_command(*arguments, "-d", "http://127.0.0.1:9")
                self.assertEqual(status, 2, (arguments, err))
                self.assertIn(f"{at} is another user's (uid {STRANGER})", err)
        self.assertEqual(list(own.iterdir()) + list((shared / "inbox").iterdir()), [])

    @asynchronous
    async def test_no_command_writes_through_a_link_of_another_user(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        shared, own = Path(tempfile.mkdtemp()), self.directory.absolute() / "own"
        self.addCleanup(shutil.rmtree, shared)
        shared.chmod(0o1777)
        own.write_text("own\n")
        key = "ak" + "a" * 51
        (shared / "their").mkdir()
        for name in ("page", "dmsg.1"):
            (shared / name).symlink_to(own)
        for path in shared.iterdir():
            os.lchown(path, STRANGER, STRANGER)
        for arguments, expected in (
            (("curl", f"dmsg://{key}/page", "-o", str(shared / "page")), 2),
            (("curl", f"dmsg://{key}/page", "-o", str(shared / "their" / "page")), 2),
            (("man", "--write", str(shared / "their")), 2),
            (("man", "--write", str(shared)), 1),
            (("key", "new", str(shared / "their" / "a.key")), 2),
            (("twin", "create", str(shared / "their" / "new" / "twin"), "--registry", "http://127.0.0.1:9"), 2),
            (("up", "--log", str(shared / "their" / "new" / "agent.log")), 2),
            (("host", "--directory", str(shared / "their" / "host")), 2),
            (("analytics", "send", str(shared / "their"), key), 2),
        ):
            discovery = ("-d", "http://127.0.0.1:9") if arguments[0] == "curl" else ()
            status, _, err = await self.run_command(*arguments, *discovery)
            self.assertEqual(status, expected, (arguments, err))
            self.assertIn(f"is another user's (uid {STRANGER})", err, arguments)
        self.assertEqual((own.read_text(), list((shared / "their").iterdir())), ("own\n", []))

    @asynchronous
    async def test_events_are_not_written_into_a_directory_of_another_user(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can create files of other users")
        if importlib.util.find_spec("pyspark") is None:
            raise SkipTest("Spark is not installed")
        shared = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, shared)
        shared.chmod(0o1777)
        their = shared / "their"
        their.mkdir()
        os.lchown(their, STRANGER, STRANGER)
        status, _, err = await self.run_command("analytics", "simulate", "--out", str(their))
        self.assertEqual(status, 2, err)
        self.assertIn(f"is another user's (uid {STRANGER})", err)
        self.assertEqual(list(their.iterdir()), [])
        # All commands that write tables claim them first; their --out may also be a URI.
        from dmsg.analytics.lake_error import LakeError
        from dmsg.analytics.store import Store

        for out in (str(their), f"file:{their}/tables"):
            error = self.assertRaises(LakeError, Store(out).claim)
            self.assertIn(f"is another user's (uid {STRANGER})", str(error))
        self.assertEqual(list(their.iterdir()), [])

    def test_each_path_on_a_command_line_is_only_read_or_is_checked(self) -> None:
        """An argument or option with a path either names a file that exists, or has a type that checks the path."""
        only_read = {"dmsg key show FILE", "dmsg key succeed OLD", "dmsg key succeed NEW"}
        unchecked = set()

        def visit(command: click.Command, name: str, above: click.Context | None) -> None:
            context = click.Context(command, above, name)
            for param in command.params:
                kind = param.type
                if isinstance(kind, click.Path) and not isinstance(kind, WrittenPath) and not kind.exists:
                    unchecked.add(f"{context.command_path} {param.make_metavar(context)}")
            if isinstance(command, click.Group):
                for below in command.list_commands(context):
                    found = command.get_command(context, below)
                    assert found is not None
                    visit(found, below, context)

        visit(main, "dmsg", None)
        self.assertEqual(unchecked, only_read)
