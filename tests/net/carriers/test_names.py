"""Carriers in the entries of servers."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import features
from dmsg.net.carriers.names import MAX_CARRIERS, PLAIN, Carrier, carriers_of, parse_carrier


class NamesTests(SynchronousTestCase):
    """Carriers that an entry names."""

    def test_an_entry_of_2019_has_plain_tcp_alone(self) -> None:
        self.assertEqual(carriers_of(features("0.0.1")), [PLAIN])
        self.assertEqual(carriers_of(features("0.0.1+relay1.receipts1")), [PLAIN])

    def test_other_carriers_follow_plain_tcp(self) -> None:
        found = carriers_of(features("0.0.1+relay1.wss-443.ws.tls-853"))
        self.assertEqual([str(one) for one in found], ["tcp", "ws", "wss:443", "tls:853"])

    def test_a_port_with_tls_has_nothing_else(self) -> None:
        found = carriers_of(features("0.0.1+ws.wss-443.tls-853"), 443)
        self.assertEqual([str(one) for one in found], ["wss:443", "tls:853"])

    def test_words_that_are_no_carriers_are_ignored(self) -> None:
        words = ("ws-1", "wss", "wss-", "wss-0", "wss-65536", "tls-x", "wss--1", "wss-1-2", "tcp", "tcp-1")
        self.assertEqual(carriers_of(words), [PLAIN])

    def test_an_entry_cannot_send_clients_to_any_number_of_ports(self) -> None:
        self.assertEqual(len(carriers_of([f"wss-{port}" for port in range(1, 99)])), 1 + MAX_CARRIERS)

    def test_operators_write_kind_and_port(self) -> None:
        self.assertEqual(parse_carrier("wss:443"), Carrier("wss", 443))
        for text in ("ws", "wss", "wss:0", "tcp:1", "wss:99999", "wss-443", ""):
            with self.subTest(text=text):
                self.assertRaises(ValueError, parse_carrier, text)
