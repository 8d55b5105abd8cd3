"""Copies to and from a listener, and what programs of dmsg 0.1 say and are told; both sides over TCP."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.apps.copies import CopyBusy, Get, Put
from dmsg.apps.copy_listener import CopyPeer
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.receiver import ParcelReceiver, ReceivedParcel
from dmsg.apps.parcels.sender import FilesSender, OldFileSender, TextSender
from dmsg.apps.parcels.walk import walk
from dmsg.apps.partial_files import part_of
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.cli.files.send_by_code import OLD_RECEIVERS
from tests.apps.test_sources import SIZE, ChangeCase
from tests.support import asynchronous


def message(text: str) -> bytes:
    """A message of 0.1."""
    return len(text).to_bytes(4, "big") + text.encode()


class Recorded(Protocol):
    """Program that says what it is told to say, and keeps what it hears.

    :param script: what it says: when it is connected, and each time that so many more bytes have come; None ends the
        connection.
    """

    def __init__(self, *script: tuple[int, bytes | None]) -> None:
        self.script = list(script)
        self.heard = b""
        self.at = 0
        self.done: Deferred[bytes] = Deferred()

    def connectionMade(self) -> None:
        self.dataReceived(b"")

    def dataReceived(self, data: bytes) -> None:
        self.heard += data
        while self.script and len(self.heard) - self.at >= self.script[0][0]:
            wanted, said = self.script.pop(0)
            self.at += wanted
            if said is None:
                self.transport.loseConnection()  # type: ignore[union-attr]
            else:
                self.transport.write(said)  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.done.callback(self.heard)


class ListenerTests(ChangeCase):
    """Files that are present at the receiver, and requests of peers that are refused."""

    def peer(self, root: Path, **options: Any) -> CopyPeer:
        return CopyPeer(reactor, root, **options)

    async def put(self, target: str, **options: Any) -> list[Any]:
        return await self.carry(Put(self.file, target), self.peer(self.there, writable=True, **options))

    @asynchronous
    async def test_names_and_directories_that_are_made(self) -> None:
        for target in ("other", "new/below/film", "new//film2"):
            ends = await self.put(target)
            self.assertEqual([one.sha256 for one in ends], [hashlib.sha256(bytes(SIZE)).hexdigest()] * 2)
            self.assertEqual((self.there / target).read_bytes(), self.file.read_bytes())
        for target in ("/film", "../film", "new/../../film", "a/.b/film", ".film"):
            for end in await self.put(target):
                self.assertIsInstance(end, TransferError, target)
        self.assertEqual(sorted(os.listdir(self.there)), ["new", "other"])

    @asynchronous
    async def test_an_identical_file_counts_as_received(self) -> None:
        """The file is left unchanged; a file with other content stays, too."""
        there = self.there / "film"
        there.write_bytes(self.file.read_bytes())
        there.chmod(0o400)
        before = _attributes(there)
        self.assertEqual([one.size for one in await self.put("film")], [0, 0])
        self.assertEqual(_attributes(there), before)
        for content in (b"", b"another", bytes(SIZE - 1) + b"1"):
            there.chmod(0o600)
            there.write_bytes(content)
            for end in await self.put("film"):
                self.assertIn("film exists already", str(end))
            self.assertEqual((there.read_bytes(), os.listdir(self.there)), (content, ["film"]))
        self.file.write_bytes(b"")
        there.write_bytes(b"")
        self.assertEqual([one.size for one in await self.put("film")], [0, 0])

    @asynchronous
    async def test_a_replaced_file_keeps_its_mode(self) -> None:
        """A directory or device, or a file that may not be written, is not replaced."""
        there = self.there / "film"
        there.write_bytes(b"old")
        there.chmod(0o640)
        await self.put("film", overwrite=True)
        self.assertEqual((there.read_bytes(), there.stat().st_mode & 0o777), (self.file.read_bytes(), 0o640))
        there.unlink()
        os.mkfifo(there)
        for end in await self.put("film", overwrite=True):
            self.assertIn("film: not a regular file", str(end))

    @asynchronous
    async def test_refused_copies_leave_no_files(self) -> None:
        for end in await self.put("new/film", max_size=5):
            self.assertIn("the limit is 5", str(end))
        sender, _ = await self.carry(Put(self.file, "film"), self.peer(self.there))
        self.assertIsInstance(sender, TransferRefused)
        self.assertIn("this peer accepts no files", str(sender))
        self.assertEqual(os.listdir(self.there), [])

    @asynchronous
    async def test_a_second_connection_to_one_target_is_refused(self) -> None:
        busy: dict[Path, CopyPeer] = {}
        other = self.peer(self.there, writable=True, busy=busy)
        busy[(self.there / "film").resolve()] = other
        sender, _ = await self.put("film", busy=busy)
        self.assertIsInstance(sender, CopyBusy)

    @asynchronous
    async def test_unreadable_files_are_refused_with_a_reason(self) -> None:
        os.symlink("/etc/passwd", self.here / "link")
        os.mkfifo(self.here / "pipe")
        for name, said in (
            ("nothing", "there is no file nothing"),
            ("no/thing", "there is no file thing"),
            ("tree", "tree: is a directory"),
            ("pipe", "pipe: not a regular file"),
            ("link", "the path leads outside the directory"),
            ("../x", "the path leads outside the directory"),
        ):
            got, _ = await self.carry(Get(name, self.there / "got"), self.peer(self.here))
            self.assertIsInstance(got, TransferRefused)
            self.assertEqual(str(got), f"refused by the other side: {said}")
        self.assertEqual(os.listdir(self.there), [])
        for name, directories in (("tree", True), ("film", True), ("film", False)):
            getter = Get(name, self.there / "got", directories=directories)
            got, given = await self.carry(getter, self.peer(self.here))
            self.assertNotIsInstance(got, Exception)
            await getter.closed  # The listener closes, because it knows by then that all data has arrived.
            self.assertEqual(given.size, got.size)
            self.assertEqual(got.name, "got")
            got_to = self.there / "got"
            if got_to.is_dir():
                self.assertEqual((got_to / "film").read_bytes(), self.inside.read_bytes())
                (got_to / "film").unlink()
                got_to.rmdir()

    @asynchronous
    async def test_a_directory_that_cannot_be_read(self) -> None:
        """The peer is not told where the listener's directory is."""
        os.symlink("loop", self.here / "tree" / "loop")
        (self.here / "tree" / "x").mkdir()
        self.patch(os, "listdir", _refuse)
        got, _ = await self.carry(Get("tree", self.there / "got", directories=True), self.peer(self.here))
        self.assertNotIn(str(self.here.absolute()), str(got))
        self.assertIn("tree: Permission denied", str(got))


def _attributes(path: Path) -> tuple[int, ...]:
    """Return what a write or a change of ``path`` would alter; its time of access changes when it is compared."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _refuse(_: Any) -> list[str]:
    raise PermissionError(13, "Permission denied")


class OldCopiesTests(ChangeCase):
    """``dmsg cp`` of 0.1 at one end: both ends say in a line what is to be done."""

    @asynchronous
    async def test_a_copy_program_of_0_1_gets_one_line(self) -> None:
        for asked in (
            {"op": "put", "path": "film", "size": 5, "mode": 0o644, "mtime": 0},
            {"op": "get", "path": "film", "offset": 0, "sha256": hashlib.sha256().hexdigest()},
        ):
            heard, here = await self.carry(
                Recorded((0, message(json.dumps(asked)))), CopyPeer(reactor, self.there, writable=True)
            )
            self.assertEqual(int.from_bytes(heard[:4], "big"), len(heard) - 4)
            self.assertIn("update the program that asks", json.loads(heard[4:])["error"])
            self.assertIn("update the program that asks", str(here))

    @asynchronous
    async def test_a_listener_of_0_1_is_named_in_the_error(self) -> None:
        for said, copy in (
            ("files are not fetched here", Put(self.file, "film")),
            ("files are not fetched here", Get("film", self.there / "film")),
            ("there is no directory film", Get("film", self.there / "film")),
        ):
            listener = Recorded((4, message(json.dumps({"error": said}))))
            got, _ = await self.carry(copy, listener)
            self.assertIsInstance(got, TransferRefused)
            self.assertIn("update it there", str(got))
            self.assertFalse(part_of(self.there / "film").exists())


class OldFilesTests(ChangeCase):
    """``dmsg send FILE KEY`` and ``dmsg receive`` of 0.1 at one end: a file arrives."""

    HEADER = '{"name": "film", "size": 5}'

    def receiver(self, **options: Any) -> ParcelReceiver:
        def asked(offer: Any) -> str | None:
            return "it is too much" if offer.size > 100 else None

        return ParcelReceiver(Destination(self.there, **options), asked)

    @asynchronous
    async def test_a_sender_of_0_1_is_accepted(self) -> None:
        whole = message(self.HEADER) + b"12345" + hashlib.sha256(b"12345").digest()
        for cut in (len(whole), 1, 10, len(message(self.HEADER)), len(whole) - 33):
            said = Recorded((0, whole[:cut]), (0, whole[cut:]), (len(message('{"ok":true}')), None))
            heard, taken = await self.carry(said, self.receiver(overwrite=True))
            self.assertEqual(json.loads(heard[4:]), {"ok": True})
            self.assertIsInstance(taken, ReceivedParcel)
            self.assertEqual(taken.sha256, hashlib.sha256(b"12345").hexdigest())
            self.assertEqual((self.there / "film").read_bytes(), b"12345")
            self.assertEqual(os.listdir(self.there), ["film"])

    @asynchronous
    async def test_malformed_headers_of_0_1_are_refused(self) -> None:
        for text in (
            "[]",
            "{}",
            '{"name":"x"}',
            '{"name":"x","size":-1}',
            '{"name":"x","size":true}',
            '{"name":"x","size":1e3}',
            '{"name":5,"size":1}',
            '{"name":"../x","size":1}',
            '{"name":"..","size":1}',
            '{"name":"a/b","size":1}',
            '{"name":".bash_profile","size":1}',
            '{"name":"x","size":99999999999}',
        ):
            heard, taken = await self.carry(Recorded((0, message(text))), self.receiver())
            self.assertIsInstance(taken, TransferError, text)
            self.assertIn("error", json.loads(heard[4:]), text)
            self.assertEqual(os.listdir(self.there), [], text)

    @asynchronous
    async def test_a_wrong_hash_of_a_0_1_sender_is_refused(self) -> None:
        heard, taken = await self.carry(Recorded((0, message(self.HEADER) + b"12345" + bytes(32))), self.receiver())
        self.assertIsInstance(taken, TransferError)
        self.assertIn("SHA-256", json.loads(heard[4:])["error"])
        self.assertEqual(os.listdir(self.there), [])

    @asynchronous
    async def test_random_data_instead_of_a_0_1_header_is_refused(self) -> None:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
            _, taken = await self.carry(Recorded((0, data)), self.receiver())
            self.assertIsInstance(taken, TransferError)

    @asynchronous
    async def test_a_receiver_of_0_1_is_sent_the_protocol_of_0_1(self) -> None:
        """The receiver refuses the parcel with an error text that the command recognises; the command then sends what
        0.1 sent.
        """
        self.file.write_bytes(b"12345")
        refuses = Recorded((4, message('{"error": "file name is malformed"}')))
        refused, _ = await self.carry(FilesSender(walk([self.file])), refuses)
        self.assertTrue(any(one in str(refused) for one in OLD_RECEIVERS), refused)
        whole = message(self.HEADER.replace(" ", "")) + b"12345" + hashlib.sha256(b"12345").digest()
        receiver = Recorded((len(whole), message('{"ok": true}')))
        sent, heard = await self.carry(OldFileSender(walk([self.file])), receiver)
        self.assertEqual((sent.size, sent.sha256), (5, hashlib.sha256(b"12345").hexdigest()))
        self.assertEqual(heard, whole)

    @asynchronous
    async def test_a_text_arrives_in_place_of_a_file(self) -> None:
        _, taken = await self.carry(TextSender("the door is open"), self.receiver())
        self.assertEqual(taken.offer.text, "the door is open")
