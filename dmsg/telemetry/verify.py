"""Verification of receipts, before the pipeline counts them.

For each sealed file of receipts there is a new file of checked receipts, with a line for each line, in the same order.
The line of a rejected receipt states the reason. The name of the new file is the digest of the sealed file, so that a
file that is delivered twice is checked and counted once.

A receipt takes 41 us of elliptic curve arithmetic. Workers verify the signatures and write the new files: processes on
this machine, or tasks of Spark. The secret of the pseudonyms and the database of accepted receipts stay in this
process (:mod:`dmsg.telemetry.receipt_files`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from dmsg.errors import DmsgError
from dmsg.telemetry import receipt_files
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipt_files import CheckedFile, UnreadFile, VerifiedFile, checked_path, temporary_path
from dmsg.telemetry.receipts_seen import NAME, ReceiptsSeen
from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX
from dmsg.telemetry.spool_listing import Reason, SealedFile, list_sealed, reason_of

SMALL_BYTES = 2 * 1024 * 1024
"""Size in bytes of the unchecked files below which this process is faster than workers, which have to be started."""
WORKER_BYTES = 8 * 1024 * 1024
"""Bytes of sealed files that each worker gets at a time. More bytes need more memory in this process, for the keys and
ids of receipts."""


@dataclass(frozen=True)
class Workers:
    """Processes that verify files of receipts.

    :ivar count: number of processes.
    :ivar run: function that applies another function to each of several arguments in these processes, and returns the
        results in order. If a process cannot do that, this function does it in another way.
    :ivar share_files: whether the processes surely see the files of this machine.
    """

    count: int
    run: Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
    share_files: bool = True


@dataclass
class Verification:
    """Result of a verification.

    :ivar files: number of files that were checked.
    :ivar believed: number of accepted receipts.
    :ivar refused: number of rejected receipts.
    """

    files: int = 0
    believed: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of rejected receipts by reason."""
    left: dict[Reason, set[str]] = field(default_factory=dict)
    """Paths of files and directories that could not be read, by reason."""


def verify_spool(
    spool: Path,
    target: Path,
    names: Pseudonyms,
    *,
    workers: Callable[[], contextlib.AbstractContextManager[Workers]] | None = None,
) -> Verification:
    """Check the receipts of all files that were not checked before.

    :param spool: directory of the files. Its subdirectories are read, too.
    :param target: directory for the new files of checked receipts.
    :param workers: starts the workers, which is done only if there are many receipts. By default, one process for each
        core of this machine.
    :raises OSError: a file cannot be written.
    :raises DmsgError: the database of accepted receipts cannot be used.
    """
    found = Verification()
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(ReceiptsSeen(target / NAME)) as seen:
        listing = list_sealed(spool, [f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}"])
        found.left = listing.left
        unknown: list[SealedFile] = []
        for sealed in listing.files:
            digest = _known_digest(sealed.path, seen)
            if digest is None or not checked_path(target, digest).exists():
                unknown.append(sealed)
        small = sum(one.size for one in unknown) < SMALL_BYTES
        with contextlib.nullcontext(THIS_PROCESS) if small else (workers or own_processes)() as chosen:
            verifier = _Verifier(target, seen, names, chosen, found)
            for batch in _batches(unknown, WORKER_BYTES * chosen.count):
                verifier.verify(batch)
    return found


@contextlib.contextmanager
def own_processes(count: int | None = None) -> Iterator[Workers]:
    """Context manager that yields processes of this machine.

    :param count: number of processes; by default one for each core.
    """
    count = count or os.cpu_count() or 1
    if count == 1:
        yield THIS_PROCESS
        return
    # A fork server starts the processes. This process may have threads, such as Spark's, with which a plain fork is
    # unsafe.
    context = multiprocessing.get_context("forkserver")
    try:
        with ProcessPoolExecutor(count, context, _begin_worker) as pool:
            yield Workers(count, lambda function, arguments: list(pool.map(function, arguments)))
    except BrokenProcessPool:
        raise DmsgError(
            "a process that verifies receipts has ended, perhaps for lack of memory: repeat the command"
        ) from None


def _begin_worker() -> None:
    """Prepare a process of :func:`own_processes`."""
    # The processes ignore Ctrl-C, because their parent handles it and then stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has ended, even if the parent was killed. Otherwise the process would wait for
    work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


THIS_PROCESS = Workers(1, lambda function, arguments: list(map(function, arguments)))
"""This process as the only worker."""


def _batches(files: list[SealedFile], limit: int) -> Iterator[list[str]]:
    """Divide files, in order, into batches of about ``limit`` bytes, and yield the paths of each batch."""
    batch: list[str] = []
    size = 0
    for file in files:
        if batch and size + file.size > limit:
            yield batch
            batch, size = [], 0
        batch.append(file.path)
        size += file.size
    if batch:
        yield batch


def _known_digest(path: str, receipts_seen: ReceiptsSeen) -> str | None:
    """Return the digest of a file that was checked before; None if it was not, or has changed."""
    try:
        return receipts_seen.digest_of(path, os.stat(path))
    except OSError:
        return None


class _Verifier:
    """Verifier of batches of files, which adds its results to ``verification``."""

    def __init__(
        self, target: Path, seen: ReceiptsSeen, names: Pseudonyms, workers: Workers, verification: Verification
    ) -> None:
        self._target = target
        self._seen = seen
        self._names = names
        self._workers = workers
        self._verification = verification

    def verify(self, paths: list[str]) -> None:
        """Verify files, write their checked files, and record them."""
        # The status is read before the content. If the file changes meanwhile, it is read again later.
        there = {path: status for path in paths if (status := self._status(path)) is not None}
        verified = [one for one in self._read(list(there)) if isinstance(one, VerifiedFile)]
        checked: dict[str, CheckedFile] = {}
        self._seen.begin()
        for file in verified:
            if file.digest not in checked and not checked_path(self._target, file.digest).exists():
                checked[file.digest] = self._look_up(file)
        self._seen.keep()
        failed = {digest for digest, written in self._write(checked).items() if not written}
        self._seen.begin()
        for digest in failed:
            self._seen.withdraw(checked[digest].source.receipts, digest)
        for file in verified:
            if file.digest not in failed:
                self._seen.add_file(file.path, there[file.path], file.digest)
        self._seen.keep()

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path)
        except OSError as error:
            self._leave(UnreadFile(path, reason_of(error)))
            return None

    def _leave(self, file: UnreadFile) -> None:
        self._verification.left.setdefault(file.reason, set()).add(file.path)

    def _read(self, paths: list[str]) -> Iterator[VerifiedFile | UnreadFile]:
        verify_file = partial(receipt_files.verify_file, self._target)
        for found in self._workers.run(verify_file, paths):
            one = found
            if isinstance(one, UnreadFile) and not self._workers.share_files:
                one = verify_file(one.path)
            if isinstance(one, UnreadFile):
                self._leave(one)
            yield one

    def _look_up(self, file: VerifiedFile) -> CheckedFile:
        """Look up which receipts of a file are new, and the names of its keys."""
        new = bytes(self._seen.are_new(file.receipts, file.digest))
        names = {key: self._names.client(key) for key in file.keys}
        return CheckedFile(file, new, names, str(temporary_path(checked_path(self._target, file.digest))))

    def _write(self, files: dict[str, CheckedFile]) -> dict[str, bool]:
        """Write checked files, and return for each digest whether the file was written."""
        written = {}
        found = self._workers.run(receipt_files.write_checked, list(files.values()))
        for (digest, file), one in zip(files.items(), found, strict=True):
            counts = one
            if not self._workers.share_files and not Path(file.fresh).exists():
                counts = receipt_files.write_checked(file)
            written[digest] = not isinstance(counts, UnreadFile)
            if isinstance(counts, UnreadFile):
                self._leave(counts)
                continue
            Path(file.fresh).replace(checked_path(self._target, digest))
            self._verification.files += 1
            self._verification.believed += counts.believed
            self._verification.refused += counts.reasons.total()
            self._verification.reasons.update(counts.reasons)
        return written
