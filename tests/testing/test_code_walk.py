"""Random walks of transfers by codes through faults, and short walks that lead to one fault on purpose."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.error import ConnectionAborted
from twisted.internet.interfaces import IProtocol
from twisted.python.failure import Failure
from twisted.python.filepath import FilePath

from dmsg.apps import exposure
from dmsg.apps.codes.pake import WrongCode
from dmsg.apps.codes.stream import CodeAgreement, CodeEnd, CodeFactory
from dmsg.apps.codes.words import Code
from dmsg.apps.parcels import walk as parcels_walk
from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.walk import OfferedFiles
from dmsg.keys import SecKey
from dmsg.testing.code_kinds import (
    AIMED_STEPS,
    AMBUSH_FAULTS,
    EVERY_KIND,
    FAULTS,
    FULL_DISK,
    INTERRUPT_SENDER,
    KILL_RECEIVER,
    LENGTHEN,
    OVERWRITE,
    REPLACE_PARTLY_RECEIVED,
    draw_plan,
)
from dmsg.testing.code_programs import AGREEING, FINISHING, RECEIVING, STARTING, STATES, OfferRecord, SenderProgram
from dmsg.testing.code_walk import LARGE_SIZE, follow
from dmsg.testing.lab import Lab
from dmsg.testing.limited_destination import _LimitedFile
from dmsg.testing.plan import Aim, Plan, Step
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.walk_command import Done
from dmsg.testing.walk_coverage import WalkCoverage
from tests.testing.walks import WalkCase

SEEDS = (0, 1, 3)
STEPS = 30
CONTENT = "the receiver has wrong content"


def _led_to(fault: str) -> Iterator[partial[Done]]:
    """Yield walks in which each of two pairs of people sends something large, and a fault waits for both of them."""
    both = (0, LARGE_SIZE), (1, LARGE_SIZE)
    for seed in range(6):
        steps = Step((), fault, seed), Step((), fault, seed + 100), Step(both, "", seed, 12.0), Step((), "", 0, 12.0)
        yield partial(follow, Plan(seed, steps))


class CodeWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_every_transfer_finishes_whole(self) -> None:
        faults: set[str] = set()
        finished = 0
        coverage = WalkCoverage(EVERY_KIND, STATES)
        for seed in SEEDS:
            done = follow(draw_plan(seed, STEPS))
            finished += done.amount
            faults.update(done.faults)
            assert done.coverage is not None
            coverage.add(done.coverage)
        self.assertGreater(finished, 10)
        self.assertLessEqual({"kill receiver", "cut", "guess", "replace source"}, faults)
        self.assertLessEqual(faults - {"lies"}, set(FAULTS))
        self.assertLessEqual({REPLACE_PARTLY_RECEIVED, LENGTHEN, OVERWRITE, FULL_DISK}, coverage.kinds)
        self.assertEqual({cell.state for cell in coverage.reached}, set(STATES))

    def test_a_walk_does_not_look_for_files_in_the_real_home_directory(self) -> None:
        homes: set[str] = set()
        look = exposure.own_files

        def note_home() -> exposure.OwnFiles:
            homes.add(os.environ["HOME"])
            return look()

        self.patch(exposure, "own_files", note_home)
        self.patch(parcels_walk, "own_files", note_home)
        before = dict(os.environ)
        follow(draw_plan(0, 1))
        self.assertEqual([os.path.basename(home) for home in homes], ["home"])
        self.assertNotIn(before.get("HOME"), homes)
        self.assertEqual(dict(os.environ), before)

    def test_a_sender_that_counts_no_guesses_is_found(self) -> None:
        ended = CodeFactory._ended

        def forgive(factory: CodeFactory, result: Any, end: Any) -> None:
            wrong = isinstance(result, Failure) and result.check(WrongCode)
            factory.tries += bool(wrong and factory.tries > 1)
            ended(factory, result, end)

        self.patch(CodeFactory, "_ended", forgive)
        self.found("wrong guesses were answered", [partial(follow, draw_plan(seed, STEPS)) for seed in SEEDS])

    def test_transfers_that_wait_for_ever_are_found(self) -> None:
        """The first data after an agreement are lost, so that both programs wait for each other."""

        def receive(end: CodeEnd, data: bytes) -> None:
            if end._next is None or end in begun:
                dataReceived(end, data)
            begun.update([end] if end._next is not None else [])

        begun: set[CodeEnd] = set()
        dataReceived = CodeEnd.dataReceived
        self.patch(CodeEnd, "dataReceived", receive)
        self.found("nothing is in transit", [partial(follow, draw_plan(seed, STEPS)) for seed in SEEDS])

    def test_data_that_follows_an_agreement_at_once_and_is_lost_is_found(self) -> None:
        """Some senders begin the transfer at once, so that its first message arrives with the confirmation."""

        def forget(end: CodeEnd, protocol: IProtocol) -> None:
            end._early_data.clear()
            proceed(end, protocol)

        proceed = CodeEnd._proceed
        self.patch(CodeEnd, "_proceed", forget)
        self.found("nothing is in transit", [partial(follow, draw_plan(seed, 0)) for seed in SEEDS])

    def test_transfers_without_progress_after_the_faults_are_found(self) -> None:
        """A receiver reads nothing, so that the sender's data stay on their way."""
        self.patch(CodeEnd, "_proceed", lambda end, protocol: None)
        self.found("without progress", [partial(follow, draw_plan(seed, 0)) for seed in SEEDS])


class SenderProgramTests(WalkCase):
    """Sender that begins the transfer in the callback of the agreement."""

    def test_a_sender_that_is_interrupted_after_the_agreement_logs_no_error(self) -> None:
        """The parcel fails while the sender still releases its nameplate, and nobody waits for the parcel."""
        lab = Lab(1)
        lab.add_servers(2)
        source = FilePath(self.mktemp())
        source.setContent(b"content")
        sender = SenderProgram(lab, "anna", 1, Path(source.path), is_prompt=True)
        sender.start()
        lab.network.run_until(lambda: sender.record)
        key = SecKey.from_seed(b"receiver").public
        sender._agreed(CodeAgreement(key, "", lambda protocol: None))
        sender.interrupt()
        parcel: Any = sender._parcel
        parcel.connectionLost(Failure(ConnectionAborted()))
        lab.network.run_until(lambda: sender.has_ended)
        sender._parcel = None
        del parcel
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])


class OfferRecordTests(WalkCase):
    """Checks of wrong guesses of one offered code."""

    def test_only_the_last_guess_may_be_answered_before_it_is_counted(self) -> None:
        """An offer counts its last guess when it has ended, which takes a while after the answer."""
        record = OfferRecord(Code(7, ("guitar", "zoo", "zoo")), SecKey.from_seed(b"sender").public)
        for verdicts, counted, attempts in ((5, 4, 5), (5, 5, 5), (4, 4, 4), (3, 4, 4)):
            record.verdicts, record.counted, record.attempts = verdicts, counted, attempts
            record.check()
        for verdicts, counted, attempts in ((5, 3, 5), (4, 3, 4), (1, 0, 1), (6, 5, 6), (1, 2, 1)):
            record.verdicts, record.counted, record.attempts = verdicts, counted, attempts
            self.assertRaises(PromiseBroken, record.check)


class AimedWalkTests(WalkCase):
    """Walks that are steered to rare cells of their coverage."""

    def test_a_fault_happens_in_the_state_that_is_aimed_at(self) -> None:
        aims = [Aim(INTERRUPT_SENDER, FINISHING), Aim("lie: flip", RECEIVING), Aim("reset", STARTING)]
        aims += [Aim(kind, AGREEING) for kind in (*AMBUSH_FAULTS, "cut")]
        plan = draw_plan(0, 0, aims)
        self.assertEqual(plan, draw_plan(0, 0, aims))
        self.assertEqual(len(plan.steps), AIMED_STEPS)
        # Each transfer that ends begins again, so that its programs reach all their states several times.
        steps = [replace(step, says=((0, LARGE_SIZE), (1, LARGE_SIZE)), seconds=5.0) for step in plan.steps]
        done = follow(replace(plan, steps=tuple(steps)))
        assert done.coverage is not None
        reached = {Aim(cell.kind, cell.state) for cell in done.coverage.reached}
        self.assertGreater(len(reached & set(aims)), len(aims) / 2, set(aims) - reached)


class LedWalkTests(WalkCase):
    """Walks that lead to one fault."""

    def test_a_transfer_that_begins_anew_is_found(self) -> None:
        def forget(place: Destination, item: Any) -> Any:
            yield from clear(place, item)
            return 0

        clear = Destination.clear
        self.patch(Destination, "clear", forget)
        self.found("bytes were sent to complete a file that lacked", _led_to(KILL_RECEIVER))

    def test_a_file_that_an_earlier_transfer_has_left_is_found(self) -> None:
        self.patch(Destination, "_take_away_others", lambda place, entry, inside, known: iter(()))
        self.found("and the sender never had exactly these", _led_to(REPLACE_PARTLY_RECEIVED))

    def test_a_longer_file_in_place_of_the_offered_one_is_found(self) -> None:
        def open_any(offered: OfferedFiles, index: int) -> Any:
            return offered._open_offered(offered._walked.checked.entries[index])

        self.patch(OfferedFiles, "open", open_any)
        self.found(CONTENT, _led_to(LENGTHEN))

    def test_a_mixed_file_that_is_not_reported_is_found(self) -> None:
        self.patch(OfferedFiles, "has_changed", lambda offered, index, file: False)
        self.found(CONTENT, _led_to(OVERWRITE))

    def test_the_rest_of_a_short_write_that_is_lost_is_found(self) -> None:
        def claim_all(file: _LimitedFile, data: Any) -> int:
            write(file, data)
            return len(data)

        write = _LimitedFile.write
        self.patch(_LimitedFile, "write", claim_all)
        self.found(CONTENT, _led_to(FULL_DISK))
