"""Reasons that a relay counts."""

from __future__ import annotations

from typing import get_args

from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.web.guard import GuardReason
from dmsg.rmb.errors import Drop


class DropTests(SynchronousTestCase):
    """Reasons of refusals."""

    def test_each_reason_of_the_guard_of_connections_is_one_of_the_relay(self) -> None:
        for reason in get_args(GuardReason):
            self.assertEqual(Drop(reason).value, reason)
