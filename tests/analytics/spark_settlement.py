"""Three counts of transports that ended while data was in flight: which servers are honest, and which are not."""

from __future__ import annotations

from typing import Any, ClassVar

from dmsg.analytics.gold import settlement
from dmsg.analytics.schemas import LIES
from dmsg.streams.core import resumption, secure
from tests.analytics.support import DAY, Boot, RulesCase, key

MB = 1_000_000


class Words(RulesCase):
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
        by: str | None = "src",
        reason: str = "unspecified",
        lie: float = 1.0,
        src: str = "a",
        dst: str = "b",
        named: str = "",
    ) -> str:
        """A transport: each way what was taken, what its sender knows to have arrived, what its receiver has.

        :param named: by the one who was asked, as who asked.
        """
        self.count += 1
        boot = self.boots.setdefault(server, Boot(server, f"boot of {server[-4:]}"))
        name = f"{self.count:032x}"
        both: dict[str, Any] = {"transport": name, "src": src, "dst": dst, "secure": True, "accept_ms": 3}
        claim_ab, claim_ba = (round(way[0] * lie) for way in (ab, ba))
        counted = {"data_ab": claim_ab, "data_ba": claim_ba, "total_ab": claim_ab, "total_ba": claim_ba}
        if dropped:
            counted["dropped_ab"] = dropped
        time = f"{self.count // 3600:02d}:{self.count // 60 % 60:02d}:{self.count % 60:02d}"
        boot.event("transport_open", DAY, time, **both)
        boot.event("transport_close", DAY, time, reason=reason, by=by, duration_ms=10, **both, **counted)
        for initiator, out, received in ((True, ab[1], ba[2]), (False, ba[1], ab[2])):
            if out is not None and received is not None:
                me, other = (f"s-{src}", f"s-{dst}") if initiator else (f"s-{dst}", named or f"s-{src}")
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
        return name

    def former(self, server: str, transport: str, peer: str, initiator: bool, out: int, received: int) -> None:
        """A receipt that was handed in after the server's start, by whom it knows as ``peer``."""
        me, other = (f"s-{peer}", "s-b") if initiator else (f"s-{peer}", "s-a")
        said = {"signer": me, "partner": other, "initiator": initiator, "delivered_out": out, "delivered_in": received}
        where = {"server": server, "transport": transport, "former": True, "peer": peer}
        self.receipts.event("receipt_checked", DAY, "23:00:00", **where, **said)

    def overflowing(self, server: str, lie: float = 1.0) -> None:
        """Add the events of a 400 MB copy to a slow receiver, with the numbers of a real run."""
        for taken, told, got, dropped in (
            (89_980_884, 81_854_420, 89_915_392, 65_492),
            (60_162_136, 51_773_528, 60_096_468, 65_668),
            (51_314_732, 42_991_616, 51_249_240, 65_492),
            (75_235_328, 66_912_212, 75_169_836, 65_492),
        ):
            self.carried(server, (taken, told, got), dropped=dropped, by="server", reason="queue_full", lie=lie)
        self.carried(server, (101_974_048,) * 3, (16, 16, 16), lie=lie)

    def left_early(self, server: str, lie: float = 1.0) -> None:
        """Make downloads that the receiver aborted. Nobody received the data in transit."""
        for number in range(20):
            got = MB * (1 + number)
            self.carried(server, (300, 300, 300), (got + got // 2, got, got), by="src", reason="aborted", lie=lie)
            self.carried(server, (5_000, 5_000, 5_000), (9_000, 9_000, 9_000), lie=lie)

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Server -> its day, after both engines said the same."""
        self.refine([row for boot in self.boots.values() for row in boot.rows], self.receipts.rows)
        return {row["server"]: row for row in self.made("settlement_day")}


HONEST, LIAR, EARLY, EARLY_LIAR, PEER_LOST = (key(number) for number in range(1, 6))
FRIEND_SENDS, FRIEND_RECEIVES, GENEROUS = (key(number) for number in range(6, 9))
CLAIMS = ((key(11), "src", 1.03), (key(12), "server", 1.03), (key(13), None, 3.0), (key(14), "server", 1.0))
"""Servers that name themselves or a client as the one who ended their transports, and by how much they lie."""
DENIED, SIDED, STRANGERS = (key(number) for number in range(21, 24))
RESTARTED = key(31)


class CutTests(Words):
    """Bounds that both ends can prove for a transport that was cut off.

    Each test has servers of its own. The tables of all servers are computed once.
    """

    _days: ClassVar[dict[type, dict[str, dict[str, Any]]]] = {}
    """Day of each server, by the class of tests that has computed it."""

    def setUp(self) -> None:
        super().setUp()
        if type(self) not in self._days:
            self.cut_off()
            self.ended_by_themselves()
            self.accused()
            self.restarted()
            self._days[type(self)] = self.verdicts()
        self.day = self._days[type(self)]

    def cut_off(self) -> None:
        self.overflowing(HONEST)
        self.overflowing(LIAR, lie=1.03)
        self.left_early(EARLY)
        self.left_early(EARLY_LIAR, lie=1.03)
        # The receiver was lost with 9 MB in its queue, and signs nothing.
        self.carried(PEER_LOST, (50 * MB, 41 * MB, None), dropped=8 * MB, by="dst", reason="peer_disconnected")
        self.carried(PEER_LOST, (50 * MB,) * 3)
        # A sender that counts more bytes than its receiver got does not merely lack an acknowledgement.
        for _ in range(3):
            self.carried(FRIEND_SENDS, (12 * MB, 12 * MB, 10 * MB), by="server", reason="queue_full")
        # A receiver cannot have more bytes than a window lets pass.
        for _ in range(3):
            self.carried(FRIEND_RECEIVES, (90 * MB, 40 * MB, 90 * MB), by="server", reason="queue_full")
        # More than one window cannot have been in transit to the end that closed.
        for _ in range(3):
            self.carried(GENEROUS, (100, 100, 100), (80 * MB, 30 * MB, 30 * MB), by="src", reason="aborted")

    def test_who_lies_and_who_does_not(self) -> None:
        day = self.day
        self.assertEqual(day[HONEST]["verdict"], "agrees")
        self.assertEqual((day[HONEST]["cut"], day[HONEST]["matched"], day[HONEST]["conflict"]), (4, 1, 0))
        self.assertEqual(day[HONEST]["inflation"], 0.0)
        # The senders had no acknowledgement for these bytes. None of these bytes is credited.
        self.assertEqual(day[HONEST]["uncertain_bytes"], 8_060_972 + 8_322_940 + 8_257_624 + 8_257_624)
        self.assertEqual(day[HONEST]["claimed_bytes"] - day[HONEST]["credited_bytes"], day[HONEST]["uncertain_bytes"])

        self.assertEqual(day[LIAR]["verdict"], "claims more than both ends")
        self.assertAlmostEqual(day[LIAR]["inflation"], 0.03, 3)

        self.assertEqual((day[EARLY]["verdict"], day[EARLY]["conflict"]), (settlement.UNCERTAIN, 0))
        self.assertEqual((day[EARLY]["cut"], day[EARLY]["inflation"]), (20, 0.0))
        self.assertEqual(day[EARLY_LIAR]["verdict"], "claims more than both ends")

        self.assertEqual((day[PEER_LOST]["verdict"], day[PEER_LOST]["one_sided"]), ("agrees", 1))
        self.assertEqual(day[PEER_LOST]["claimed_bytes"], 92 * MB)

        self.assertEqual(day[FRIEND_SENDS]["verdict"], "claims more, supported by one end")
        self.assertEqual(day[FRIEND_RECEIVES]["verdict"], "claims more, supported by one end")
        self.assertEqual((day[GENEROUS]["conflict"], day[GENEROUS]["inflated_bytes"]), (3, 150 * MB))

    def ended_by_themselves(self) -> None:
        for server, by, lie in CLAIMS:
            for _ in range(20):
                size = 5 * MB if lie > 2 else 100 * MB
                self.carried(server, (size,) * 3, (size // 2,) * 3, by=by, reason="queue_full", lie=lie)

    def test_who_says_that_it_ended_everything_itself_is_not_called_honest(self) -> None:
        """Only the server's own events say who ended a transport."""
        self.assertEqual(
            [self.day[server]["verdict"] for server, _, _ in CLAIMS],
            [LIES, settlement.UNCERTAIN, settlement.UNCERTAIN, "agrees"],
        )

    def accused(self) -> None:
        for server in (DENIED, SIDED, STRANGERS):
            for number in range(60):
                self.carried(server, (MB, MB, MB), (MB, MB, MB), src=f"client {number}")
        self.carried(DENIED, (50 * MB, 0, 0), src="m1", dst="m2")
        for _ in range(2):
            self.carried(SIDED, (10_000, 10_000, 0), src="m1", dst="m2")
            self.carried(STRANGERS, (10, 10, 10), src="m1", dst="m2", named="somebody")

    def test_two_that_lie_together_accuse_nobody(self) -> None:
        """Keys cost nothing. So a client with two keys, or ten bytes of traffic, must not cost a server its clients."""
        day = self.day
        self.assertEqual(
            (day[DENIED]["verdict"], day[DENIED]["witnesses"], day[DENIED]["accusers"]),
            ("claims more, as few of its clients say", 61, 1),
        )
        self.assertEqual(day[SIDED]["verdict"], "claims more, supported by one end")
        self.assertEqual((day[STRANGERS]["verdict"], day[STRANGERS]["conflict"]), ("agrees", 2))

    def restarted(self) -> None:
        names = [self.carried(RESTARTED, (MB, MB, None)) for _ in range(4)]
        for number, name in enumerate(names):
            self.former(RESTARTED, name, "b", number == 3, 0, MB if number < 3 else 0)
            self.former(RESTARTED, name, "third", False, 0, 0)

    def test_who_was_no_end_says_nothing(self) -> None:
        """After a restart the server does not know the ends of a transport, but its earlier events name them."""
        row = self.day[RESTARTED]
        self.assertEqual((row["matched"], row["one_sided"], row["conflict"]), (3, 1, 0))

    def test_windows_are_those_of_the_transports(self) -> None:
        self.assertEqual(settlement.FIRST_WINDOW, resumption.INITIAL_WINDOW)
        self.assertEqual(settlement.MAX_WINDOW, secure.MAX_WINDOW)
