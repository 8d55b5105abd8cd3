"""Programs that write files, for power cuts: ``python -m tests.testing.writing_files NAME DIRECTORY``.

Each writes a line that begins with ``done`` once a file must survive a power cut.
"""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from dmsg.collector.store import Store
from dmsg.keys import SecKey
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.peer.files import FileUploads
from dmsg.rmb.session.seal import ReceivedMessage
from dmsg.rmb.twins.address import Session
from dmsg.telemetry.spool import Spool
from tests.collector.support import offer_of, packed, spool_name
from tests.testing.traced_files import DONE

ORIGIN = SecKey.from_seed(b"origin").public
CONTENT = b"0123456789abcdef" * 1000


def _done(text: str) -> None:
    os.write(1, DONE + text.encode() + b"\n")


def spool(directory: Path) -> None:
    """Write and seal two files of events."""
    written = Spool(directory, "events-a", lambda lines, digest: b"end\n")
    for _ in range(2):
        for number in range(20):
            written.write(b"%d %b\n" % (number, CONTENT[:200]), 1, 0.0)
        written.seal()
        _done(str(len(list(directory.glob("events-*.gz")))))


def collector(directory: Path) -> None:
    """Keep two files of one sender and one day."""
    store = Store(directory, limit=10_000_000, reserve=0)
    store.open()
    for number in (1, 2):
        data = packed()
        part = store.open_part(ORIGIN)
        part.write(data)
        kept = store.keep(ORIGIN, offer_of(spool_name(number), data), part, 1_700_000_000.0)
        _done(str(kept.relative_to(directory)))
    store.close()


def upload(directory: Path) -> None:
    """Receive two files from another peer."""
    files: Any = FileUploads(Clock(), directory, None, None, lambda: 0.0)  # type: ignore[arg-type]
    for name in ("one", "two"):
        for command, payload, tags in (
            ("negotiate", b'{"size": %d}' % len(CONTENT), ""),
            ("write", CONTENT, "offset=0"),
            ("close", b"", ""),
        ):
            envelope = Envelope(uid=name, tags=tags, signature=os.urandom(65))
            received = ReceivedMessage(envelope, "request", Session(7), payload)

            def answer(data: bytes, error: Any = None, *, close: bool = command == "close", **others: Any) -> None:
                assert error is None, error
                if close:
                    _done(name)  # noqa: B023

            Deferred.fromCoroutine(files.requested(received, command, answer))


def check_spool(left: Path, done: list[str]) -> str | None:
    """Return what is wrong with the files that a power cut left, or None."""
    sealed = sorted(left.glob("events-*.gz"))
    if len(sealed) < (int(done[-1]) if done else 0):
        return "a sealed file is lost"
    for path in sealed:
        try:
            if not gzip.decompress(path.read_bytes()).endswith(b"end\n"):
                return f"{path.name} has no end"
        except (EOFError, OSError) as error:
            return f"{path.name}: {error}"
    return None


def check_collector(left: Path, done: list[str]) -> str | None:
    """Return what is wrong with the files that a power cut left, or None."""
    found = {str(path.relative_to(left)): path.read_bytes() for path in left.glob("*/*/*.gz")}
    if set(done) - set(found):
        return f"{set(done) - set(found)} are lost"
    return next((f"{name} is not complete" for name, data in found.items() if data != packed()), None)


def check_upload(left: Path, done: list[str]) -> str | None:
    """Return what is wrong with the files that a power cut left, or None."""
    found = {name: (left / name).read_bytes() for name in ("one", "two") if (left / name).exists()}
    if set(done) - set(found):
        return f"{set(done) - set(found)} are lost"
    return next((f"{name} is not complete" for name, data in found.items() if data != CONTENT), None)


PROGRAMS = {"spool": (spool, check_spool), "collector": (collector, check_collector), "upload": (upload, check_upload)}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]][0](Path(sys.argv[2]))
