"""A server's word that a sender may bring its events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey, load_or_create_key
from dmsg.telemetry.service import Telemetry
from dmsg.telemetry.settings import TelemetrySettings
from dmsg.telemetry.vouchers import SENDER_KEY_FILE, is_vouched, voucher_for, write_voucher

SERVER = SecKey.from_seed(b"server")


class VoucherTests(SynchronousTestCase):
    """Vouchers in a directory of events."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()

    def events(self, producer: object, name: str = "events") -> Path:
        path = self.directory / name
        path.write_bytes(gzip.compress(json.dumps({"producer": producer}).encode() + b"\n"))
        return path

    def test_a_server_with_telemetry_writes_a_voucher(self) -> None:
        Telemetry(Clock(), TelemetrySettings(self.directory), "server", SERVER)
        sender = load_or_create_key(self.directory / SENDER_KEY_FILE).public
        voucher = voucher_for(self.events(SERVER.public.hex()))
        self.assertTrue(is_vouched(SERVER.public, sender, voucher))
        self.assertFalse(is_vouched(SERVER.public, SERVER.public, voucher))
        self.assertFalse(is_vouched(sender, sender, voucher))
        self.assertEqual((self.directory / SENDER_KEY_FILE).stat().st_mode & 0o777, 0o600)

    def test_the_voucher_follows_the_senders_key(self) -> None:
        write_voucher(self.directory, SERVER)
        before = voucher_for(self.events(SERVER.public.hex()))
        write_voucher(self.directory, SERVER)
        self.assertEqual(voucher_for(self.events(SERVER.public.hex())), before)
        (self.directory / SENDER_KEY_FILE).unlink()
        write_voucher(self.directory, SERVER)
        self.assertNotEqual(voucher_for(self.events(SERVER.public.hex())), before)

    def test_files_for_which_there_is_none(self) -> None:
        write_voucher(self.directory, SERVER)
        for producer in ("discovery-12345678", SecKey.from_seed(b"other").public.hex(), 5, "../../etc/passwd"):
            self.assertEqual(voucher_for(self.events(producer)), "", producer)
        self.assertEqual(voucher_for(self.directory / "absent"), "")
        torn = self.directory / "torn"
        torn.write_bytes(b"no gzip")
        self.assertEqual(voucher_for(torn), "")
        (self.directory / f"{SERVER.public}.voucher").write_text("nonsense")
        self.assertEqual(voucher_for(self.events(SERVER.public.hex())), "")

    def test_a_senders_key_that_cannot_be_read_stops_no_server(self) -> None:
        (self.directory / SENDER_KEY_FILE).write_text("nonsense")
        Telemetry(Clock(), TelemetrySettings(self.directory), "server", SERVER)
