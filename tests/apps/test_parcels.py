"""Parcels: from directory to directory over TCP, and what liars say."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import re
import shutil
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.apps.parcels import manifest
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import DIRECTORY, FILE, LINK, CheckedItems, Item, decode_item, parts_of, stays_inside
from dmsg.apps.parcels.offers import Offer
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, ParcelSender, PipeSender, SentParcel, TextSender
from dmsg.apps.parcels.walk import walk
from dmsg.apps.parcels.wire import MESSAGE_LIMIT, TEXT_LIMIT, THINGS_LIMIT, encode
from dmsg.apps.partial_files import part_name
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.units import human_size
from tests.support import asynchronous

ODD = (
    b"plain",
    b"with blank",
    b"new\nline",
    "ünï".encode(),
    b"not\xffutf8",
    b"-dash",
    b"'quote'",
    b"\x1b[31mred",
    b"~",
    b"*",
)


def planted(root: Path, seed: int = 1) -> Path:
    """A tree with odd names, empty things, links, modes and times."""
    chance = random.Random(seed)
    tree = root / "tree"
    tree.mkdir()
    for number, name in enumerate(ODD):
        below = tree / os.fsdecode(name)
        below.mkdir()
        (below / "empty").mkdir()
        for size in (0, 1, 1000, 300_000):
            file = below / f"{size}.bin"
            file.write_bytes(chance.randbytes(size))
            file.chmod(0o600 + chance.choice((0, 0o40, 0o44, 0o100)))
            os.utime(file, ns=(1, 1_500_000_000_123_456_789 + number))
        (below / "up").symlink_to("../plain/1.bin")
        (below / "nowhere").symlink_to("not/there")
        os.utime(below, ns=(1, 1_400_000_000_000_000_001 + number))
        below.chmod(0o750)
    (tree / "read-only").mkdir()
    (tree / "read-only" / "file").write_bytes(b"x")
    (tree / "read-only" / "file").chmod(0o400)
    (tree / "read-only").chmod(0o500)
    return tree


def described(root: Path) -> dict[str, Any]:
    """Return all properties that a copy must preserve."""
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            status = path.lstat()
            what: Any = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            mode = 0 if path.is_symlink() else stat.S_IMODE(status.st_mode)
            found[str(path.relative_to(root))] = (what, mode, status.st_mtime_ns)
    return found


def let_go(root: Path) -> None:
    """Let trial take away what nobody may write to."""
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o700)


def yes(offer: Offer) -> None:
    """Take it."""
    return


class ParcelCase(TestCase):
    """Test case with two directories and a connection."""

    def setUp(self) -> None:
        self.here, self.there = Path(self.mktemp()), Path(self.mktemp())
        self.here.mkdir()
        self.there.mkdir()
        self.addCleanup(self.writable)

    def writable(self) -> None:
        for root in (self.here, self.there):
            let_go(root)

    async def carry(self, sender: Protocol, receiver: Protocol) -> None:
        """Connect the two."""
        listening = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(
            Factory.forProtocol(lambda: receiver)
        )
        self.addCleanup(listening.stopListening)
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", listening.getHost().port), sender)

    async def send(self, sender: ParcelSender, asked: Any = yes, **options: Any) -> tuple[SentParcel, ReceivedParcel]:
        overwrite = options.pop("overwrite", False)
        receiver = ParcelReceiver(Destination(self.there, overwrite=overwrite), asked, **options)
        await self.carry(sender, receiver)
        taken = await receiver.done
        return await sender.done, taken

    async def fails(self, sender: ParcelSender, asked: Any = yes, **options: Any) -> tuple[str, str]:
        """Return the error texts of both ends."""
        receiver = ParcelReceiver(Destination(self.there), asked, **options)
        await self.carry(sender, receiver)
        said = []
        for end in (receiver, sender):
            try:
                await end.done
            except TransferError as error:
                said.append(str(error))
            else:
                self.fail("it arrived")
        return said[0], said[1]

    def left(self) -> list[str]:
        return sorted(os.listdir(self.there))


def _killed_after(end: Any, messages: int) -> list[bool]:
    """Let the program of one end die in the place of its next write; what is given has something when it has."""
    reached: list[bool] = []
    begin = end.makeConnection

    def connected(transport: Any) -> None:
        write, left = transport.write, [messages]

        def counted(data: bytes) -> None:
            if reached:
                return
            if left[0] == 0:
                reached.append(True)
                transport.abortConnection()
                return
            left[0] -= 1
            write(data)

        transport.write = counted
        begin(transport)

    end.makeConnection = connected
    return reached


class FilesTests(ParcelCase):
    """Parcels of files and directories."""

    @asynchronous
    async def test_a_directory_tree_arrives_unchanged(self) -> None:
        tree = planted(self.here)
        sent, taken = await self.send(FilesSender(walk([tree])))
        self.assertEqual(described(self.there), described(self.here))
        self.assertEqual((sent.size, sent.files), (taken.size, taken.offer.files))
        self.assertEqual(self.left(), ["tree"])

    @asynchronous
    async def test_long_names_of_emoji_fit_into_messages(self) -> None:
        """A character beyond U+FFFF takes 12 bytes of a message, twice as many as any other."""
        tree = self.here / "tree"
        tree.mkdir()
        for number in range(50):
            (tree / f"{number}").symlink_to("\N{GRINNING FACE}" * 1020)
        await self.send(FilesSender(walk([tree])))
        self.assertEqual(described(self.there), described(self.here))

    @asynchronous
    async def test_more_files_than_an_offer_can_name_are_not_sent(self) -> None:
        paths = [self.here / f"{number}" for number in range(THINGS_LIMIT + 1)]
        long = [self.here / f"{number:03}{'n' * 250}" for number in range(900)]
        for path in paths + long:
            path.touch()
        await self.send(FilesSender(walk(paths[:-1])))
        self.assertEqual(len(self.left()), THINGS_LIMIT)
        for too_many, reason in ((paths, "1,001 files and directories are more than 1,000"), (long, "names of 900")):
            self.assertIn(reason, str(self.assertRaises(TransferError, walk, too_many)))

    @asynchronous
    async def test_a_deep_tree_is_opened_relative_to_its_parents(self) -> None:
        """A directory is opened where the one before it was, not from the top each time."""
        deep = self.here.joinpath("tree", *(["d"] * 60))
        deep.mkdir(parents=True)
        for number in range(100):
            (deep / f"{number:03}").mkdir()
        opened = [0]
        opens = os.open

        def counted(*arguments: Any, **options: Any) -> int:
            opened[0] += 1
            return opens(*arguments, **options)

        self.patch(os, "open", counted)
        await self.send(FilesSender(walk([self.here / "tree"])))
        self.assertEqual(described(self.there), described(self.here))
        self.assertLess(opened[0], 20 * 161)

    @asynchronous
    async def test_many_small_files_are_sent_in_steps(self) -> None:
        """Empty files are steps of their own, too. Other work gets its turn between two steps."""
        tree = self.here / "tree"
        tree.mkdir()
        for number in range(200):
            (tree / f"{number:03}").write_bytes(b"")
        sender = FilesSender(walk([tree]))
        sender.makeConnection(StringTransport())
        sender._pieces = True
        steps = len(list(sender._send_rest()))
        self.assertGreaterEqual(steps, 200)

    @asynchronous
    async def test_several_files_and_directories_arrive(self) -> None:
        tree = planted(self.here)
        (self.here / "a.txt").write_bytes(b"a" * 70_000)
        (self.here / "leads.txt").symlink_to("a.txt")
        offers: list[Offer] = []
        walked = walk([self.here / "a.txt", tree, self.here / "leads.txt"])
        await self.send(FilesSender(walked), offers.append)
        self.assertEqual([(name, kind, files) for name, kind, _, files, _ in offers[0].things][0], ("a.txt", FILE, 1))
        self.assertEqual((self.there / "leads.txt").read_bytes(), b"a" * 70_000)
        self.assertFalse((self.there / "leads.txt").is_symlink())
        self.assertEqual(described(self.there / "tree"), described(tree))

    @asynchronous
    async def test_empty_files_and_directories_arrive(self) -> None:
        (self.here / "empty").write_bytes(b"")
        (self.here / "hollow").mkdir()
        await self.send(FilesSender(walk([self.here / "empty", self.here / "hollow"])))
        self.assertEqual(self.left(), ["empty", "hollow"])

    @asynchronous
    async def test_a_refused_parcel_is_not_sent(self) -> None:
        planted(self.here)
        said = await self.fails(FilesSender(walk([self.here / "tree"])), lambda offer: "no, thank you")
        self.assertEqual(said, ("no, thank you", "the other side refused: no, thank you"))
        self.assertEqual(self.left(), [])

    @asynchronous
    async def test_the_sender_waits_while_a_person_is_asked(self) -> None:
        (self.here / "a").write_bytes(b"a" * 3_000_000)
        await self.send(FilesSender(walk([self.here / "a"])), lambda offer: deferLater(reactor, 0.1, lambda: None))
        self.assertEqual((self.there / "a").stat().st_size, 3_000_000)

    @asynchronous
    async def test_existing_files_are_not_replaced(self) -> None:
        (self.here / "a").write_bytes(b"new")
        (self.there / "a").write_bytes(b"old")
        said = await self.fails(FilesSender(walk([self.here / "a"])))
        self.assertEqual(said[0], "a exists already")
        self.assertIn("a exists already", said[1])
        await self.send(FilesSender(walk([self.here / "a"])), overwrite=True)
        self.assertEqual((self.there / "a").read_bytes(), b"new")

    @asynchronous
    async def test_a_file_created_meanwhile_is_not_replaced(self) -> None:
        (self.here / "a").write_bytes(b"new")

        def asked(offer: Offer) -> None:
            (self.there / "a").write_bytes(b"old")

        said = await self.fails(FilesSender(walk([self.here / "a"])), asked)
        self.assertEqual(said[0], "a exists already")
        self.assertEqual((self.there / "a").read_bytes(), b"old")

    @asynchronous
    async def test_a_full_disk_fails_both_sides(self) -> None:
        (self.here / "a").write_bytes(bytes(1000))
        self.patch(Destination, "free", lambda self: 999)
        said = await self.fails(FilesSender(walk([self.here / "a"])))
        self.assertRegex(said[0], r"^a: there is not enough room on the disk: [\d.]+ k?B are needed, 999 B are free, ")
        (self.here / "b").write_bytes(b"")
        said = await self.fails(FilesSender(walk([self.here / "a", self.here / "b"])))
        self.assertRegex(said[0], "^a and 1 more: there is not enough room on the disk: ")

    @asynchronous
    async def test_the_error_of_a_file_in_a_directory_has_its_path(self) -> None:
        """A directory may have many files of one name."""
        (self.here / "tree" / "sub").mkdir(parents=True)
        (self.here / "tree" / "sub" / "a").write_bytes(bytes(1000))

        def fail(place: Destination, item: Item, offset: int) -> FileIO:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a")

        self.patch(Destination, "write_from", fail)
        said = await self.fails(FilesSender(walk([self.here / "tree"])))
        self.assertEqual(said[0], "tree/sub/a: No space left on device")

    @asynchronous
    async def test_a_file_system_without_free_space_figures_is_not_full(self) -> None:
        """Many file systems in user space report no figures; such a file system does not count as full."""
        (self.here / "a").write_bytes(bytes(1000))
        self.patch(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
        self.assertIsNone(Destination(self.there).free())
        await self.send(FilesSender(walk([self.here / "a"])))
        self.assertEqual(self.left(), ["a"])

    @asynchronous
    async def test_a_file_that_shrinks_fails_both_sides(self) -> None:
        file = self.here / "a"
        file.write_bytes(bytes(2_000_000))
        sender = FilesSender(walk([file]), on_accepted=lambda: os.truncate(file, 100))
        said = await self.fails(sender)
        for text in said:
            self.assertEqual(text, "a changed after it was offered: it has 100 bytes now, and had 2,000,000")


class ResumeTests(ParcelCase):
    """An interrupted transfer is resumed where it stopped."""

    async def cut(self, sender: ParcelSender, after: int) -> None:
        """Close the connection when the receiver has ``size`` bytes."""
        receiver: Any = None

        def progress(done: int) -> None:
            if done >= after:
                receiver.transport.abortConnection()

        receiver = ParcelReceiver(Destination(self.there), yes, progress=progress)
        await self.carry(sender, receiver)
        for end in (receiver, sender):
            try:
                await end.done
            except TransferError:
                continue
            self.fail("it was not cut")

    @asynchronous
    async def test_an_interrupted_file_resumes_at_its_offset(self) -> None:
        data = random.Random(2).randbytes(3_000_000)
        (self.here / "a").write_bytes(data)
        await self.cut(FilesSender(walk([self.here / "a"])), 1_000_000)
        self.assertEqual(self.left(), [part_name("a")])
        sent, _ = await self.send(FilesSender(walk([self.here / "a"])))
        self.assertLess(sent.size, 2_100_000)
        self.assertEqual((self.there / "a").read_bytes(), data)
        self.assertEqual(self.left(), ["a"])

    @asynchronous
    async def test_either_side_is_killed_at_each_message(self) -> None:
        """Sent once more all is there, and nothing else; what was complete already is not taken twice."""
        tree = self.here / "tree"
        (tree / "below").mkdir(parents=True)
        for name, data in (("a", b"a" * 300_000), ("below/b", b"b" * 70_000), ("empty", b"")):
            (tree / name).write_bytes(data)
        (tree / "link").symlink_to("a")
        for killed in ("sender", "receiver"):
            for messages in itertools.count():
                sender, receiver = FilesSender(walk([tree])), ParcelReceiver(Destination(self.there), yes)
                end = sender if killed == "sender" else receiver
                reached = _killed_after(end, messages)
                await self.carry(sender, receiver)
                ended: list[Deferred[Any]] = [sender.done, receiver.done]
                await DeferredList(ended, consumeErrors=True)
                if not reached:
                    break
                if (self.there / "tree").exists():
                    said = await self.fails(FilesSender(walk([tree])))
                    self.assertIn("tree exists already", said[0])
                else:
                    await self.send(FilesSender(walk([tree])))
                self.assertEqual(described(self.there), described(self.here), (killed, messages))
                shutil.rmtree(self.there / "tree")
            self.assertGreaterEqual(messages, 3, killed)
            shutil.rmtree(self.there / "tree")

    @asynchronous
    async def test_a_resumed_file_needs_room_only_for_its_missing_part(self) -> None:
        """The first part is here: the whole has not to find room beside it."""
        (self.here / "a").write_bytes(random.Random(2).randbytes(3_000_000))
        await self.cut(FilesSender(walk([self.here / "a"])), 1_000_000)
        part = (self.there / part_name("a")).stat().st_size
        free = [3_000_000 - part - 1]
        self.patch(Destination, "free", lambda self: free[0])
        said = await self.fails(FilesSender(walk([self.here / "a"])))
        needed = re.escape(human_size(3_000_000 - part))
        self.assertRegex(said[0], rf"^a: there is not enough room on the disk: {needed} are needed.* 1 B are missing$")
        free[0] += 1
        await self.send(FilesSender(walk([self.here / "a"])))
        self.assertEqual(self.left(), ["a"])

    @asynchronous
    async def test_an_interrupted_tree_resumes_at_its_offsets(self) -> None:
        tree = planted(self.here)
        whole = walk([tree]).checked.size
        sent = None
        for after in (1, 301_000, 650_000, 1_200_000):
            await self.cut(FilesSender(walk([tree])), after)
        sent, _ = await self.send(FilesSender(walk([tree])))
        self.assertEqual(described(self.there), described(self.here))
        self.assertLess(sent.size, whole - 1_000_000)

    @asynchronous
    async def test_another_file_with_the_same_name_is_not_resumed(self) -> None:
        (self.here / "a").write_bytes(b"a" * 2_000_000)
        await self.cut(FilesSender(walk([self.here / "a"])), 1_000_000)
        (self.here / "a").write_bytes(b"b" * 1_500_000)
        sent, _ = await self.send(FilesSender(walk([self.here / "a"])))
        self.assertEqual(sent.size, 1_500_000)
        self.assertEqual((self.there / "a").read_bytes(), b"b" * 1_500_000)

    @asynchronous
    async def test_the_beginning_of_an_unfinished_file_cannot_be_guessed(self) -> None:
        """A sender that offers shorter files gets no hashes of the beginnings of what another sender has left."""
        part = self.there / part_name("a")
        part.write_bytes(b"the words of another sender")
        for size in (1, 2, 26, 27, 28):
            receiver, said = ParcelReceiver(Destination(self.there), yes), StringTransport()
            answered: Deferred[None] = Deferred()

            def write(data: bytes, said: StringTransport = said, answered: Deferred[None] = answered) -> None:
                said.io.write(data)
                if b"whole" in data:
                    answered.callback(None)

            said.write = write  # type: ignore[method-assign]
            receiver.makeConnection(said)
            thing = {"name": "a", "kind": "f", "size": size, "files": 1, "directories": 0}
            receiver.dataReceived(encode(offer="files", things=[thing], size=size, files=1))
            receiver.dataReceived(encode(entries=[["a", "f", size, 0o644, 1]]) + encode(whole=True))
            await answered
            self.assertEqual(b'"have"' in said.value(), size >= 27, size)
            receiver.connectionLost()
            with self.assertRaises(TransferError):
                await receiver.done
            self.assertEqual(part.read_bytes(), b"the words of another sender")

    @asynchronous
    async def test_another_tree_with_the_same_name_is_not_resumed(self) -> None:
        """Entries of the first tree alone do not appear in the second; a directory may have become a file."""
        first = planted(self.here)
        await self.cut(FilesSender(walk([first])), 900_000)
        self.writable()
        os.rename(first, self.here / "first")
        second = self.here / "tree"
        second.mkdir()
        (second / "plain").write_bytes(b"a file now")
        (second / "with blank").symlink_to("plain")
        (second / "own").mkdir()
        await self.send(FilesSender(walk([second])))
        self.assertEqual(described(self.there / "tree"), described(second))

    @asynchronous
    async def test_links_in_a_part_are_not_followed(self) -> None:
        """The owner of the link does not matter."""
        outside = Path(self.mktemp())
        outside.mkdir()
        (outside / "plain").mkdir()
        tree = planted(self.here)
        (self.there / part_name("tree")).symlink_to(outside.resolve())
        await self.send(FilesSender(walk([tree])))
        self.assertEqual(os.listdir(outside / "plain"), [])
        self.assertEqual(described(self.there), described(self.here))

    @asynchronous
    async def test_a_hard_link_in_the_place_of_a_partial_file_is_refused(self) -> None:
        outside = Path(self.mktemp())
        outside.write_bytes(b"precious")
        os.link(outside, self.there / part_name("a"))
        (self.here / "a").write_bytes(b"new and longer")
        await self.send(FilesSender(walk([self.here / "a"])))
        self.assertEqual(outside.read_bytes(), b"precious")


class PeerTests(TestCase):
    """A receiver who wants more than he was offered, or says what cannot be."""

    def sender(self, *files: int) -> tuple[FilesSender, Any, list[Any]]:
        """Return a sender of files of these sizes, whose offer was accepted or is still open."""
        root = Path(self.mktemp())
        root.mkdir()
        for number, size in enumerate(files):
            (root / str(number)).write_bytes(bytes(size))
        sender = FilesSender(walk([root / str(number) for number in range(len(files))]))
        transport: Any = StringTransport()
        transport.abortConnection = transport.loseConnection
        sender.makeConnection(transport)
        results: list[Any] = []
        sender.done.addBoth(results.append)
        return sender, transport, results

    async def until(self, transport: Any, text: bytes) -> None:
        while text not in transport.value():
            await deferLater(reactor, 0.01)

    @asynchronous
    async def test_an_answer_before_the_offer_reads_no_file(self) -> None:
        """Such an answer cannot refer to the offer, so the sender reads no file for it."""
        for message in ({"whole": True}, {"have": [[0, 1, "0" * 64]]}, {"ok": True}):
            sender, transport, results = self.sender(1000)
            sender.dataReceived(encode(take=True) + encode(**message))
            self.assertIn("does not use", str(results[0].value))
            sender.connectionLost(Failure(ConnectionDone()))
            self.assertNotIn(bytes(100), transport.value())

    @asynchronous
    async def test_offsets_beyond_the_file_are_refused(self) -> None:
        for have in ([1, 1, "0" * 64], [0, 1001, "0" * 64], [0, 1, "x" * 65], [0, 1, "\U0001f600" * 64], [0, 1, None]):
            sender, transport, results = self.sender(1000)
            sender.dataReceived(encode(take=True))
            await self.until(transport, b'"whole":true')
            sender.dataReceived(encode(have=[have]))
            self.assertIn("does not use", str(results[0].value))

    @asynchronous
    async def test_a_receipt_before_the_data_is_refused(self) -> None:
        """The receiver cannot have received data that were not sent."""
        sender, transport, results = self.sender(20_000_000)
        sender.dataReceived(encode(take=True))
        await self.until(transport, b'"whole":true')
        sender.dataReceived(encode(whole=True) + encode(ok=True))
        self.assertIn("does not use", str(results[0].value))

    @asynchronous
    async def test_a_link_in_place_of_a_file(self) -> None:
        """The tree changes while the parcel waits to be sent."""
        sender, transport, results = self.sender(1000)
        source = next(iter(sender._offered._walked.tops.values()))
        source.unlink()
        source.symlink_to("/etc/passwd")
        sender.dataReceived(encode(take=True))
        await self.until(transport, b'"whole":true')
        sender.dataReceived(encode(whole=True))
        while not results:
            await deferLater(reactor, 0.01)
        results[0].trap(TransferError)
        self.assertNotIn(b"root:", transport.value())


class OtherTests(ParcelCase):
    """Parcels of texts and pipes."""

    @asynchronous
    async def test_a_text_arrives(self) -> None:
        offers: list[Offer] = []
        await self.send(TextSender("words\nü"), offers.append)
        self.assertEqual((offers[0].kind, offers[0].text), ("text", "words\nü"))
        said = await self.fails(TextSender("words"), lambda offer: "no")
        self.assertEqual(said, ("no", "the other side refused: no"))

    @asynchronous
    async def test_a_text_must_fit_into_a_message(self) -> None:
        """A character beyond U+FFFF takes 12 bytes of a message, so fewer of them fit than ASCII characters."""
        for text in ("a" * TEXT_LIMIT, "\N{GRINNING FACE}" * 21_800):
            offers: list[Offer] = []
            await self.send(TextSender(text), offers.append)
            self.assertEqual(offers[0].text, text)
        for text in ("a" * (TEXT_LIMIT + 1), "\N{GRINNING FACE}" * TEXT_LIMIT):
            error = self.assertRaises(TransferError, TextSender, text)
            self.assertIn("put it into a file", str(error))

    @asynchronous
    async def test_a_pipe_arrives(self) -> None:
        data = random.Random(3).randbytes(1_000_000)
        got: list[bytes] = []

        def source(pipe: PipeSender) -> None:
            pipe.write(data)
            pipe.end()

        sent, taken = await self.send(PipeSender("stdin", source), pipe=got.append)
        self.assertEqual(b"".join(got), data)
        self.assertEqual((sent.size, taken.size, taken.offer.text), (1_000_000, 1_000_000, "stdin"))

    @asynchronous
    async def test_a_pipe_has_arrived_once_its_output_is_written(self) -> None:
        """Until then, the sender is not told that the pipe arrived, and a failure still reaches it."""

        def source(pipe: PipeSender) -> None:
            pipe.write(b"data")
            pipe.end()

        for fails in (False, True):
            written: Deferred[None] = Deferred()
            ended: Deferred[None] = Deferred()

            def end_pipe(written: Deferred[None] = written, ended: Deferred[None] = ended) -> Deferred[None]:
                ended.callback(None)
                return written

            sender, receiver = (
                PipeSender("stdin", source),
                ParcelReceiver(Destination(self.there), yes, pipe=lambda data: None, end_pipe=end_pipe),
            )
            await self.carry(sender, receiver)
            await ended
            self.assertNoResult(receiver.done)
            self.assertNoResult(sender.done)
            if fails:
                receiver.refuse("the disk is full")
                receiver.done.errback(Failure(TransferError("here")))
                error = await self.assertFailure(sender.done, TransferError)
                self.assertEqual(str(error), "the other side gave up: the disk is full")
                self.failureResultOf(receiver.done, TransferError)
            written.callback(None)
            if not fails:
                self.assertEqual(((await sender.done).size, (await receiver.done).size), (4, 4))

    @asynchronous
    async def test_a_pipe_of_more_than_is_wanted(self) -> None:
        got: list[bytes] = []

        def source(pipe: PipeSender) -> None:
            pipe.write(bytes(1_000_000))

        said = await self.fails(PipeSender("stdin", source), pipe=got.append, limit=600_000)
        self.assertIn("more than 600000 bytes", said[0])
        self.assertLessEqual(sum(map(len, got)), 600_000)

    @asynchronous
    async def test_a_refused_text_or_pipe_fails(self) -> None:
        sender = PipeSender("stdin", lambda pipe: self.fail("it was read"))
        self.assertEqual((await self.fails(sender, lambda offer: "no"))[0], "no")
        self.failureResultOf(self.again(sender), TransferRefused)

    def again(self, sender: ParcelSender) -> Deferred[Any]:
        result: Deferred[Any] = Deferred()
        sender.done.addErrback(lambda _: None)
        result.errback(Failure(TransferRefused("you declined the offer")))
        return result


class Liar:
    """The end of a receiver that a test speaks to."""

    def __init__(self, directory: Path, asked: Any = yes) -> None:
        self.receiver = ParcelReceiver(Destination(directory), asked)
        self.transport: Any = StringTransport()
        self.failed: list[Failure] = []
        self.receiver.done.addErrback(self.failed.append)
        self.receiver.makeConnection(self.transport)

    def say(self, **message: Any) -> None:
        self.receiver.dataReceived(encode(**message))

    def offer(self, *things: tuple[str, str, int, int]) -> None:
        names = ("name", "kind", "size", "files")
        named = [
            {**dict(zip(names, thing, strict=True)), "directories": int(thing[1] == DIRECTORY)} for thing in things
        ]
        self.say(offer="files", things=named, size=sum(one[2] for one in things), files=sum(one[3] for one in things))

    @property
    def why(self) -> str:
        return str(self.failed[0].value) if self.failed else ""


class LiarTests(TestCase):
    """A sender who wants more than he was given."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        self.there = self.root / "inbox"
        self.there.mkdir()

    def test_names_outside_the_directory_are_refused(self) -> None:
        for name in ("", ".", "..", "a/b", "/etc", "../x", "a\0b", "x" * 256, "a.dmsg-part", 7, None):
            liar = Liar(self.there)
            liar.say(
                offer="files",
                things=[{"name": name, "kind": FILE, "size": 1, "files": 1, "directories": 0}],
                size=1,
                files=1,
            )
            self.assertIn("malformed", liar.why, repr(name))
        self.assertEqual(os.listdir(self.there), [])

    def test_malformed_offers_are_refused(self) -> None:
        for message in (
            {},
            {"offer": "files", "things": [], "size": 0, "files": 0},
            {
                "offer": "files",
                "things": [{"name": "a", "kind": FILE, "size": 5, "files": 1, "directories": 0}],
                "size": 1,
                "files": 1,
            },
            {
                "offer": "files",
                "things": [{"name": "a", "kind": LINK, "size": 0, "files": 1, "directories": 0}],
                "size": 0,
                "files": 1,
            },
            {
                "offer": "files",
                "things": [{"name": "a", "kind": FILE, "size": -1, "files": 1, "directories": 0}],
                "size": -1,
                "files": 1,
            },
            {
                "offer": "files",
                "things": [{"name": "a", "kind": FILE, "size": True, "files": 1, "directories": 0}],
                "size": 1,
                "files": 1,
            },
            {
                "offer": "files",
                "things": [{"name": "a", "kind": FILE, "size": 1, "files": 1, "directories": 0}] * 2,
                "size": 2,
                "files": 2,
            },
            {"offer": "text", "text": "x" * 40_000},
            {"offer": "pipe", "name": ""},
            {"offer": "house"},
        ):
            liar = Liar(self.there)
            liar.say(**message)
            self.assertIn("malformed", liar.why, message)

    def test_entries_outside_the_directory_are_refused(self) -> None:
        for path in ("../x", "tree/../x", "tree//x", "/tree/x", "tree/./x", "tree/\0", "other", "tree/a/b", "tree"):
            checked = CheckedItems()
            checked.add(Item("tree", DIRECTORY))
            try:
                checked.add(decode_item([path, FILE, 0, 0, 0]))
            except TransferError:
                continue
            self.assertEqual(path, "other")  # This path was not offered.

    def test_links_outside_the_directory_are_refused(self) -> None:
        for path, target, inside in (
            ("tree/l", "file", True),
            ("tree/l", "a/b/c", True),
            ("tree/a/l", "../file", True),
            ("tree/l", "../file", False),
            ("tree/l", "/etc/passwd", False),
            ("tree/a/l", "../../x", False),
            ("tree/a/l", "b/../../x", False),
            ("tree/a/b/l", "../..", True),
            ("tree/a/l", "./../x", True),
            ("tree/l", "", False),
            ("tree/l", "a\0", False),
            ("l", "x", False),
        ):
            self.assertEqual(stays_inside(path, target), inside, (path, target))

    @given(
        st.lists(
            st.tuples(
                st.sampled_from("abc"), st.lists(st.sampled_from(["..", ".", "a", "b", "c"]), min_size=1, max_size=5)
            )
        )
    )
    def test_no_set_of_links_leads_out(self, links: list[tuple[str, list[str]]]) -> None:
        """Neither a single link nor several links together lead out of the directory."""
        root = Path(self.mktemp())
        (root / "tree" / "d" / "d").mkdir(parents=True)
        made = []
        for name, parts in links:
            for at in ("tree", "tree/d", "tree/d/d"):
                path, target = f"{at}/{name}", "/".join(parts)
                if stays_inside(path, target) and not os.path.lexists(root / path):
                    (root / path).symlink_to(target)
                    made.append(path)
        inside = (root / "tree").resolve()
        for path in made:
            try:
                found = (root / path).resolve()
            except (OSError, RuntimeError):  # The links form a circle.
                continue
            self.assertTrue(found.is_relative_to(inside), (made, path))

    async def lied(self, *entries: Any, offered: Any = (("tree", DIRECTORY, 0, 0),), asked: Any = yes) -> Liar:
        liar = Liar(self.there, asked)
        liar.offer(*offered)
        if entries:
            liar.say(entries=[*entries])
        liar.say(whole=True)
        for _ in range(100):  # Work that exceeds its slice of a turn continues in the next turn.
            if liar.failed:
                break
            await deferLater(reactor, 0)
        return liar

    @asynchronous
    async def test_entries_that_were_not_offered_are_refused(self) -> None:
        for entries, offered in (
            ([["tree", DIRECTORY, 0, 0, 0], ["other", FILE, 0, 0, 0]], (("tree", DIRECTORY, 0, 0),)),
            ([["tree", FILE, 0, 0, 0]], (("tree", DIRECTORY, 0, 0),)),
            ([["a", FILE, 2, 0, 0]], (("a", FILE, 1, 1),)),
            ([], (("a", FILE, 1, 1),)),
        ):
            liar = await self.lied(*entries, offered=offered)
            self.assertIn("differs from the offer", liar.why)
        self.assertEqual(os.listdir(self.there), [])

    @asynchronous
    async def test_malformed_entries_are_refused(self) -> None:
        for entry in (
            None,
            [],
            ["tree/a", FILE, 0, 0],
            ["tree/a", FILE, 0, 0o4755, 0],
            ["tree/a", FILE, -1, 0, 0],
            ["tree/a", "x", 0, 0, 0],
            ["tree/a", DIRECTORY, 5, 0, 0],
            ["tree/a", FILE, 0, 0, 2**63],
            ["tree/a", FILE, 1.0, 0, 0],
            ["tree/a", LINK, 0, 0, 0],
            ["tree/a", LINK, 0, 0, 0, "../../etc"],
            ["tree/a", LINK, 0, 0, 0, "\ud800"],
            ["tree/\ud800", FILE, 0, 0, 0],
            ["/".join(["tree"] * 201), DIRECTORY, 0, 0, 0],
            ["tree/a", FILE, 0, 0, 0, "x"],
            ["tree", DIRECTORY, 0, 0, 0],
        ):
            liar = await self.lied(["tree", DIRECTORY, 0, 0, 0], entry)
            self.assertTrue(liar.why, entry)

    def test_too_many_entries_are_refused(self) -> None:
        self.patch(manifest, "ENTRIES_LIMIT", 3)
        checked = CheckedItems()
        for name in "abc":
            checked.add(Item(name, FILE))
        self.assertRaises(TransferError, checked.add, Item("d", FILE))
        self.patch(manifest, "NAMES_LIMIT", 10)
        checked = CheckedItems()
        checked.add(Item("a" * 6, FILE))
        self.assertRaises(TransferError, checked.add, Item("b" * 6, FILE))

    def test_an_endless_message_is_refused(self) -> None:
        liar = Liar(self.there)
        liar.receiver.dataReceived((MESSAGE_LIMIT + 1).to_bytes(4, "big"))
        self.assertIn("does not use", liar.why)

    @given(st.binary(max_size=200))
    def test_random_messages_raise_only_transfer_errors(self, data: bytes) -> None:
        liar = Liar(self.there)
        liar.receiver.dataReceived(data)
        liar.receiver.dataReceived(len(data).to_bytes(4, "big") + data)
        self.assertEqual(os.listdir(self.there), [])

    def test_data_sent_while_the_user_is_asked_ends_the_transfer(self) -> None:
        asked: Deferred[None] = Deferred()
        liar = Liar(self.there, lambda offer: asked)
        liar.offer(("a", FILE, 5, 1))
        for _ in range(20):
            liar.receiver.dataReceived(bytes(100_000))
        self.assertIn("not requested", liar.why)
        self.assertLess(liar.receiver._messages.held, 1_200_000)

    @asynchronous
    async def test_a_long_name_leaves_room_for_the_part_suffix(self) -> None:
        """The suffix of a part fits behind the longest name of a file."""
        liar = Liar(self.there)
        name = "n" * 255
        liar.offer((name, FILE, 0, 1))
        liar.say(entries=[[name, FILE, 0, 0o644, 0]])
        liar.say(whole=True)
        while b'"whole":true' not in liar.transport.value():
            await deferLater(reactor, 0.01)
        liar.say(whole=True)
        liar.receiver.dataReceived(hashlib.sha256().digest())
        while b'"ok":true' not in liar.transport.value():
            await deferLater(reactor, 0.01)
        self.assertEqual(os.listdir(self.there), [name])

    @asynchronous
    async def test_a_sender_that_resumes_unasked_is_refused(self) -> None:
        """The receiver has no partial file, so there is nothing to resume."""
        liar = Liar(self.there)
        liar.offer(("a", FILE, 5, 1))
        liar.say(entries=[["a", FILE, 5, 0o644, 0]])
        liar.say(whole=True)
        while b'"whole":true' not in liar.transport.value():
            await deferLater(reactor, 0.01)
        liar.say(**{"from": [[0, 3]]})
        self.assertIn("does not use", liar.why)

    @asynchronous
    async def test_a_wrong_hash_is_refused(self) -> None:
        liar = Liar(self.there)
        liar.offer(("a", FILE, 5, 1))
        liar.say(entries=[["a", FILE, 5, 0o644, 0]])
        liar.say(whole=True)
        while b'"whole":true' not in liar.transport.value():
            await deferLater(reactor, 0.01)
        liar.say(whole=True)
        liar.receiver.dataReceived(b"12345" + bytes(32))
        while not liar.why:
            await deferLater(reactor, 0.01)
        self.assertIn("SHA-256 of a differs", liar.why)
        self.assertEqual(os.listdir(self.there), [], "there is nothing to go on with")


class NameTests(SynchronousTestCase):
    """A limit of bytes counts bytes, be they UTF-8 or not."""

    def test_names_of_the_maximum_length_are_accepted(self) -> None:
        for name in (b"\xff" * 255, "ü".encode() * 127):
            self.assertEqual(parts_of(os.fsdecode(name)), [os.fsdecode(name)])
            self.assertRaises(TransferError, parts_of, os.fsdecode(name + b"\xff\xff"))


class WalkTests(SynchronousTestCase):
    """Files and directories that a sender finds."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()

    def test_special_files_are_left_out_and_named(self) -> None:
        tree = self.root / "tree"
        tree.mkdir()
        os.mkfifo(tree / "fifo")
        (tree / "out").symlink_to("/etc/passwd")
        (tree / "up").symlink_to("../tree")
        (tree / "in").symlink_to("fifo")
        walked = walk([tree])
        self.assertEqual(walked.left_out, ["tree/fifo", "tree/out", "tree/up"])
        self.assertEqual([one.path for one in walked.checked.entries], ["tree", "tree/in"])

    def test_the_current_directory_has_its_real_name(self) -> None:
        """``.`` is called as its directory is."""
        tree = self.root.resolve() / "tree"
        tree.mkdir()
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(tree)
        for text in (".", "../tree", "../tree/", "x/.."):
            if text == "x/..":
                (tree / "x").mkdir()
            self.assertEqual(walk([Path(text)]).checked.entries[0].path, "tree", text)

    def test_missing_paths_raise_clear_errors(self) -> None:
        (self.root / "a").write_bytes(b"")
        (self.root / "d").mkdir()
        (self.root / "d" / "a").write_bytes(b"")
        os.mkfifo(self.root / "fifo")
        error = self.assertRaises(TransferError, walk, [self.root / "a", self.root / "d" / "a"])
        self.assertIn("two of the given files are called a", str(error))
        error = self.assertRaises(TransferError, walk, [self.root / "fifo"])
        self.assertIn("neither a file nor a directory", str(error))
        for paths in ([self.root / "no"], [self.root / "a", self.root / "a"], [Path("/")], [Path("/dev/null")]):
            error = self.assertRaises(TransferError, walk, paths)
            self.assertLess(len(str(error)), 200)
