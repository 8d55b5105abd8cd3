"""Pairs of people in a walk of transfers by codes. One person sends files and directories to the other, and both start
again after a failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random
from typing import Protocol

from dmsg.apps.partial_files import part_of
from dmsg.testing.code_programs import TRANSFER_STATES, OfferRecord, Program, ReceiverProgram, SenderProgram
from dmsg.testing.determinism import START
from dmsg.testing.lab import Lab
from dmsg.testing.promise import PromiseBroken

PAIRS = (("anna", "ben"), ("cleo", "dan"))
"""Names of the sender's host and the receiver's host, for each pair of people."""
FILES = 5
"""Number of files in a directory that is sent."""
PROMPT_FRACTION = 0.5
"""Fraction of the senders that begin the transfer as soon as the key agreement is done."""
PARTNER_ENDED_DELAY = 10.0
"""Seconds after which a person ends a program because the other person's program has ended."""
PROGRAM_TIMEOUT = 200.0
"""Seconds after which a person ends a program that has not finished. Then both people start again."""
STALL_TIMEOUT = 20.0
"""Maximum seconds without progress while nothing is in transit, so that both programs only wait for each other. A
network fault cannot be the reason then."""
STALLED_AFTER_FAULTS = 60.0
"""Maximum seconds without progress of a transfer after the repair of all faults."""
GRACE = 150.0
"""Seconds after the repair of all faults. A program that starts later may not fail."""


class WalkOfPairs(Protocol):
    """Interface that a walk of transfers by codes offers to its pairs of people.

    :ivar records: records of all codes that were told to receivers.
    :ivar ended: programs that have ended.
    :ivar repaired_at: time at which all faults were repaired; None before.
    """

    lab: Lab
    records: list[OfferRecord]
    ended: list[Program]
    repaired_at: float | None

    def disturb_sender(self, record: OfferRecord) -> None:
        """Note that a receiver was told a new code."""

    def program_changed(self, program: Program) -> None:
        """Note that the state of a program has changed."""


class Pair:
    """Two people, one of whom sends files and directories to the other.

    :ivar finished: number of transfers that have finished.
    :ivar is_idle: whether no transfer is unfinished.
    """

    def __init__(self, walk: WalkOfPairs, number: int, directory: Path) -> None:
        self._walk = walk
        self._lab = walk.lab
        self._people = PAIRS[number]
        self._directory = directory
        self._source = directory
        self._target = directory
        self._versions: dict[str, list[bytes]] = {}
        """Contents that each file of the source had, by its path; the path of a single file is empty."""
        self._names: list[set[str]] = []
        """For each state of the source, the oldest first: the paths of all files that the source then had."""
        self._second_receiver: ReceiverProgram | None = None
        self._programs = 0
        self._is_source_unchanged = False
        """Whether no file of the source was changed since the sender started."""
        self._progress: object = None
        """Programs of the transfer, with their states and shares, at the last progress."""
        self._progress_at = self._waiting_since = 0.0
        """Time of the last progress, and time since which both programs only wait for each other, both by the lab's
        clock."""
        self.sender: SenderProgram | None = None
        self.receiver: ReceiverProgram | None = None
        self.finished = 0
        self.is_idle = True

    @property
    def programs(self) -> list[Program]:
        """Programs that run now."""
        return [one for one in (self.sender, self.receiver) if one is not None and not one.has_ended]

    def begin_transfer(self, size: int, random: Random) -> None:
        """Begin to send a new file or directory of about ``size`` bytes, unless another transfer is unfinished."""
        if not self.is_idle:
            return
        self.is_idle = False
        above = self._directory / str(self.finished)
        self._target = above / "received"
        self._target.mkdir(parents=True)
        self._source = above / "thing"
        self._versions, self._names = {}, []
        if random.random() < 0.7:
            self._put("", random.randbytes(size))
            return
        (self._source / "inner").mkdir(parents=True)
        for number in range(FILES):
            self._put(
                f"inner/{number}" if number % 2 else str(number), random.randbytes(random.randrange(size // 3 + 1))
            )

    def replace_source(self, random: Random, *, partly_received: bool = False) -> None:
        """Replace a file of the source, or overwrite it in place while the sender may be reading it. The new content
        may be longer, shorter or of the same size, and may begin with the same bytes.

        :param partly_received: whether to choose a file of which the receiver has a part, if there is one.
        """
        if self.is_idle:
            return
        self._is_source_unchanged = False
        present = self._names[-1]
        parts = {path: size for path in sorted(present) if (size := self._part_size(path))} if partly_received else {}
        path = random.choice(sorted(parts or present))
        before = self._versions[path][-1]
        size = len(before)
        # A receiver can use its part of the old file only if the new file begins with this part.
        have = parts.get(path, size)
        longer = random.randbytes(size + 1000)
        contents = [longer, longer[:size], longer[: have // 2], before[: have // 2], before[:have] + longer[:1000]]
        if path and random.random() < 0.5:
            (self._source / path).unlink()
            self._names.append(present - {path})
            self._put(path + "new", random.choice(contents))
        elif random.random() < 0.2:
            self._put(path, longer[:size], in_place=True)
        else:
            self._put(path, random.choice(contents))

    def lengthen_source(self, random: Random) -> None:
        """Replace a file of the source by a longer file with other content."""
        if self.is_idle:
            return
        self._is_source_unchanged = False
        path = random.choice(sorted(self._names[-1]))
        self._put(path, random.randbytes(len(self._versions[path][-1]) + 1000))

    def overwrite_source(self, random: Random) -> None:
        """Overwrite all files of the source in place. The files keep their sizes. A file that the sender is
        reading arrives as a mix of old and new content.
        """
        if self.is_idle:
            return
        self._is_source_unchanged = False
        for path in sorted(self._names[-1]):
            self._put(path, random.randbytes(len(self._versions[path][-1])), in_place=True)

    def _part_size(self, path: str) -> int:
        """Return how many bytes of a file the receiver has from an interrupted transfer."""
        part = part_of(self._target / "thing")
        file = part / path if path else part
        return file.stat().st_size if file.is_file() else 0

    def _put(self, path: str, content: bytes, *, in_place: bool = False) -> None:
        """Write a file of the source.

        :param in_place: whether to write to the existing file; otherwise the file is replaced atomically by a new one.
        """
        self._versions.setdefault(path, []).append(content)
        self._names.append({*(self._names[-1] if self._names else ()), path})
        file = self._source / path if path else self._source
        new = file if in_place else self._directory / "new"
        new.write_bytes(content)
        if not in_place:
            new.chmod(0o644)
            os.replace(new, file)
        # The dates of files are sent to the receiver, so they come from the lab's clock. With the real clock, runs with
        # the same seed would send different bytes.
        for one in (file, *(above for above in file.parents if above == self._source or self._source in above.parents)):
            os.utime(one, (START + self._lab.clock.seconds(),) * 2)

    def proceed(self) -> None:
        """Start and end programs as the two people do: start the next sender or receiver, and kill a program that is
        left alone or does not end."""
        sender, receiver = self.sender, self.receiver
        now = self._lab.clock.seconds()
        if self.is_idle:
            return
        if sender is None or (sender.has_ended and (receiver is None or receiver.has_ended)):
            # Programs that have just ended are checked before others take their places.
            self.check()
            if sender is not None and (self._target / "thing").exists():
                self._finish()
            else:
                self._start_again()
        elif receiver is None and sender.record is not None and not sender.has_ended:
            self._start_receiver(sender.record)
        self._check_progress()
        for one, other in ((sender, receiver), (receiver, sender)):
            if (
                one is not None
                and other is not None
                and one.ended_at is not None
                and now - one.ended_at > PARTNER_ENDED_DELAY
            ):
                other.kill()
        for program in (*self.programs, *([] if self._second_receiver is None else [self._second_receiver])):
            if not program.has_ended and now - program.began > PROGRAM_TIMEOUT:
                self._fails(f"the program of {program.name} does not end; it is {program.state}", program)
                program.kill()

    def _check_progress(self) -> None:
        """Check that the transfer makes progress.

        :raises AssertionError: the transfer has stalled.
        """
        now = self._lab.clock.seconds()
        programs = self.programs
        progress = [(one, one.state, one.share) for one in programs]
        if progress != self._progress or not all(one.state in TRANSFER_STATES for one in programs):
            self._progress, self._progress_at, self._waiting_since = progress, now, now
        if len(programs) < 2:
            return
        if not all(one.is_waiting for one in programs):
            self._waiting_since = now
        states = " and ".join(f"{one.name} is {one.state} ({one.share:.0%})" for one in programs)
        if now - self._waiting_since > STALL_TIMEOUT:
            raise AssertionError(f"a transfer has stalled: {states}, and nothing is in transit for {STALL_TIMEOUT:g} s")
        repaired = self._walk.repaired_at
        if repaired is not None and now - max(repaired, self._progress_at) > STALLED_AFTER_FAULTS:
            raise AssertionError(
                f"a transfer has stalled: {states}, without progress for {STALLED_AFTER_FAULTS:g} s without faults"
            )

    def _start_receiver(self, record: OfferRecord) -> None:
        """Tell the receiving person a code, and start a program that uses it."""
        self._walk.records.append(record)
        self._programs += 1
        self.receiver = ReceiverProgram(self._lab, self._people[1], self._programs, record, self._target, self._content)
        self.receiver.on_change = self._walk.program_changed
        self.receiver.start()
        self._walk.program_changed(self.receiver)
        self._walk.disturb_sender(record)

    def tell_another(self) -> None:
        """Tell the present code to a second receiver, and start this receiver's program."""
        sender = self.sender
        if sender is None or sender.record is None or sender.has_ended or self.receiver is None:
            return
        if self._second_receiver is None or self._second_receiver.has_ended:
            if self._second_receiver is not None:
                self._walk.ended.append(self._second_receiver)
            self._programs += 1
            directory = self._directory / f"other {self._programs}"
            directory.mkdir()
            name = f"friend of {self._people[0]}"
            self._second_receiver = ReceiverProgram(
                self._lab, name, self._programs, sender.record, directory, lambda size: None
            )
            self._second_receiver.start()

    def _content(self, size: int) -> bytes | None:
        """Return the content of the file that is sent; None for a directory, or if different content may be sent
        because the file was changed after the sender started.
        """
        versions = self._versions.get("")
        return versions[-1] if versions is not None and self._is_source_unchanged else None

    def _start_again(self) -> None:
        for program in (self.sender, self.receiver):
            if program is not None:
                reason = "was killed" if program.failure is None else program.failure.getErrorMessage()
                self._fails(f"the program of {program.name} {reason}", program)
                self._walk.ended.append(program)
        self._programs += 1
        self.receiver = None
        is_prompt = Random(f"prompt {self._lab.seed} {self._people[0]} {self._programs}").random() < PROMPT_FRACTION
        self.sender = SenderProgram(self._lab, self._people[0], self._programs, self._source, is_prompt=is_prompt)
        self.sender.on_change = self._walk.program_changed
        self._is_source_unchanged = True
        self.sender.start()
        self._walk.program_changed(self.sender)

    def _fails(self, text: str, program: Program) -> None:
        """Fail the walk because a program has not done its work. If faults may be the reason, do nothing."""
        repaired = self._walk.repaired_at
        if repaired is not None and program.began > repaired + GRACE:
            raise AssertionError(f"no fault explains that {text}")

    def _finish(self) -> None:
        if part_of(self._target / "thing").exists():
            raise PromiseBroken("a finished transfer has left a partial file")
        for program in (self.sender, self.receiver):
            if program is not None:
                self._walk.ended.append(program)
        self.finished += 1
        self.sender = self.receiver = None
        self.is_idle = True
        shutil.rmtree(self._target.parent)

    def check(self) -> None:
        """Check the files that the receiver has.

        :raises PromiseBroken: there is a wrong file, or the sender believes wrongly that the transfer has succeeded.
        """
        for program in (self.sender, self.receiver, self._second_receiver):
            if program is not None:
                program.check()
        if self.is_idle:
            return
        final = self._target / "thing"
        if final.exists():
            self._check_content(final)
        elif self.sender is not None and self.sender.sent is not None and not self._has_second_receiver_finished():
            raise PromiseBroken("a sender was told that everything has arrived, but the receiver has nothing")
        elif self.receiver is not None and self.receiver.received is not None:
            raise PromiseBroken("a receiver has finished, but there is no file")

    def _has_second_receiver_finished(self) -> bool:
        """Whether the second receiver of the present code has received the parcel."""
        second, sender = self._second_receiver, self.sender
        return (
            second is not None and second.received is not None and sender is not None and second.record is sender.record
        )

    def _check_content(self, final: Path) -> None:
        found = [final] if final.is_file() else sorted(one for one in final.rglob("*") if one.is_file())
        names = {"" if one == final else str(one.relative_to(final)) for one in found}
        if names not in self._names:
            raise PromiseBroken(f"the receiver has the files {sorted(names)}, and the sender never had exactly these")
        for one in found:
            name = "" if one == final else str(one.relative_to(final))
            content = one.read_bytes()
            same_size = [version for version in self._versions[name] if len(version) == len(content)]
            if content in same_size:
                continue
            # If a file is replaced during a transfer by a file of the same size, the received file may have parts of
            # both. The receiver is then told that the file has changed.
            taken = None if self.receiver is None else self.receiver.received
            if len(same_size) < 2 or (taken is not None and not taken.changed):
                raise PromiseBroken(f"the receiver has wrong content in {name or 'the file'}")
