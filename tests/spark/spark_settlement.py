"""Three words of transports that ended while data was on its way: who is honest, and who is not."""

from __future__ import annotations

from typing import Any

from dmsg.analytics.gold import settlement
from dmsg.transport import secure
from tests.spark.spark_oracle import compare
from tests.spark.support import DAY, NOW, Boot, LakeCase, key, write_file

MB = 1_000_000


class Words(LakeCase):
    """Servers with what they and the two ends say of their transports."""

    def setUp(self) -> None:
        super().setUp()
        self.boots: dict[str, Boot] = {}
        self.receipts = Boot(key(99), "receipts")
        self.count = 0

    def carried(
        self,
        server: str,
        ab: tuple[int, int | None, int | None],
        ba: tuple[int, int | None, int | None] = (0, 0, 0),
        *,
        dropped: int = 0,
        by: str = "src",
        reason: str = "unspecified",
        lie: float = 1.0,
    ) -> None:
        """A transport: each way what was taken, what its sender knows to have arrived, what its receiver has."""
        self.count += 1
        boot = self.boots.setdefault(server, Boot(server, f"boot of {server[-4:]}"))
        name = f"{self.count:032x}"
        both: dict[str, Any] = {"transport": name, "src": "a", "dst": "b", "secure": True, "accept_ms": 3}
        claim_ab, claim_ba = (round(way[0] * lie) for way in (ab, ba))
        counted = {"data_ab": claim_ab, "data_ba": claim_ba, "total_ab": claim_ab, "total_ba": claim_ba}
        if dropped:
            counted["dropped_ab"] = dropped
        time = f"{self.count // 3600:02d}:{self.count // 60 % 60:02d}:{self.count % 60:02d}"
        boot.event("transport_open", DAY, time, **both)
        boot.event("transport_close", DAY, time, reason=reason, by=by, duration_ms=10, **both, **counted)
        for initiator, out, received in ((True, ab[1], ba[2]), (False, ba[1], ab[2])):
            if out is not None and received is not None:
                me, other = ("s-a", "s-b") if initiator else ("s-b", "s-a")
                self.receipts.event(
                    "receipt_checked",
                    DAY,
                    time,
                    server=server,
                    transport=name,
                    signer=me,
                    partner=other,
                    initiator=initiator,
                    delivered_out=out,
                    delivered_in=received,
                )

    def overflowing(self, server: str, lie: float = 1.0) -> None:
        """As a copy of 400 MB left them whose receiver was slow: numbers of a real run."""
        for taken, told, got, dropped in (
            (89_980_884, 81_854_420, 89_915_392, 65_492),
            (60_162_136, 51_773_528, 60_096_468, 65_668),
            (51_314_732, 42_991_616, 51_249_240, 65_492),
            (75_235_328, 66_912_212, 75_169_836, 65_492),
        ):
            self.carried(server, (taken, told, got), dropped=dropped, by="server", reason="queue_full", lie=lie)
        self.carried(server, (101_974_048,) * 3, (16, 16, 16), lie=lie)

    def left_early(self, server: str, lie: float = 1.0) -> None:
        """Downloads that the one who asked for them ended: what was on its way then, nobody took."""
        for number in range(20):
            got = MB * (1 + number)
            self.carried(server, (300, 300, 300), (got + got // 2, got, got), by="src", reason="aborted", lie=lie)
            self.carried(server, (5_000, 5_000, 5_000), (9_000, 9_000, 9_000), lie=lie)

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Server -> its day, after both engines said the same."""
        for number, boot in enumerate(self.boots.values()):
            write_file(self.spool / f"events-{number}.jsonl.gz", boot.rows)
        write_file(self.checked / "receipts-1.jsonl.gz", self.receipts.rows)
        self.run_jobs()
        found = compare(self.pipeline().lake, self.spool, self.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])
        return {row["server"]: row for row in self.table("settlement_day")}


class CutTests(Words):
    """What both ends can know, and no more."""

    def test_who_lies_and_who_does_not(self) -> None:
        honest, liar, early, early_liar, peer_lost = (key(number) for number in range(1, 6))
        friend_sends, friend_receives, generous = (key(number) for number in range(6, 9))
        self.overflowing(honest)
        self.overflowing(liar, lie=1.03)
        self.left_early(early)
        self.left_early(early_liar, lie=1.03)
        # the receiver was lost with 9 MB in its queue, and signs nothing
        self.carried(peer_lost, (50 * MB, 41 * MB, None), dropped=8 * MB, by="dst", reason="peer_disconnected")
        self.carried(peer_lost, (50 * MB,) * 3)
        # a sender that says more than its receiver has is no sender that has not heard
        for _ in range(3):
            self.carried(friend_sends, (12 * MB, 12 * MB, 10 * MB), by="server", reason="queue_full")
        # nor does a receiver have what no window let go
        for _ in range(3):
            self.carried(friend_receives, (90 * MB, 40 * MB, 90 * MB), by="server", reason="queue_full")
        # more than a window cannot have been on its way to one that closed
        for _ in range(3):
            self.carried(generous, (100, 100, 100), (80 * MB, 30 * MB, 30 * MB), by="src", reason="aborted")
        day = self.verdicts()

        self.assertEqual(day[honest]["verdict"], "agrees")
        self.assertEqual((day[honest]["cut"], day[honest]["matched"], day[honest]["conflict"]), (4, 1, 0))
        self.assertEqual(day[honest]["inflation"], 0.0)
        # what the senders had not heard of, and nothing of it is credited
        self.assertEqual(day[honest]["uncertain_bytes"], 8_060_972 + 8_322_940 + 8_257_624 + 8_257_624)
        self.assertEqual(day[honest]["claimed_bytes"] - day[honest]["credited_bytes"], day[honest]["uncertain_bytes"])

        self.assertEqual(day[liar]["verdict"], "claims more than both ends")
        self.assertAlmostEqual(day[liar]["inflation"], 0.03, 3)

        self.assertEqual((day[early]["verdict"], day[early]["conflict"]), ("agrees", 0))
        self.assertEqual((day[early]["cut"], day[early]["inflation"]), (20, 0.0))
        self.assertEqual(day[early_liar]["verdict"], "claims more than both ends")

        self.assertEqual((day[peer_lost]["verdict"], day[peer_lost]["one_sided"]), ("agrees", 1))
        self.assertEqual(day[peer_lost]["claimed_bytes"], 92 * MB)

        self.assertEqual(day[friend_sends]["verdict"], "claims more, with one end's word")
        self.assertEqual(day[friend_receives]["verdict"], "claims more, with one end's word")
        self.assertEqual((day[generous]["conflict"], day[generous]["inflated_bytes"]), (3, 150 * MB))

    def test_windows_are_those_of_the_transports(self) -> None:
        self.assertEqual(settlement.FIRST_WINDOW, secure.INITIAL_WINDOW)
        self.assertEqual(settlement.MAX_WINDOW, secure.MAX_WINDOW)
