"""Verification of receipts by tasks of Spark."""

from __future__ import annotations

import gzip
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import executors
from dmsg.analytics.executors import ExecutorsFailed
from dmsg.analytics.session import SparkOnDemand
from dmsg.cli.pipeline import receipt_workers
from dmsg.cli.pipeline.receipt_workers import spark_workers
from dmsg.keys import SecKey, sha256
from dmsg.telemetry import verify
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipts import Receipt, Role
from dmsg.telemetry.verify import Verification, own_processes, verify_spool
from tests.analytics.support import spark

A, B, SERVER = (SecKey.from_seed(bytes([number])) for number in range(3))


class ReceiptTests(SynchronousTestCase):
    """Files of receipts."""

    def setUp(self) -> None:
        self.spool = Path(self.mktemp()).absolute()
        self.spool.mkdir()
        envelope = {"v": 1, "type": "receipt", "producer": SERVER.public.hex(), "role": "server", "boot": "b"}
        for number in range(5):
            lines = []
            for seq in range(4):
                # Neighbouring files have two receipts in common, and each file has one with a wrong signature.
                transport = sha256(bytes([2 * number + seq]))[:16]
                receipt = Receipt(Role.INITIATOR, transport, SERVER.public, A.public, B.public, 7, 8)
                signed = receipt.sign(B if seq == 3 else A).hex()
                lines.append(json.dumps(envelope | {"seq": seq, "ts": 5, "mono": 1, "receipt": signed}))
            text = "\n".join([*lines, "no json", '{"v":1,"type":"segment_end","lines":6}', ""])
            (self.spool / f"receipts-{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        self.patch(verify, "SMALL_BYTES", 0)

    def verified(self, workers: Any = None) -> tuple[Verification, dict[str, bytes]]:
        """Return the result, and the text of each checked file."""
        target = Path(self.mktemp()).absolute()
        found = verify_spool(self.spool, target, Pseudonyms(bytes(32)), workers=workers)
        self.assertEqual(list(target.glob(".*.part")), [])
        return found, {path.name: gzip.decompress(path.read_bytes()) for path in target.glob("receipts-*")}

    def test_tasks_give_the_same_result_as_this_process(self) -> None:
        expected = self.verified(partial(own_processes, 1))
        self.assertEqual((expected[0].files, expected[0].believed, expected[0].refused), (5, 11, 9))
        self.patch(receipt_workers, "own_processes", lambda: self.fail("Spark did not do it"))
        self.assertEqual(self.verified(spark_workers(SparkOnDemand(spark))), expected)

    def test_executors_that_cannot_do_it(self) -> None:
        """Processes of this machine then do it, and the reason is logged once."""
        expected = self.verified(partial(own_processes, 1))
        failed: list[object] = []

        def fail(results: object) -> Any:
            failed.append(results)
            raise ExecutorsFailed("no module named coincurve")

        self.patch(executors, "collect", fail)
        self.patch(verify, "WORKER_BYTES", 1)
        with self.assertLogs(receipt_workers.__name__, logging.WARNING) as logged:
            self.assertEqual(self.verified(spark_workers(SparkOnDemand(spark))), expected)
        self.assertEqual((len(failed), len(logged.output)), (1, 1))
        self.assertIn("no module named coincurve", logged.output[0])
