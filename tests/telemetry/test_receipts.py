"""Receipts: made, checked, refused; and files of them."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.keys import SecKey, sha256
from dmsg.telemetry import receipt_files, verify
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipt_files import CheckedCounts, UnreadFile, check_line
from dmsg.telemetry.receipts import RECEIPT_SIZE, Receipt, ReceiptError, Role, parse_receipt
from dmsg.telemetry.receipts_seen import GENERATION_DAYS, ReceiptsSeen
from dmsg.telemetry.spool_listing import Reason
from dmsg.telemetry.verify import Workers, own_processes, verify_spool

KEYS = [SecKey.from_seed(bytes([number])) for number in range(3)]
A, B, SERVER = KEYS
RECEIPT = Receipt(Role.INITIATOR, bytes(range(16)), SERVER.public, A.public, B.public, 1000, 2**40)
NAMES = Pseudonyms(bytes(32))


def process_of_worker(number: int) -> int:
    """Return the id of the process that calls this function."""
    return os.getpid()


class ReceiptTests(SynchronousTestCase):
    """198 bytes."""

    def test_signed_receipts_are_read(self) -> None:
        data = RECEIPT.sign(A)
        self.assertEqual(len(data), RECEIPT_SIZE)
        self.assertEqual(RECEIPT_SIZE, 198)
        self.assertEqual(parse_receipt(data), RECEIPT)

    def test_a_receipt_has_the_documented_layout(self) -> None:
        data = RECEIPT.sign(A)
        self.assertEqual(data[:18], b"\1\0" + bytes(range(16)))
        self.assertEqual(data[18:117], SERVER.public + A.public + B.public)
        self.assertEqual(data[117:133], (1000).to_bytes(8, "big") + (2**40).to_bytes(8, "big"))

    @given(st.integers(0, RECEIPT_SIZE * 8 - 1))
    def test_a_flipped_bit_is_found(self, bit: int) -> None:
        data = bytearray(RECEIPT.sign(A))
        data[bit // 8] ^= 1 << bit % 8
        self.assertRaises(ReceiptError, parse_receipt, bytes(data))

    @given(st.binary(max_size=300))
    def test_malformed_receipts_are_named_errors(self, data: bytes) -> None:
        self.assertRaises(ReceiptError, parse_receipt, data)

    def test_signed_by_another(self) -> None:
        self.assertRaisesRegex(ReceiptError, "not signed by the client", parse_receipt, RECEIPT.sign(B))

    def test_a_client_cannot_be_both_ends(self) -> None:
        self.assertRaises(ReceiptError, parse_receipt, replace(RECEIPT, peer=A.public).sign(A))


class VerifyTests(SynchronousTestCase):
    """Files of receipts -> files of checked ones."""

    def row(self, receipt: bytes, producer: str = SERVER.public.hex()) -> bytes:
        row = {
            "v": 1,
            "type": "receipt",
            "producer": producer,
            "role": "server",
            "boot": "b",
            "seq": 7,
            "ts": 5,
            "mono": 1,
        }
        return json.dumps({**row, "receipt": receipt.hex()}).encode() + b"\n"

    def checked(self, line: bytes) -> dict[str, Any]:
        written, _, _ = check_line(line, NAMES.client)
        row: dict[str, Any] = json.loads(written)
        return row

    def test_a_receipt_that_is_believed(self) -> None:
        row = self.checked(self.row(RECEIPT.sign(A)))
        self.assertEqual(row["type"], "receipt_checked")
        self.assertNotIn("reason", row)
        self.assertEqual((row["server"], row["transport"]), (SERVER.public.hex(), bytes(range(16)).hex()))
        self.assertEqual((row["signer"], row["partner"]), (NAMES.client(A.public), NAMES.client(B.public)))
        self.assertEqual((row["initiator"], row["delivered_out"], row["delivered_in"]), (True, 1000, 2**40))
        self.assertEqual((row["seq"], row["ts"]), (7, 5))

    def test_an_invalid_receipt_is_replaced_by_its_reason(self) -> None:
        row = self.checked(self.row(RECEIPT.sign(B)))
        self.assertEqual((row["reason"], row["seq"]), ("the receipt is not signed by the client that it names", 7))
        self.assertNotIn("transport", row)

    def test_receipts_for_another_server_are_refused(self) -> None:
        row = self.checked(self.row(RECEIPT.sign(A), B.public.hex()))
        self.assertEqual(row["reason"], "the receipt is for another server than the one that reports it")
        self.assertNotIn("transport", row)

    def test_a_claim_of_verification_in_a_line_is_ignored(self) -> None:
        """Whoever can write a spool would sign for everybody."""
        forged = {**json.loads(self.row(RECEIPT.sign(A))), "type": "receipt_checked", "transport": "00" * 16}
        forged |= {"server": SERVER.public.hex(), "signer": "a", "partner": "b", "delivered_out": 2**40}
        del forged["receipt"]
        row = self.checked(json.dumps(forged).encode())
        self.assertEqual((row["type"], row["seq"]), ("receipt_checked", 7))
        self.assertEqual(
            row["reason"], "the spool marks the receipt as checked already; only the pipeline checks receipts"
        )
        self.assertFalse({"transport", "server", "signer", "delivered_out"} & set(row))

    @given(st.one_of(st.binary(max_size=100), st.text().map(lambda text: json.dumps({"type": text}).encode())))
    def test_other_lines_are_stored_as_text(self, line: bytes) -> None:
        """No reader, however tolerant, takes the stored text for an event."""
        written, believed, why = check_line(line, NAMES.client)
        self.assertEqual((believed, why), (None, ""))
        self.assertEqual(json.loads(written.removeprefix(b"not read: ")), line[:200].decode(errors="replace"))

    def test_ambiguous_receipts_are_refused(self) -> None:
        good = self.row(RECEIPT.sign(A)).strip().replace(b'"receipt"', b'"receipt_checked"', 1)
        for line in (good.replace(b'"', b"'"), b"[" + good + b"]", good + b"x", b"x\r" + good, b"-INF" + good):
            self.assertTrue(check_line(line, NAMES.client)[0].startswith(b"not read: "), line)

    def test_the_end_of_a_file_stays(self) -> None:
        line = b'{"v":1,"type":"segment_end","lines":3}\n'
        self.assertEqual(check_line(line, NAMES.client), (line, None, ""))

    def test_files_are_checked_once(self) -> None:
        spool, target = Path(self.mktemp()), Path(self.mktemp())
        (spool / "relay").mkdir(parents=True)
        content = self.row(RECEIPT.sign(A)) + self.row(RECEIPT.sign(B)) + b"not json\n"
        (spool / "relay" / "receipts-aa-000001.jsonl.gz").write_bytes(gzip.compress(content))
        first = verify_spool(spool, target, NAMES)
        self.assertEqual((first.files, first.believed, first.refused), (1, 1, 1))
        again = verify_spool(spool, target, NAMES)
        self.assertEqual((again.files, again.believed), (0, 0))
        # The same file arrives twice.
        (spool / "receipts-copy.jsonl.gz").write_bytes((spool / "relay" / "receipts-aa-000001.jsonl.gz").read_bytes())
        self.patch(receipt_files, "parse_receipt", lambda data: self.fail("a signature was verified again"))
        self.assertEqual(verify_spool(spool, target, NAMES).files, 0)
        (path,) = target.glob("receipts-*.jsonl.gz")
        self.assertEqual(len(gzip.decompress(path.read_bytes()).splitlines()), 3)

    def test_a_receipt_counts_once(self) -> None:
        """A receipt has no date: in another file, with other events, it would be credited again."""
        spool, target = Path(self.mktemp()), Path(self.mktemp())
        spool.mkdir()
        first, second = (replace(RECEIPT, transport=bytes([number]) * 16) for number in (1, 2))
        (spool / "receipts-a.jsonl.gz").write_bytes(gzip.compress(self.row(first.sign(A))))
        self.assertEqual(verify_spool(spool, target, NAMES).believed, 1)
        (spool / "receipts-b.jsonl.gz").write_bytes(gzip.compress(self.row(first.sign(A)) + self.row(second.sign(A))))
        again = verify_spool(spool, target, NAMES)
        self.assertEqual((again.believed, again.reasons), (1, {"the receipt was submitted before": 1}))
        # A run that was killed before the file had its name checks the file again.
        for path in target.glob("receipts-*"):
            path.unlink()
        self.assertEqual(verify_spool(spool, target, NAMES).believed, 2)

    def test_parallel_verification_has_the_same_result(self) -> None:
        spool = Path(self.mktemp())
        spool.mkdir()
        receipts = [replace(RECEIPT, transport=sha256(bytes([one]))[:16]) for one in range(12)]
        for number in range(6):
            lines = [self.row(receipt.sign(A)) for receipt in receipts[number : number + 6]]
            lines += [self.row(RECEIPT.sign(B)), b"not json\n", b'{"v":1,"type":"segment_end","lines":8}\n']
            (spool / f"receipts-{number}.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
        (spool / "receipts-gone.jsonl.gz").symlink_to("nowhere")
        self.patch(verify, "SMALL_BYTES", 0)
        results = []
        for processes in (1, 2):
            target = Path(self.mktemp())
            found = verify_spool(spool, target, NAMES, workers=partial(own_processes, processes))
            self.assertEqual((found.files, found.believed, found.refused), (6, 11, 25 + 6))
            self.assertEqual(found.reasons["the receipt was submitted before"], 25)
            results.append({path.name: gzip.decompress(path.read_bytes()) for path in target.glob("receipts-*")})
            self.assertEqual(list(target.glob(".*.part*")), [])
        self.assertEqual(results[0], results[1])

    def test_a_file_is_read_once(self) -> None:
        spool, target = Path(self.mktemp()).absolute(), Path(self.mktemp())
        spool.mkdir()
        path = spool / "receipts-a.jsonl.gz"
        path.write_bytes(gzip.compress(self.row(RECEIPT.sign(A))))
        self.assertEqual(verify_spool(spool, target, NAMES).files, 1)
        reads = self.patch(receipt_files, "verify_file", lambda target, path: self.fail(f"{path} was read"))
        self.assertEqual(verify_spool(spool, target, NAMES).files, 0)
        reads.restore()
        # A changed file counts as another file.
        path.write_bytes(gzip.compress(self.row(replace(RECEIPT, transport=bytes(16)).sign(A)) * 2))
        self.assertEqual(verify_spool(spool, target, NAMES).files, 1)

    def spool_of(self, *names: str) -> Path:
        """Return a spool with a file for each name, each with one receipt of another transport."""
        spool = Path(self.mktemp()).absolute()
        spool.mkdir()
        for name in names:
            receipt = replace(RECEIPT, transport=sha256(name.encode())[:16])
            (spool / f"receipts-{name}.jsonl.gz").write_bytes(gzip.compress(self.row(receipt.sign(A))))
        return spool

    def test_a_file_that_changes_between_the_steps_is_read_again(self) -> None:
        """Its receipts are as new as before."""
        spool, target = self.spool_of("a", "b"), Path(self.mktemp())
        path = spool / "receipts-a.jsonl.gz"
        content = path.read_bytes()

        def run(function: Any, arguments: Any) -> Any:
            if function is receipt_files.write_checked:
                path.write_bytes(gzip.compress(b"other\n"))
            return list(map(function, arguments))

        self.patch(verify, "SMALL_BYTES", 0)
        workers = Workers(1, run)
        found = verify_spool(spool, target, NAMES, workers=lambda: contextlib.nullcontext(workers))
        self.assertEqual((found.files, found.believed, found.left), (1, 1, {Reason.GONE: {str(path)}}))
        (spool / "receipts-c.jsonl.gz").write_bytes(gzip.compress(gzip.decompress(content) + b"more\n"))
        found = verify_spool(spool, target, NAMES)
        self.assertEqual((found.files, found.believed, found.refused), (2, 1, 0))

    def test_a_file_that_cannot_be_written_leaves_nothing(self) -> None:
        """The next run accepts its receipts as if there had been no first attempt."""
        spool, target = self.spool_of("a"), Path(self.mktemp())

        def fail(*_: object) -> None:
            self.assertTrue(list(target.glob(".*.part")))
            raise OSError(errno.ENOSPC, "No space left on device")

        written = self.patch(receipt_files, "check_line", fail)
        self.assertRaises(OSError, verify_spool, spool, target, NAMES)
        self.assertEqual(list(target.glob("*.part")) + list(target.glob(".*.part")), [])
        written.restore()
        self.assertEqual(verify_spool(spool, target, NAMES).believed, 1)

    def test_workers_that_do_not_see_the_files(self) -> None:
        """What workers on another machine cannot read or write, this process reads and writes."""
        spool, target = self.spool_of("a", "b"), Path(self.mktemp())
        self.patch(verify, "SMALL_BYTES", 0)

        def run(function: Any, arguments: Any) -> Any:
            if function is not receipt_files.write_checked:
                return [UnreadFile(path, Reason.GONE) for path in arguments]
            return [CheckedCounts(1) for _ in arguments]

        for share, files in ((True, 0), (False, 2)):
            workers: Any = partial(contextlib.nullcontext, Workers(2, run, share_files=share))
            found = verify_spool(spool, target, NAMES, workers=workers)
            self.assertEqual((found.files, found.believed), (files, files))
        self.assertEqual(len(list(target.glob("receipts-*"))), 2)
        self.assertEqual(list(target.glob(".*.part")), [])

    def test_workers_get_no_secret_and_few_files_at_a_time(self) -> None:
        spool, target = self.spool_of(*"abcdef"), Path(self.mktemp())
        sent: list[Any] = []

        def run(function: Any, arguments: Any) -> Any:
            sent.append(pickle.dumps((function, arguments)))
            return list(map(function, arguments))

        self.patch(verify, "SMALL_BYTES", 0)
        self.patch(verify, "WORKER_BYTES", (spool / "receipts-a.jsonl.gz").stat().st_size + 50)
        secret = bytes(range(32))
        workers = Workers(2, run)
        names = Pseudonyms(secret)
        found = verify_spool(spool, target, names, workers=lambda: contextlib.nullcontext(workers))
        self.assertEqual((found.files, len(sent)), (6, 6), "three batches of two files, in two steps")
        self.assertFalse([one for one in sent if secret in one])
        self.assertTrue([one for one in sent if Pseudonyms(secret).client(A.public).encode() in one])

    def test_processes_end_with_their_parent(self) -> None:
        """Even if it is killed: its own handlers then do nothing."""
        path = Path(self.mktemp()).absolute()
        code = (
            "import os, pathlib, signal, sys\n"
            "from dmsg.telemetry.verify import own_processes\n"
            "from tests.telemetry.test_receipts import process_of_worker\n"
            "with own_processes(2) as workers:\n"
            "    processes = set(workers.run(process_of_worker, range(8)))\n"
            "    pathlib.Path(sys.argv[1]).write_text(' '.join(map(str, processes)))\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        nothing = subprocess.DEVNULL
        done = subprocess.run([sys.executable, "-c", code, str(path)], stdout=nothing, stderr=nothing, check=False)
        self.assertEqual(done.returncode, -signal.SIGKILL)
        processes = [int(one) for one in path.read_text().split()]
        self.assertTrue(processes)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process)
                self.addCleanup(os.close, descriptor)
                if not select.select([descriptor], [], [], 60)[0]:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    self.fail(f"process {process} goes on")

    def test_seen_receipts_are_forgotten_in_generations(self) -> None:
        path = Path(self.mktemp())
        for day, new in (
            (0, True),
            (GENERATION_DAYS - 1, False),
            (GENERATION_DAYS, False),
            (2 * GENERATION_DAYS, True),
        ):
            with contextlib.closing(ReceiptsSeen(path, day * 86400.0)) as seen:
                seen.begin()
                self.assertEqual(seen.are_new([7], f"{day + 1:032x}"[::-1]), [new], day)
                seen.keep()
        path.write_bytes(b"no database" * 1000)
        self.assertRaisesRegex(DmsgError, "cannot be used", ReceiptsSeen, path)

    def test_torn_and_foreign_files(self) -> None:
        spool, target = Path(self.mktemp()), Path(self.mktemp())
        spool.mkdir()
        receipts = [replace(RECEIPT, transport=sha256(bytes([one]))[:16]) for one in range(50)]
        whole = gzip.compress(b"".join(self.row(receipt.sign(A)) for receipt in receipts))
        (spool / "receipts-torn.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        (spool / "receipts-noise.jsonl.gz").write_bytes(b"\0\1\2" * 100)
        found = verify_spool(spool, target, NAMES)
        self.assertEqual(found.files, 2)
        self.assertGreater(found.believed, 0)
        self.assertLess(found.believed, 50)
