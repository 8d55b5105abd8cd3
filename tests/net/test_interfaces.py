"""Addresses of this machine's network interfaces."""

from __future__ import annotations

import socket

from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.interfaces import interface_addresses


class InterfaceTests(SynchronousTestCase):
    """Interfaces that the system reports."""

    def test_every_address_can_be_bound(self) -> None:
        found = interface_addresses()
        self.assertIn("127.0.0.1", [str(one) for one in found])
        for one in found:
            if not one.is_link_local:
                with socket.socket(socket.AF_INET if one.version == 4 else socket.AF_INET6) as bound:
                    bound.bind((str(one), 0))
