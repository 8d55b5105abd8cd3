"""Power cuts for programs that write files: their system calls are recorded by strace, and repeated on simulated files.

A program writes ``DONE`` and a line to its standard output when something must survive a power cut from then on. The
power is then cut after each recorded call, and the files that are left are written into a real directory for a check.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from dmsg.testing.disk import DiskFile

CALLS = (
    "openat,close,write,pwrite64,writev,lseek,ftruncate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "mkdir,mkdirat,link,linkat,sendfile,copy_file_range"
)
DONE = b"done "
TIMEOUT = 60.0
"""Seconds that a recorded program may take."""
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def in_hex(text: str) -> str:
    """Return a text as strace prints it."""
    return "".join(f"\\x{one:02x}" for one in text.encode())


class _Directory:
    """A directory in the table of names."""


Node = DiskFile | _Directory


@cache
def _texts(arguments: str) -> list[bytes]:
    """Return the texts among the arguments of a call. Each call is repeated for many power cuts."""
    return [bytes.fromhex(found.replace("\\x", "")) for found in _TEXT.findall(arguments)]


@cache
def _words(arguments: str) -> list[str]:
    return arguments.split(", ")


@dataclass(frozen=True)
class Call:
    """Recorded system call that succeeded."""

    name: str
    arguments: str
    result: int

    def text(self, index: int) -> bytes:
        """Return one of the texts among the arguments."""
        return _texts(self.arguments)[index]

    def number(self, index: int) -> int:
        """Return an argument that is a number, or -1. Texts have no commas, because strace prints them in hex."""
        word = _words(self.arguments)[index]
        return int(word) if word.isdecimal() else -1


def is_available() -> bool:
    """Whether strace exists and may trace programs here."""
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-qq", "-o", os.devnull, sys.executable, "-S", "-c", ""]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def record(module: str, *arguments: str) -> list[Call]:
    """Run a module with strace, and return its calls."""
    trace = Path(arguments[-1]).with_suffix(".trace")
    command = ["strace", "-f", "-qq", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", str(trace)]
    subprocess.run(
        [*command, sys.executable, "-m", module, *arguments], check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL
    )
    calls = []
    for line in trace.read_text().splitlines():
        if "unfinished" in line or "resumed" in line:
            raise ValueError("the program has several threads")
        found = _LINE.match(line)
        if found is not None and int(found[3]) >= 0:
            calls.append(Call(found[1], found[2], int(found[3])))
    return calls


class Files:
    """Files below a directory, as the recorded calls change them.

    :ivar done: texts that the program wrote after :data:`DONE`.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._names: dict[str, Node] = {root: _Directory()}
        self._synced_names = dict(self._names)
        # The changes of names that one call makes belong together, and are permanent once their directory is synced.
        self._name_changes: list[tuple[str, list[tuple[str, Node | None]]]] = []
        self._open: dict[int, tuple[str, Node]] = {}
        self._offsets: dict[int, int] = {}
        self.done: list[str] = []

    def repeat(self, call: Call) -> bool:
        """Make one call. Return whether it changed something below the directory."""
        handler = getattr(self, f"_on_{call.name}", None)
        if handler is not None:
            return bool(handler(call))
        if in_hex(self._root) in call.arguments or call.number(0) in self._open:
            raise ValueError(f"{call.name} is not simulated")
        return False

    def _path(self, call: Call, text: int, at: int | None = None) -> str:
        path = os.fsdecode(call.text(text))
        base = -1 if at is None else call.number(at)
        if base in self._open and not os.path.isabs(path):
            path = os.path.join(self._open[base][0], path)
        return os.path.abspath(path)

    def _change(self, *changes: tuple[str, Node | None]) -> bool:
        changes = tuple(change for change in changes if self._is_inside(change[0]))
        for path, node in changes:
            if node is None:
                self._names.pop(path, None)
            else:
                self._names[path] = node
        if changes:
            self._name_changes.append((os.path.dirname(changes[-1][0]), list(changes)))
        return bool(changes)

    def _is_inside(self, path: str) -> bool:
        return path.startswith(self._root + "/")

    def _on_openat(self, call: Call) -> bool:
        path = self._path(call, 0, at=0)
        changed = False
        node = self._names.get(path)
        if node is None and self._is_inside(path) and "O_CREAT" in call.arguments:
            node = DiskFile()
            changed = self._change((path, node))
        if node is None:
            self._open.pop(call.result, None)
            return False
        if isinstance(node, DiskFile) and "O_TRUNC" in call.arguments and node.content:
            node.truncate(0)
            changed = True
        self._open[call.result] = (path, node)
        self._offsets[call.result] = 0
        return changed

    def _on_close(self, call: Call) -> bool:
        self._open.pop(call.number(0), None)
        return False

    def _file(self, call: Call) -> DiskFile | None:
        found = self._open.get(call.number(0))
        return found[1] if found is not None and isinstance(found[1], DiskFile) else None

    def _on_write(self, call: Call) -> bool:
        number = call.number(0)
        data = call.text(0)[: call.result]
        file = self._file(call)
        if file is not None:
            file.write(self._offsets[number], data)
            self._offsets[number] += call.result
        elif number == 1 and data.startswith(DONE):
            self.done.append(data.removeprefix(DONE).decode().strip())
        else:
            return False
        return True

    def _on_pwrite64(self, call: Call) -> bool:
        file = self._file(call)
        if file is not None:
            file.write(call.number(3), call.text(0)[: call.result])
        return file is not None

    def _on_lseek(self, call: Call) -> bool:
        self._offsets[call.number(0)] = call.result
        return False

    def _on_ftruncate(self, call: Call) -> bool:
        file = self._file(call)
        if file is not None:
            file.truncate(call.number(1))
        return file is not None

    def _on_fsync(self, call: Call) -> bool:
        found = self._open.get(call.number(0))
        if found is None:
            return False
        path, node = found
        if isinstance(node, DiskFile):
            node.sync()
            return True
        for directory, changes in self._name_changes:
            if directory == path:
                _apply(self._synced_names, changes)
        self._name_changes = [change for change in self._name_changes if change[0] != path]
        return True

    _on_fdatasync = _on_fsync

    def _on_rename(self, call: Call) -> bool:
        return self._move(self._path(call, 0), self._path(call, 1))

    def _move(self, old: str, new: str) -> bool:
        return old in self._names and self._change((old, None), (new, self._names[old]))

    def _on_renameat(self, call: Call) -> bool:
        return self._move(self._path(call, 0, at=0), self._path(call, 1, at=2))

    _on_renameat2 = _on_renameat

    def _on_linkat(self, call: Call) -> bool:
        node = self._names.get(self._path(call, 0, at=0))
        return node is not None and self._change((self._path(call, 1, at=2), node))

    def _on_unlinkat(self, call: Call) -> bool:
        return self._change((self._path(call, 0, at=0), None))

    def _on_mkdirat(self, call: Call) -> bool:
        return self._change((self._path(call, 0, at=0), _Directory()))

    def _on_unlink(self, call: Call) -> bool:
        return self._change((self._path(call, 0), None))

    def _on_mkdir(self, call: Call) -> bool:
        return self._change((self._path(call, 0), _Directory()))

    def cut_power(self, random: Random, left: Path) -> None:
        """Lose a random part of what was not synced, and write the files that are left into a directory."""
        names = dict(self._synced_names)
        for _, changes in self._name_changes:
            if random.random() < 0.5:
                _apply(names, changes)
        for path, node in sorted(names.items()):
            target = left / os.path.relpath(path, self._root)
            if not target.parent.is_dir():
                continue  # The name of its directory is lost.
            if isinstance(node, _Directory):
                target.mkdir(exist_ok=True)
            else:
                node.tear(random)
                node.revert()
                target.write_bytes(node.content)


def _apply(names: dict[str, Node], changes: list[tuple[str, Node | None]]) -> None:
    for path, node in changes:
        if node is None:
            names.pop(path, None)
        else:
            names[path] = node


def power_cuts(calls: list[Call], root: str, left: Path, seeds: range) -> Iterator[list[str]]:
    """Cut the power after each call that changes something, once for each seed.

    :param root: directory of the recorded program.
    :param left: directory that has the files that are left, until the next power cut.
    :returns: for each power cut, the texts that the program had written after :data:`DONE`.
    """
    # The calls before the first one with the directory load modules.
    first = next(index for index, call in enumerate(calls) if in_hex(root) in call.arguments)
    calls = calls[first:]
    probe = Files(root)
    ends = [index + 1 for index, call in enumerate(calls) if probe.repeat(call)]
    for end in ends:
        for seed in seeds:
            files = Files(root)
            for call in calls[:end]:
                files.repeat(call)
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
            files.cut_power(Random(seed), left)
            yield files.done
