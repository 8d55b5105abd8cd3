"""Hand-made mutants of secure streams, and how many of them walks with lies find.

``make long WHICH=mutate-walks WALKS=100`` prints one line for each mutant. A mutant is found when a walk with its code
fails.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

_SECURE = "dmsg.streams.core.secure"
_RESUMPTION = "dmsg.streams.core.resumption"
_STREAM = "dmsg.net.streams.stream"
_STREAMS = "dmsg.streams.streams"

_LATER_NONCES = (
    "            raise SecureError(self._diagnose(bytes(payload), associated)) from None\n"
    "        self._open_nonce = nonce + 1",
    "            for nonce in range(nonce + 1, nonce + 4):\n"
    "                try:\n"
    "                    plain = self._decrypt(pack_nonce(nonce), payload, associated)\n"
    "                    break\n"
    "                except InvalidTag:\n"
    "                    continue\n"
    "            else:\n"
    "                raise SecureError(self._diagnose(bytes(payload), associated)) from None\n"
    "        self._open_nonce = nonce + 1",
)
_ANY_SEQUENCE = ("or plain[0] << 8 | plain[1] != sequence:", "or False:")
_SENT_AGAIN = "zip((data for data, _ in frames), tickets, strict=True)"
_SUSPEND = " " * 20 + "self.suspend(stream, CloseReason.STALLED)"

MUTANTS: dict[str, tuple[str, Sequence[tuple[str, str]]]] = {
    "the nonce of an ACK is not counted": (
        _SECURE,
        [
            (
                "        self._open_nonce = nonce + 1\n        if nonce + 1 ==",
                "        self._open_nonce = nonce + (associated != _ACK_DATA)\n        if nonce + 1 ==",
            )
        ],
    ),
    "later nonces are tried": (_SECURE, [_LATER_NONCES]),
    "the sequence of a FWD is not checked": (_SECURE, [_ANY_SEQUENCE]),
    "a server can cut frames out": (_SECURE, [_LATER_NONCES, _ANY_SEQUENCE]),
    "the hash of an ACK is not checked": (
        _SECURE,
        [("if self._digest(sent_hash, self.acknowledged)[:ACK_HASH_SIZE] != digest:", "if False:")],
    ),
    "the hash of a RESUME is not checked": (
        _RESUMPTION,
        [("or self._digest(rolling, position) != remote.hash:", "or False:")],
    ),
    "RESUME acknowledges one frame too many": (
        _RESUMPTION,
        [("if position >= remote.received:", "if position > remote.received:")],
    ),
    "large frames are hashed by their data": (
        _SECURE,
        [
            (
                "payload[-TAG_SIZE:] if self._tags else data)\n            if before",
                "payload[-TAG_SIZE:] if self._tags and size < 60000 else data)\n            if before",
            )
        ],
    ),
    "frames in flight are kept at RESUME": (
        _RESUMPTION,
        [("        if in_flight:\n            in_flight.clear()\n", "")],
    ),
    "bytes in flight are kept at RESUME": (
        _RESUMPTION,
        [("        self.in_flight_bytes = 0\n        self._before", "        self._before")],
    ),
    "the announced window is kept at RESUME": (
        _RESUMPTION,
        [("        self.told_window = told_window\n\n    def detach", "\n    def detach")],
    ),
    "frames without data are kept at RESUME": (
        _RESUMPTION,
        [("while in_flight and not in_flight[0][0]:", "while False:")],
    ),
    "data are sent again in the wrong order": (_STREAM, [(_SENT_AGAIN, f"list({_SENT_AGAIN})[::-1]")]),
    "a stream that moved sends nothing": (
        _STREAM,
        [
            (
                "callLater(LINGER, self._lingered)\n        self._schedule()\n\n    def window_opened",
                "callLater(LINGER, self._lingered)\n\n    def window_opened",
            )
        ],
    ),
    "unread pieces are joined in the wrong order": (
        _STREAM,
        [("self._unread[-1] += data", "self._unread[-1] = data + self._unread[-1]")],
    ),
    "data overtake what is unread": (
        _STREAM,
        [("if self._paused or self._unread or self._delivering:", "if self._paused or self._delivering:")],
    ),
    "stalls are never noticed": (_STREAMS, [("elif now - before[1] >= STALL_TIME:", "elif False:")]),
    "a generation may be used again": (
        _STREAMS,
        [("resume.generation > stream.secure_end.generation", "resume.generation >= stream.secure_end.generation")],
    ),
    "RESUME of any key is taken": (
        _STREAMS,
        [
            (
                "known = isinstance(peer, DmsgAddress) and peer.public_key == remote",
                "known = isinstance(peer, DmsgAddress)",
            )
        ],
    ),
    "a CLOSE of a server ends the stream": (
        _STREAMS,
        [("if not resumable or (final and reason in FINAL):", "if not resumable or reason in FINAL:")],
    ),
    "a stall is noticed without consequence": (_STREAMS, [(_SUSPEND, " " * 20 + "pass")]),
}
"""Mutants by name: module, and old and new text of each change."""


INVISIBLE = {
    "frames without data are kept at RESUME": "an empty frame that is sent again is acknowledged and delivers nothing",
    "a stream that moved sends nothing": "both ends also send when they count the ACKs of a move",
    "data overtake what is unread": "while data is unread, the reader is paused, or a delivery is in progress",
}
"""Mutants that change nothing that an application could see, with the reason. Unit tests find the first two."""

FOUND = 10
"""Exit status of the process of a mutant that was found."""


class _Loader(importlib.abc.Loader):
    """Loader of one module with a changed source."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the module that a mutant changes."""

    def __init__(self, name: str) -> None:
        self._module, self._changes = MUTANTS[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        code = compile(changed(Path(found.origin).read_text(), self._changes), found.origin, "exec")
        return importlib.machinery.ModuleSpec(fullname, _Loader(code), origin=found.origin)


def changed(source: str, changes: Sequence[tuple[str, str]]) -> str:
    """Return a source with the changes of a mutant.

    :raises ValueError: an old text is not there exactly once.
    """
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"this text occurs {source.count(old)} times: {old}")
        source = source.replace(old, new)
    return source


def try_one(name: str, first: int, walks: int) -> int:
    """Walk with the code of a mutant; print and return the number of walks until one failed, or 0 if none did."""
    sys.meta_path.insert(0, _Finder(name))
    from dmsg.testing.walk import walk

    started = time.process_time()
    for number in range(walks):
        try:
            walk(first + number, lies=True)
        except Exception as error:
            why = str(error).split("; faults:")[0][:100]
            sys.stdout.write(f"found in {number + 1:3} walks, {time.process_time() - started:4.0f} s: {name}: {why}\n")
            return number + 1
    why = f" ({INVISIBLE[name]})" if name in INVISIBLE else ""
    sys.stdout.write(f"not found in {walks} walks, {time.process_time() - started:4.0f} s: {name}{why}\n")
    return 0


def main() -> None:
    """Try all mutants, each in a process of its own, and print how many were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=100, help="for each mutant")
    parser.add_argument("--first", type=int, default=0, help="seed of the first walk")
    parser.add_argument("--one", help="only this mutant")
    arguments = parser.parse_args()
    if arguments.one is not None:
        sys.exit(FOUND if try_one(arguments.one, arguments.first, arguments.walks) else 0)
    found = 0
    for name in MUTANTS:
        command = [sys.executable, "-m", "tests.mutation.by_walks", "--one", name]
        command += ["--walks", str(arguments.walks), "--first", str(arguments.first)]
        status = subprocess.run(command, check=False).returncode
        if status not in (0, FOUND):
            sys.exit(f"the process of this mutant failed with status {status}: {name}")
        found += status == FOUND
    sys.stdout.write(f"{found} of {len(MUTANTS)} mutants were found; {len(INVISIBLE)} change nothing visible\n")


if __name__ == "__main__":
    main()
