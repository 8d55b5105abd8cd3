"""Listing of a spool: links, names and permissions that end no run."""

from __future__ import annotations

import gzip
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.spool_listing import Listing, Reason, file_uri, left_lines, list_sealed, merge
from dmsg.telemetry.verify import verify_spool

EVENTS, RECEIPTS = "events-*.jsonl.gz", "receipts-*.jsonl.gz"


class ListingTests(SynchronousTestCase):
    """Files that a listing returns, and files that it leaves out."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(rmtree, self.root)
        self.spool = self.root / "spool"
        self.file("a/events-1.jsonl.gz")

    def file(self, name: str) -> Path:
        path = self.spool / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
        return path

    def listed(self, *patterns: str) -> tuple[list[str], dict[Reason, set[str]]]:
        """The paths below the spool."""
        found = list_sealed(self.spool, patterns or (EVENTS,))
        start = f"{self.spool}/"
        return (
            [file.path.removeprefix(start) for file in found.files],
            {reason: {path.removeprefix(start) for path in paths} for reason, paths in found.left.items()},
        )

    def test_links_are_not_followed(self) -> None:
        outside = self.root / "outside"
        (outside / "below").mkdir(parents=True)
        for name in ("events-2.jsonl.gz", "below/events-3.jsonl.gz"):
            (outside / name).write_bytes(b"")
        links = {
            "b": outside,
            "c": outside,
            "events-4.jsonl.gz": outside / "events-2.jsonl.gz",
            "a/up": self.spool,
            "self": Path("self"),
            "gone": self.root / "nowhere",
            "events-5.jsonl.gz": self.root / "nowhere",
        }
        for name, target in links.items():
            (self.spool / name).symlink_to(target)
        self.assertEqual(
            self.listed(),
            (
                ["a/events-1.jsonl.gz", "b/below/events-3.jsonl.gz", "b/events-2.jsonl.gz", "events-4.jsonl.gz"],
                {Reason.DANGLING: {"self", "gone", "events-5.jsonl.gz"}},
            ),
        )

    def test_pipes_are_not_opened(self) -> None:
        """A pipe would stop whoever opens it for reading."""
        os.mkfifo(self.spool / "events-2.jsonl.gz")
        os.mkfifo(self.spool / "another")
        end = socket.socket(socket.AF_UNIX)
        self.addCleanup(end.close)
        end.bind(str(self.spool / "events-3.jsonl.gz"))
        self.file("events-4.jsonl.gz/events-5.jsonl.gz")
        self.assertEqual(
            self.listed(),
            (
                ["a/events-1.jsonl.gz", "events-4.jsonl.gz/events-5.jsonl.gz"],
                {Reason.SPECIAL: {"events-2.jsonl.gz", "events-3.jsonl.gz"}},
            ),
        )

    def test_hidden_names_are_skipped(self) -> None:
        for name in (".a/events-1.jsonl.gz", "_a/events-1.jsonl.gz", "_a=1/events-1.jsonl.gz", "notes.txt"):
            self.file(name)
        self.assertEqual(self.listed(), (["_a=1/events-1.jsonl.gz", "a/events-1.jsonl.gz"], {}))
        self.assertEqual(self.listed("notes*", RECEIPTS), (["notes.txt"], {}))

    def test_names_that_are_not_utf8(self) -> None:
        self.file("b/events-2.jsonl.gz")
        os.rename(self.spool / "b", os.fsencode(self.spool) + b"/b\xff")
        os.rename(self.file("events-3.jsonl.gz"), os.fsencode(self.spool) + b"/events-\xff.jsonl.gz")
        (self.spool / os.fsdecode(b"notes\xff")).touch()
        found = list_sealed(self.spool, [EVENTS])
        self.assertEqual(len(found.files), 1)
        lines = left_lines(merge([found.left, found.left]))
        self.assertEqual(
            lines, [f"not read, because its name is not UTF-8: {self.spool}/b\N{REPLACEMENT CHARACTER} and 1 more"]
        )
        self.assertRaises(DmsgError, list_sealed, os.fsdecode(os.fsencode(self.spool) + b"/b\xff"), [EVENTS])

    def test_unreadable_directories_are_reported(self) -> None:
        if os.geteuid():
            whoever = os.geteuid()
        else:
            whoever = 65534
            self.addCleanup(os.seteuid, 0)
        self.root.chmod(0o755)
        self.file("events-2.jsonl.gz").chmod(0)
        self.file("b/events-3.jsonl.gz").parent.chmod(0)
        (self.spool / "events-4.jsonl.gz").symlink_to(self.spool / "b" / "events-3.jsonl.gz")
        os.seteuid(whoever)
        found = self.listed()
        if whoever == 65534:
            os.seteuid(0)
        (self.spool / "b").chmod(0o755)
        expected = {"events-2.jsonl.gz", "b", "events-4.jsonl.gz"}
        self.assertEqual(found, (["a/events-1.jsonl.gz"], {Reason.FORBIDDEN: expected}))

    def test_files_that_vanish(self) -> None:
        """Another program removes files from the spool between two listings."""
        in_b = self.file("b/events-2.jsonl.gz")
        there = self.file("events-3.jsonl.gz")
        scan = os.scandir

        class Scan:
            """A directory from which others remove files once it is listed."""

            def __init__(self, path: str) -> None:
                self._entries = list(scan(path))

            def __enter__(self) -> list[os.DirEntry[str]]:
                if there.exists():
                    there.unlink()
                    in_b.unlink()
                    in_b.parent.rmdir()
                return self._entries

            def __exit__(self, *_: object) -> None:
                pass

        with patch("os.scandir", Scan):
            found = self.listed()
        self.assertEqual(found, (["a/events-1.jsonl.gz"], {Reason.GONE: {"events-3.jsonl.gz"}}))

    def test_the_spool_itself(self) -> None:
        for path in (self.root / "nowhere", self.spool / "a" / "events-1.jsonl.gz"):
            self.assertRaisesRegex(DmsgError, "cannot be read", list_sealed, path, [EVENTS])

    def test_uris_name_listed_files(self) -> None:
        for path, uri in (
            ("/a b/h#1/p%41", "/a%20b/h%231/p%2541"),
            ("/new\nline/q?u;c/quote\"'", "/new%0Aline/q%3Fu;c/quote%22'"),
            ("/\u00fc\u20ac/nb\u00a0sp/c\u0085x", "/\u00fc\u20ac/nb%C2%A0sp/c%C2%85x"),
            ("/br[1]{2}/x=1/b\\s/a:b/st*r", "/br%5B1%5D%7B2%7D/x=1/b%5Cs/a:b/st*r"),
        ):
            self.assertEqual(file_uri(path), "file:" + uri)

    def test_lines_for_people(self) -> None:
        listing = Listing()
        self.assertEqual(left_lines(merge([listing.left])), [])
        listing.left[Reason.DANGLING] |= {"/a", "/b", "/c"}
        listing.left[Reason.SPECIAL].add("/" + "x" * 200)
        self.assertEqual(
            left_lines(merge([listing.left, {Reason.DANGLING: {"/a", "/d"}}])),
            [
                "not read, because it is no regular file: ..." + "x" * 100,
                "not read, because the link leads to nothing: /a and 3 more",
            ],
        )


class QuietTests(SynchronousTestCase):
    """Directories that need not be listed again."""

    def setUp(self) -> None:
        self.spool = Path(self.mktemp()).absolute()
        for name in ("a/2026-03-10", "a/2026-03-11"):
            (self.spool / name).mkdir(parents=True)
            (self.spool / name / "events-1.jsonl.gz").touch()
        self.settle()

    def settle(self) -> None:
        """Make all directories a day older than they are."""
        for directory in [self.spool, *(path for path in self.spool.rglob("*") if path.is_dir())]:
            os.utime(directory, (directory.stat().st_mtime - 86_400,) * 2)

    def listed(self, known: Mapping[str, int]) -> tuple[list[str], Mapping[str, int]]:
        found = list_sealed(self.spool, ["events-*"], known)
        return [str(Path(file.path).relative_to(self.spool)) for file in found.files], found.quiet

    def test_only_what_has_changed_is_listed(self) -> None:
        files, quiet = self.listed({})
        self.assertEqual(files, ["a/2026-03-10/events-1.jsonl.gz", "a/2026-03-11/events-1.jsonl.gz"])
        self.assertEqual({Path(path).name for path in quiet}, {"2026-03-10", "2026-03-11"})
        self.assertEqual(self.listed(quiet), ([], quiet))
        # The spool gets a late file, and a new directory.
        (self.spool / "a/2026-03-10/events-0.jsonl.gz").touch()
        (self.spool / "b/2026-03-12").mkdir(parents=True)
        (self.spool / "b/2026-03-12/events-3.jsonl.gz").touch()
        files, after = self.listed(quiet)
        self.assertEqual(
            files,
            ["a/2026-03-10/events-0.jsonl.gz", "a/2026-03-10/events-1.jsonl.gz", "b/2026-03-12/events-3.jsonl.gz"],
        )
        # The directories changed just now, so they are listed again.
        self.assertEqual({Path(path).name for path in after}, {"2026-03-11"})
        self.settle()
        self.assertEqual(len(self.listed(after)[1]), 3)

    def test_links_and_what_cannot_be_read_are_listed_again(self) -> None:
        (self.spool / "a/2026-03-10/events-2.jsonl.gz").symlink_to("nowhere")
        (self.spool / "a/2026-03-11/more").symlink_to(self.spool / "a/2026-03-10")
        self.settle()
        self.assertEqual(self.listed({})[1], {})


class VerifyTests(SynchronousTestCase):
    """The same in a spool of receipts."""

    def test_unreadable_files_are_left_out(self) -> None:
        spool, target = Path(self.mktemp()), Path(self.mktemp())
        spool.mkdir()
        (spool / "receipts-1.jsonl.gz").write_bytes(gzip.compress(b"no receipt\n"))
        (spool / "receipts-2.jsonl.gz").symlink_to("nowhere")
        os.mkfifo(spool / "receipts-3.jsonl.gz")
        found = verify_spool(spool, target, Pseudonyms(bytes(32)))
        self.assertEqual(found.files, 1)
        self.assertEqual(set(found.left), {Reason.DANGLING, Reason.SPECIAL})
