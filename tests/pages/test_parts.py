"""The parts of a page, by plain calls."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.service.delegations import CLIENT_LIFETIME, MAX_CLIENTS, Delegations
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.pages.access import Access, read_token
from dmsg.pages.drawing import draw, with_unit
from dmsg.pages.history import MAX_NAMES, MAX_SAMPLES, Growth, History, Quantiles, reason_number
from dmsg.pages.model import Chart, Fact, Line, Table
from dmsg.pages.recent_events import MAX_CHANGES, RecentEvents
from dmsg.pages.rendering import facts_list, flatten, table

FRAMES = Line("received", "frames", rate=True)
CLIENTS = Line("connected", "clients")


class HistoryTests(SynchronousTestCase):
    """Numbers over time."""

    def test_rates_and_values(self) -> None:
        samples = History()
        self.assertEqual((samples.points(FRAMES), samples.now(FRAMES)), ([], None))
        for at, frames, clients in ((0, 0, 1), (2, 20, 2), (4, 60, 3)):
            samples.add(100.0 + at, {"frames": frames, "clients": clients})
        self.assertEqual(samples.points(FRAMES), [(2.0, 10.0), (0.0, 20.0)])
        self.assertEqual(samples.points(CLIENTS), [(4.0, 1.0), (2.0, 2.0), (0.0, 3.0)])
        self.assertEqual((samples.now(FRAMES), samples.now(CLIENTS), samples.seconds), (15.0, 3, 4.0))

    def test_a_new_counter_grows_from_zero(self) -> None:
        """The first refusal of a kind counts as growth from 0."""
        samples, line = History(), Line("flood", reason_number("flood"), rate=True)
        for at in (0.0, 2.0):
            samples.add(at, {})
        samples.add(4.0, {}, {reason_number("flood"): 10.0})
        self.assertEqual(samples.points(line), [(2.0, 0.0), (0.0, 5.0)])

    def test_a_counter_that_starts_anew(self) -> None:
        samples = History()
        for at, frames in ((0, 1000), (1, 7)):
            samples.add(at, {"frames": frames})
        self.assertEqual(samples.points(FRAMES), [(0.0, 7.0)])
        self.assertEqual(samples.now(FRAMES), 0.0)

    def test_the_history_is_bounded(self) -> None:
        samples = History()
        for at in range(MAX_SAMPLES + 50):
            samples.add(at, {f"n{number}": at for number in range(MAX_NAMES + 10)})
        self.assertEqual(len(samples), MAX_SAMPLES)
        self.assertEqual(len(samples.points(Line("", "n0"))), MAX_SAMPLES)
        self.assertEqual(samples.points(Line("", f"n{MAX_NAMES}")), [])

    def test_counters_may_appear_and_disappear(self) -> None:
        samples = History()
        samples.add(0, {"a": 1})
        samples.add(1, {"a": 2, "b": 5})
        samples.add(2, {"b": 6})
        self.assertEqual(samples.points(Line("", "a")), [(2.0, 1), (1.0, 2)])
        self.assertEqual(samples.points(Line("", "b")), [(1.0, 5), (0.0, 6)])
        self.assertEqual((samples.now(Line("", "a")), samples.now(Line("", "b"))), (None, 6))

    @given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.lists(st.integers(0, 50), min_size=4, max_size=4))
    def test_quantiles_cover_samples_since_the_last_reading(self, before: list[int], grown: list[int]) -> None:
        borders = (1.0, 2.0, 4.0, float("inf"))
        quantiles = Quantiles(borders)
        quantiles.since([float(one) for one in before], 0.5)
        after = [float(old + new) for old, new in zip(before, grown, strict=True)]
        found = quantiles.since(after, 0.5, 1.0)
        if not sum(grown):
            self.assertEqual(found, [])
            return
        half, most = found
        each = [min(border, 4.0) for border, number in zip(borders, grown, strict=True) for _ in range(number)]
        self.assertEqual(most, each[-1])
        self.assertEqual(half, each[(len(each) + 1) // 2 - 1])

    def test_growth_is_the_rate_between_two_measurements(self) -> None:
        growth: Growth[str] = Growth()
        self.assertEqual(growth.since(10.0, {"a": 100.0}), {"a": 0.0})
        self.assertEqual(growth.since(12.0, {"a": 150.0, "b": 9.0}), {"a": 25.0, "b": 4.5})
        self.assertEqual(growth.since(12.0, {"a": 160.0}), {"a": 0.0})


class RecentEventsTests(SynchronousTestCase):
    """Recent events on a page."""

    def test_changes_and_counts(self) -> None:
        recent_events = RecentEvents()
        recent_events.update(0.0, [Fact("State", "ok", is_event=True), Fact("Up for", "1 s")], {"flood": 5})
        self.assertEqual(list(recent_events.events), [])
        recent_events.update(
            2.0, [Fact("State", "draining", is_event=True), Fact("Up for", "3 s")], {"flood": 8, "refused": 1}
        )
        self.assertEqual(
            recent_events.events, [(2.0, "State: draining (was ok)"), (2.0, "flood: 3"), (2.0, "refused: 1")]
        )
        # Repeated facts form one event with their sum, and the time of the last one. Each reason has an event of its
        # own.
        recent_events.update(20.0, [Fact("State", "ok", is_event=True)], {"flood": 10})
        self.assertEqual(
            recent_events.events[1:],
            [(2.0, "refused: 1"), (20.0, "State: ok (was draining)"), (20.0, "flood: 5 in 18 s")],
        )
        recent_events.update(60.0, [Fact("State", "ok", is_event=True)], {"flood": 11})
        self.assertEqual(recent_events.events[-1], (60.0, "flood: 1"))
        self.assertEqual(len(recent_events.events), 4)

    def test_repeated_events_do_not_fill_the_list(self) -> None:
        recent_events = RecentEvents()
        recent_events.update(0.0, [Fact("State", "ok", is_event=True)], {"flood": 0})
        recent_events.update(1.0, [Fact("State", "draining", is_event=True)], {"flood": 0})
        for at in range(2000):
            recent_events.update(at * 31.0, [Fact("State", "draining", is_event=True)], {"flood": at, f"r{at % 5}": at})
        self.assertIn((1.0, "State: draining (was ok)"), recent_events.events)
        self.assertEqual(len(recent_events.events), 7)
        for at in range(200):
            recent_events.update(1e6 + at, [Fact("State", str(at), is_event=True)], {})
        self.assertEqual(len(recent_events.events), MAX_CHANGES + 6)


class RenderingTests(SynchronousTestCase):
    """Text that strangers choose never becomes markup."""

    def test_a_line_has_a_gap_where_nothing_was_measured(self) -> None:
        """A server without clients measures no relay delay; a line across that time would invent values."""
        samples, chart = History(), Chart("delay", "ms", (Line("median", "delay"),))
        for second in range(0, 300, 2):
            samples.add(second, {"delay": 1.0} if second <= 60 and second % 10 == 0 or second in (150, 298) else {})
        text = flatten(draw(chart, samples))
        lines = re.findall(r'<polyline class="line c0" points="([^"]*)"', text)
        self.assertEqual([len(line.split()) for line in lines], [7, 2, 2])
        places = [float(line.split()[-1].split(",")[0]) for line in lines]
        self.assertEqual(places, [60.4, 152.0, 300.0])
        self.assertEqual(text.count("<polygon"), 3)

    def test_cells_are_escaped(self) -> None:
        found = flatten(table(Table("<b>", ("<i>",), [("<script>alert(1)</script>\x1b[2J",)])))
        self.assertNotIn("<script", found)
        self.assertNotIn("\x1b", found)
        self.assertIn("&lt;script&gt;", found)

    def test_keys_and_numbers(self) -> None:
        key = PubKey.from_hex("02" + "ab" * 32)
        no_key = "02" + "ff" * 32
        rows = [(key.hex(), "1.2 MB/s", "0.0.1+relay1"), (no_key, "2 B/s", "0.0.1")]
        found = flatten(table(Table("T", ("Client", "Now", "Version"), rows)))
        self.assertIn(f'title="{key.text}, in logs and JSON: {key}">{key.text[:8]}…</code>', found)
        self.assertIn(f'<td class="text">{no_key}</td>', found)
        self.assertIn('<td class="number">1.2 MB/s</td>', found)
        self.assertIn('<td class="text">0.0.1+relay1</td>', found)
        self.assertIn('<th class="number">Now</th>', found)

    def test_a_narrow_card_breaks_an_address_before_its_port(self) -> None:
        for value, shown in (
            ("192.168.177.201:8080", '192.168.177.201<span class="port">:8080</span>'),
            ("[2001:db8::1]:8080", '[2001:db8::1]<span class="port">:8080</span>'),
            ("27 Nov 18:12", "27 Nov 18:12"),
            ("none", "none"),
        ):
            self.assertIn(f'<dd class="plain">{shown}</dd>', flatten(facts_list([Fact("Address", value)])))

    @given(st.lists(st.floats(0, 1e12), max_size=20))
    def test_every_chart_can_be_drawn(self, values: list[float]) -> None:
        samples = History()
        for at, value in enumerate(values):
            samples.add(float(at), {"frames": value, "clients": value})
        for unit in ("bytes", "bytes/s", "ms", "/s", ""):
            found = flatten(draw(Chart("Some", unit, (FRAMES, CLIENTS)), samples))
            self.assertNotIn("nan", found)
            self.assertNotIn("inf", found)
            self.assertTrue(with_unit(1.0, unit))


class Asking:
    """A request, as far as access looks."""

    def __init__(self, host: str = "127.0.0.1", named: str = "127.0.0.1:9100", **headers: str) -> None:
        kind: Any = IPv6Address if ":" in host else IPv4Address
        self._address = kind("TCP", host, 1)
        self._headers = {"host": named, **{name.replace("_", "-"): value for name, value in headers.items()}}

    def getClientAddress(self) -> Any:
        return self._address

    def getHeader(self, name: bytes) -> bytes | None:
        value = self._headers.get(name.decode())
        return None if value is None else value.encode()


class AccessTests(SynchronousTestCase):
    """Access to the pages."""

    def test_viewers_on_this_machine_are_admitted(self) -> None:
        for host in ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"):
            for named in ("127.0.0.1", "127.0.0.1:9100", "localhost", "LOCALHOST:1", "[::1]:9100", "[::1]"):
                self.assertIsNone(Access().refuses(Asking(host, named)), (host, named))

    def test_other_viewers_are_refused_without_a_token(self) -> None:
        for asking in (
            Asking("192.0.2.1"),
            Asking("10.0.0.1"),
            Asking("2001:db8::1"),
            Asking(named="evil.example"),  # Somebody else's host name points here.
            Asking(named="evil.example:9100"),
            Asking(named="localhost.evil.example"),
            Asking(named=""),
            Asking(x_forwarded_for="127.0.0.1"),  # The request comes through a proxy on this machine.
            Asking(forwarded="for=127.0.0.1"),
            Asking(via="1.1 proxy"),
            Asking(x_forwarded_proto="https"),
            Asking(cf_connecting_ip="192.0.2.1"),
        ):
            refused = Access().refuses(asking)
            assert refused is not None
            self.assertEqual(refused[0], 403)

    def test_a_token_admits_other_viewers(self) -> None:
        access = Access(b"0123456789abcdef")
        for header in ("Bearer 0123456789abcdef", "bearer  0123456789abcdef", "Basic bWU6MDEyMzQ1Njc4OWFiY2RlZg=="):
            self.assertIsNone(access.refuses(Asking("192.0.2.1", "relay.example", authorization=header)), header)
        for header in ("", "Bearer", "Bearer 0123456789abcde", "Basic !", "Basic bWU6", "Digest 0123456789abcdef"):
            refused = access.refuses(Asking("127.0.0.1", authorization=header))
            assert refused is not None
            self.assertEqual(refused[0], 401, header)

    def test_unusable_token_files_are_errors(self) -> None:
        path = Path(self.mktemp())
        for text, mode, problem in (
            ("0123456789abcdef\n", 0o600, None),
            ("0123456789abcdef\n", 0o644, "accessible by others"),
            ("short", 0o600, "16 to 512"),
            ("x" * 600, 0o600, "16 to 512"),
            ("0123456789 abcdef", 0o600, "visible"),
        ):
            path.write_text(text)
            os.chmod(path, mode)
            if problem is None:
                self.assertEqual(read_token(str(path)), b"0123456789abcdef")
            else:
                with self.assertRaisesRegex(DmsgError, problem):
                    read_token(str(path))
        with self.assertRaisesRegex(DmsgError, "No such file"):
            read_token("/nowhere/token")


class DelegationsTests(SynchronousTestCase):
    """Servers that clients name, with their numbers of clients."""

    def test_the_last_entry_counts(self) -> None:
        delegations = Delegations()
        delegations.posted("a", ["x", "y", "x"], 0.0)
        delegations.posted("b", ["x"], 1.0)
        self.assertEqual(delegations.most_named(5), [("x", 2), ("y", 1)])
        delegations.posted("a", ["y"], 2.0)
        self.assertEqual((delegations.count_of("x"), delegations.count_of("y"), len(delegations)), (1, 1, 2))
        delegations.posted("a", None, 3.0)
        self.assertEqual(delegations.most_named(5), [("x", 1)])
        delegations.posted("c", ["x"], 3.5)
        delegations.posted("b", ["x"], 4.0)
        self.assertEqual(delegations.most_named(5), [("x", 2)])
        delegations.forget_silent(3.5 + CLIENT_LIFETIME)
        self.assertEqual((delegations.most_named(5), len(delegations)), ([("x", 1)], 1))
        delegations.forget_silent(4.0 + CLIENT_LIFETIME)
        self.assertEqual((delegations.most_named(5), len(delegations)), ([], 0))

    def test_the_number_of_remembered_clients_is_bounded(self) -> None:
        delegations = Delegations()
        for number in range(MAX_CLIENTS + 10):
            delegations.posted(str(number), ["x"], 0.0)
        self.assertEqual((len(delegations), delegations.count_of("x")), (MAX_CLIENTS, MAX_CLIENTS))
