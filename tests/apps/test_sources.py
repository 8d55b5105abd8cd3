"""Files that change while they are sent, and files whose size the system does not say; both sides over TCP."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import DeferredList
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.apps import sources
from dmsg.apps.chunks import ChunkReader, digest_of, encode_chunk, encode_end
from dmsg.apps.copies import CopyCut, Get, Put
from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.receiver import ParcelReceiver
from dmsg.apps.parcels.sender import FilesSender, OldFileSender
from dmsg.apps.parcels.walk import walk
from dmsg.apps.partial_files import part_of
from dmsg.apps.sources import (
    Source,
    SourceChanged,
    content_of_unmeasured,
    is_pipe,
    named_path,
    open_pipe,
    open_regular,
)
from dmsg.apps.transfer import TransferError
from tests.support import asynchronous

SIZE = 2_000_000
NEVER = "Connection was aborted"
"""Text of Twisted's error after abortConnection, which means nothing to users."""


class ChangeCase(TestCase):
    """A file, or a directory with one, that is changed before or while it is sent."""

    def setUp(self) -> None:
        self.here, self.there = Path(self.mktemp()), Path(self.mktemp())
        self.here.mkdir()
        self.there.mkdir()
        (self.here / "tree").mkdir()
        self.file = self.here / "film"
        self.inside = self.here / "tree" / "film"
        for path in (self.file, self.inside):
            path.write_bytes(bytes(SIZE))

    async def carry(self, one: Any, other: Any) -> list[Any]:
        """Connect a sender and a receiver; return the results of both."""
        factory = Factory.forProtocol(lambda: other)
        listening = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(listening.stopListening)
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", listening.getHost().port), one)
        ends = await DeferredList([one.done, other.done], consumeErrors=True)
        return [result.value if isinstance(result, Failure) else result for _, result in ends]

    def both_are_told(self, ends: list[Any], *said: str) -> None:
        """The same to both, and by the same class, which is the exit status."""
        for end_of in ends:
            self.assertIs(type(end_of), SourceChanged)
            for text in (*said, "changed after it was offered"):
                self.assertIn(text, str(end_of))
        self.assertEqual(str(ends[0]), str(ends[1]))

    def ways(self) -> list[tuple[Callable[[Path], object], str]]:
        def remove(path: Path) -> None:
            path.unlink()

        def link(path: Path) -> None:
            path.unlink()
            path.symlink_to("/etc/passwd")

        def pipe(path: Path) -> None:
            path.unlink()
            os.mkfifo(path)

        def another(path: Path) -> None:
            path.with_name("new").write_bytes(bytes(SIZE + 1))
            path.with_name("new").rename(path)

        def another_twice(path: Path) -> None:
            """The second file gets the inode of the offered one, if the file system uses inodes again."""
            for more in (2, 1):
                path.with_name("new").write_bytes(bytes(SIZE + more))
                path.with_name("new").rename(path)

        return [
            (lambda path: os.truncate(path, 10), "it has 10 bytes now, and had 2,000,000"),
            (lambda path: os.truncate(path, 0), "it has 0 bytes now"),
            (remove, "No such file"),
            (link, ""),
            (pipe, "it is no longer a file"),
            (another, "it has 2,000,001 bytes now"),
            (another_twice, "it has 2,000,001 bytes now"),
        ]


class ParcelTests(ChangeCase):
    """Files that change between the code and the receipt of a parcel."""

    async def parcel(self, path: Path, change: Callable[[], object], *, old: bool = False) -> list[Any]:
        sender = FilesSender(walk([path]), on_accepted=change)
        receiver = ParcelReceiver(Destination(self.there), lambda offer: None)
        if old:
            say = receiver._say
            receiver._say = lambda **message: say(**{k: v for k, v in message.items() if k != "pieces"})  # type: ignore[method-assign]
        return await self.carry(sender, receiver)

    @asynchronous
    async def test_a_file_changed_after_the_offer_fails_the_parcel(self) -> None:
        for change, said in self.ways():
            self.file.unlink(missing_ok=True)
            self.file.write_bytes(bytes(SIZE))
            self.both_are_told(await self.parcel(self.file, lambda: change(self.file)), "film ", said)  # noqa: B023

    @asynchronous
    async def test_a_file_in_a_directory_changed_after_the_offer_fails_the_parcel(self) -> None:
        for change, said in self.ways():
            self.inside.unlink(missing_ok=True)
            self.inside.write_bytes(bytes(SIZE))
            ends = await self.parcel(self.here / "tree", lambda: change(self.inside))  # noqa: B023
            self.both_are_told(ends, "tree/film ", said)
        self.assertEqual(list(self.there.glob("[!.]*")), [], "nothing has its name")

    @asynchronous
    async def test_a_directory_that_becomes_a_link(self) -> None:
        elsewhere = self.here / "elsewhere"

        def change() -> None:
            (self.here / "tree").rename(elsewhere)
            (self.here / "tree").symlink_to("elsewhere")

        self.both_are_told(await self.parcel(self.here / "tree", change), "tree/film ")

    @asynchronous
    async def test_a_file_written_to_while_sent_is_reported_at_both_ends(self) -> None:
        """The offered bytes arrive, and both ends are informed."""
        for path in (self.file, self.here / "tree"):
            file = path / "film" if path.is_dir() else path

            def grow(file: Path = file) -> None:
                with file.open("ab") as more:
                    more.write(b"more")

            sent, taken = await self.parcel(path, grow)
            name = str(file.relative_to(self.here))
            self.assertEqual((sent.changed, taken.changed), ((name,), (name,)))
            self.assertEqual((self.there / name).read_bytes(), bytes(SIZE))
        sent, taken = await self.parcel(self.inside.rename(self.here / "last"), lambda: None)
        self.assertEqual((sent.changed, taken.changed), ((), ()))

    @asynchronous
    async def test_an_older_receiver_gets_the_offered_bytes(self) -> None:
        """Only the sender can report the change, because the older protocol has no message for it."""
        sent, taken = await self.parcel(self.file, lambda: None, old=True)
        self.assertEqual((self.there / "film").read_bytes(), bytes(SIZE))
        (self.there / "film").unlink()
        sent, taken = await self.parcel(self.file, lambda: os.truncate(self.file, 10), old=True)
        self.assertIs(type(sent), SourceChanged)
        self.assertIsInstance(taken, TransferError)
        self.assertNotIn(NEVER, f"{sent} {taken}")

    @asynchronous
    async def test_an_older_sender_is_accepted(self) -> None:
        sender = FilesSender(walk([self.file]))
        answered = sender._on_answer
        sender._next = lambda message: answered({k: v for k, v in message.items() if k != "pieces"})
        await self.carry(sender, ParcelReceiver(Destination(self.there), lambda offer: None))
        self.assertEqual((self.there / "film").read_bytes(), bytes(SIZE))

    @asynchronous
    async def test_a_reason_sent_before_the_end_is_reported(self) -> None:
        """The sender's reason, also where this side had something else to do."""
        (self.here / "many").mkdir()
        for number in range(300):
            (self.here / "many" / f"{number:04}").write_bytes(b"1")
        self.patch(ParcelReceiver._proceed, "__defaults__", (0.0,))  # Other work gets its turn after each step.
        ends = await self.parcel(self.here / "many", (self.here / "many" / "0299").unlink)
        self.both_are_told(ends, "many/0299 ")


class CopyTests(ChangeCase):
    """A file changes while it is copied, in either direction."""

    def started(self, path: Path, change: Callable[[Path], object]) -> Any:
        def started(name: str, size: int, offset: int) -> Callable[[int], None]:
            changes = [change]

            def moved(done: int) -> None:
                if changes and done:
                    changes.pop()(path)

            return moved

        return started

    async def put(self, change: Callable[[Path], object], *, old: bool = False, tree: bool = False) -> list[Any]:
        peer = CopyPeer(reactor, self.there, writable=True)
        name, path = ("tree", self.inside) if tree else ("film", self.file)
        putter = Put(self.here / name, name, on_started=self.started(path, change))
        if old:
            self.know_no_pieces()
        return await self.carry(putter, peer)

    async def get(self, change: Callable[[Path], object], *, old: bool = False, tree: bool = False) -> list[Any]:
        name, path = ("tree", self.inside) if tree else ("film", self.file)
        getter = Get(name, self.there / name, directories=tree, on_started=self.started(path, change))
        if old:
            self.know_no_pieces()
        return await self.carry(getter, CopyPeer(reactor, self.here))

    def know_no_pieces(self) -> None:
        say = ParcelReceiver._say
        self.patch(
            ParcelReceiver,
            "_say",
            lambda receiver, **message: say(receiver, **{k: v for k, v in message.items() if k != "pieces"}),
        )

    @asynchronous
    async def test_a_copied_file_that_shrinks_fails(self) -> None:
        for tree in (False, True):
            for copy in (self.put, self.get):
                for path in (self.file, self.inside):
                    path.write_bytes(bytes(SIZE * 5))
                name = "tree/film" if tree else "film"
                self.both_are_told(await copy(lambda path: os.truncate(path, 10), tree=tree), f"{name} ")

    @asynchronous
    async def test_a_copied_file_that_is_written_to_is_reported(self) -> None:
        for tree in (False, True):
            for copy in (self.put, self.get):
                ends = await copy(lambda path: os.utime(path), tree=tree)
                self.assertEqual([one.changed for one in ends], [True, True])
                name = "tree/film" if tree else "film"
                self.assertEqual((self.there / name).read_bytes(), bytes(SIZE))
                (self.there / name).unlink()
                if tree:
                    (self.there / "tree").rmdir()

    @asynchronous
    async def test_a_removed_file_is_copied_while_it_is_open(self) -> None:
        """A file that is open is there until it is closed."""
        for copy in (self.put, self.get):
            ends = await copy(lambda path: path.unlink())
            self.assertEqual([one.size for one in ends], [SIZE, SIZE])
            self.file.write_bytes(bytes(SIZE))
            (self.there / "film").unlink()

    @asynchronous
    async def test_older_peers_get_the_offered_bytes(self) -> None:
        for copy in (self.put, self.get):
            ends = await copy(lambda path: None, old=True)
            self.assertEqual((self.there / "film").read_bytes(), bytes(SIZE))
            self.assertEqual([one.size for one in ends], [SIZE, SIZE])
            (self.there / "film").unlink()
            self.file.write_bytes(bytes(SIZE * 5))
            ends = await copy(lambda path: os.truncate(path, 10), old=True)
            sender, receiver = ends if copy == self.put else reversed(ends)
            self.assertIs(type(sender), SourceChanged)
            self.assertIsInstance(receiver, CopyCut)
            self.assertNotIn(NEVER, f"{sender} {receiver}")
            self.file.write_bytes(bytes(SIZE))
            part_of(self.there / "film").unlink()

    @asynchronous
    async def test_the_first_kind_of_transfer(self) -> None:
        """The older protocol has no messages between the bytes. The sender reports the change, and the receiver the
        missing bytes.
        """
        sender = OldFileSender(walk([self.file]), progress=lambda done: os.truncate(self.file, 10))
        ends = await self.carry(sender, ParcelReceiver(Destination(self.there), lambda offer: None))
        self.assertIs(type(ends[0]), SourceChanged)
        self.assertIsInstance(ends[1], TransferError)
        self.assertNotIn(NEVER, f"{ends[0]} {ends[1]}")
        self.assertEqual(list(self.there.glob("[!.]*")), [], "nothing has its name")


class UnmeasuredTests(ChangeCase):
    """Sizes are hints."""

    @asynchronous
    async def test_proc_files_are_read_to_their_end(self) -> None:
        """Files of /proc have the size 0, but have content."""
        version = Path("/proc/version")
        await self.carry(FilesSender(walk([version])), ParcelReceiver(Destination(self.there), lambda offer: None))
        self.assertEqual((self.there / "version").read_bytes(), version.read_bytes())
        (self.there / "version").unlink()
        putter = Put(version, "version")
        await self.carry(putter, CopyPeer(reactor, self.there, writable=True))
        self.assertEqual((self.there / "version").read_bytes(), version.read_bytes())
        (self.there / "version").unlink()
        old = OldFileSender(walk([version]))
        await self.carry(old, ParcelReceiver(Destination(self.there), lambda offer: None))
        self.assertEqual((self.there / "version").read_bytes(), version.read_bytes())
        await self.carry(Get("version", self.there / "got"), CopyPeer(reactor, Path("/proc")))
        self.assertEqual((self.there / "got").read_bytes(), version.read_bytes())

    @asynchronous
    async def test_sys_files_are_read_to_their_end(self) -> None:
        """Files of /sys have the size of a page, but have less content."""
        path = next((path for path in Path("/sys/kernel/mm").rglob("*") if _has_less_than_it_says(path)), None)
        if path is None:
            self.skipTest("no file of /sys has less than it says")
        await self.carry(FilesSender(walk([path])), ParcelReceiver(Destination(self.there), lambda offer: None))
        self.assertEqual((self.there / path.name).read_bytes(), path.read_bytes())

    def test_unmeasured_files_have_a_size_limit(self) -> None:
        path = self.here / "endless"
        path.write_bytes(b"")
        self.patch(sources, "UNMEASURED_LIMIT", 10)
        with open_regular(path, "endless") as file:
            status = os.fstat(file.fileno())
            path.write_bytes(bytes(10))
            self.assertEqual(content_of_unmeasured(file, status, "endless"), bytes(10))
            path.write_bytes(bytes(11))
            error = self.assertRaises(TransferError, content_of_unmeasured, file, status, "endless")
        self.assertIn("dmsg send - < FILE", str(error))

    def test_an_unmeasured_source_is_read_as_far_as_offered(self) -> None:
        """Reading begins at the position at which the transfer is resumed."""
        self.file.write_bytes(b"0123456789")
        source = Source(open_regular(self.file, "film"), "film")
        self.assertEqual((source.size, source.read(4), source.read(100), source.read(1)), (10, b"0123", b"456789", b""))
        self.assertFalse(source.was_written_to())
        with self.file.open("ab") as file:
            file.write(b"more")
        source.seek(8)
        self.assertEqual((source.read(100), source.was_written_to()), (b"89", True))
        os.truncate(self.file, 3)
        source.seek(2)
        self.assertEqual(source.read(100), b"2")
        self.assertIn("it has 3 bytes now, and had 10", str(self.assertRaises(SourceChanged, source.read, 1)))
        source.close()
        for other, problem in ((self.here, "is a directory"), (Path("/dev/null"), "not a regular file")):
            error = self.assertRaises(TransferError, open_regular, other, "other")
            self.assertEqual(str(error), f"other: {problem}")


def _has_less_than_it_says(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o400:
            return False
        return 0 < len(path.read_bytes()) < status.st_size
    except OSError:
        return False


class NameTests(SynchronousTestCase):
    """Other names of files that this process has open."""

    def test_pipes_are_recognised(self) -> None:
        """Pipes of the shell and named pipes are pipes; all other files are not."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        os.write(writing, b"1")
        os.close(writing)
        for path in (f"/dev/fd/{reading}", f"/proc/self/fd/{reading}", f"/proc/{os.getpid()}/fd/{reading}"):
            self.assertTrue(is_pipe(path), path)
            self.assertEqual(open_pipe(path), (reading, "a pipe"))
        fifo = self.mktemp()
        os.mkfifo(fifo)
        self.assertTrue(is_pipe(fifo))
        descriptor, name = open_pipe(fifo)
        os.close(descriptor)
        self.assertEqual(name, os.path.basename(fifo))
        for path in (
            "/dev/null",
            "/proc",
            "/proc/version",
            __file__,
            "none",
            "",
            "a\0b",
            "/dev/fd/x",
            f"/dev/fd/{2**20}",
        ):
            self.assertFalse(is_pipe(path), path)

    def test_a_link_to_standard_input_is_opened(self) -> None:
        link = self.mktemp()
        os.symlink("/proc/self/fd/0", link)
        self.assertEqual(open_pipe(link), (0, "standard input"))

    def test_an_open_file_is_sent_under_its_own_name(self) -> None:
        """A removed file has no name and is sent as a pipe."""
        path = Path(self.mktemp()).absolute()
        path.write_bytes(b"1")
        with path.open("rb") as file:
            other = f"/dev/fd/{file.fileno()}"
            self.assertEqual((is_pipe(other), named_path(Path(other))), (False, path))
            path.unlink()
            self.assertEqual((is_pipe(other), open_pipe(other)), (True, (file.fileno(), "a pipe")))
        self.assertEqual(named_path(Path("a/b")), Path("a/b"))


class PieceTests(SynchronousTestCase):
    """Content that is cut into pieces at any position."""

    def test_chunks_cut_anywhere_are_reassembled(self) -> None:
        whole = encode_chunk(b"12345") + encode_chunk(b"678") + encode_end(bytes(32), changed=True)
        for size in range(1, len(whole)):
            reader, buffer, found = ChunkReader(), bytearray(), bytearray()
            over = False
            for at in range(0, len(whole), size):
                buffer += whole[at : at + size]
                while not over:
                    data = reader.take(buffer, 8 - len(found))
                    over = data is None
                    if not data:
                        break
                    found += data
            self.assertEqual((found, over, bytes(buffer)), (b"12345678", True, encode_end(bytes(32), changed=True)[4:]))

    def test_malformed_chunks_are_refused(self) -> None:
        self.assertRaises(TransferError, ChunkReader().take, bytearray(encode_chunk(b"12345")), 4)
        self.assertRaises(TransferError, ChunkReader().take, bytearray(b"\xff\xff\xff\xff"), 2**40)
        for message in ({}, {"sha256": "x"}, {"sha256": 1}, {"sha256": "00"}):
            self.assertRaises(TransferError, digest_of, message, 0)
        self.assertRaises(TransferError, digest_of, {"sha256": "00" * 32}, 1)
        self.assertEqual(digest_of({"sha256": "00" * 32}, 0), bytes(32))
