"""Rules about a message, by plain calls."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.wire import MAX_SKEW
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.limiter import FixedWindow
from dmsg.rmb.relay.mail import Header
from dmsg.rmb.relay.rules import Action, Decision, MessageRefused, Rules
from dmsg.rmb.twins.address import MAX_SID, Session
from dmsg.rmb.twins.twin import Twin

A, B = Session(1), Session(2)
NOW = 1000.5


def header(
    kind: str = "request", source: Session = A, destination: Session = B, *, timestamp: int = 1000, **fields: Any
) -> Header:
    envelope = Envelope(timestamp=timestamp, expiration=60, **fields)
    getattr(envelope, kind).SetInParent()
    wire.set_address(envelope.source, source)
    wire.set_address(envelope.destination, destination)
    return Header(envelope)


class AdmitTests(SynchronousTestCase):
    def refusal(self, rules: Rules, message: Header, size: int = 1) -> Drop | None:
        try:
            rules.admit(A, message, size, NOW)
        except MessageRefused as refused:
            return refused.drop
        return None

    def test_a_twin_that_sends_too_much_is_refused(self) -> None:
        rules = Rules(limiter=FixedWindow(2, 100))
        self.assertEqual(
            [self.refusal(rules, header()) for _ in range(3)],
            [None, None, Drop.RATE_LIMITED],
        )

    def test_required_fields_of_messages(self) -> None:
        rules = Rules()
        longest = "s" * MAX_SID
        for message, drop in (
            (header(source=B), Drop.WRONG_SOURCE),
            (header(destination=Session(0)), Drop.NO_DESTINATION),
            (header(destination=Session(2, longest)), None),
            (header(destination=Session(2, longest + "s")), Drop.BAD_REQUEST),
            (header(timestamp=1001 - 60), None),
            (header(timestamp=1000 - 60), Drop.EXPIRED),
            (header(timestamp=1000 + MAX_SKEW), None),
            (header(timestamp=1001 + MAX_SKEW), Drop.BAD_TIMES),
            (header("ping", destination=Session(0)), None),
        ):
            self.assertEqual(self.refusal(rules, message), drop)


class AnswerTests(SynchronousTestCase):
    """Only a request makes an answer free, and only the answer of the twin that was asked."""

    def test_answers_to_requests_are_free(self) -> None:
        for kind, free in (
            ("request", True),
            ("response", False),
            ("error", False),
            ("ping", False),
            ("pong", False),
        ):
            windows = [FixedWindow(1, 10_000), FixedWindow(1, 10_000)]
            rules = Rules(limiter=windows[0])
            rules.windows.append(windows[1])
            rules.grant_answer(header(kind), NOW)
            for window in windows:
                answers = [window.measure(B.twin, 1, NOW, is_answer=True) for _ in range(2)]
                self.assertEqual(answers, [True, free], kind)

    def test_work_that_costs_as_much_as_messages_counts_as_messages(self) -> None:
        Rules().charge(A.twin, 5, NOW)  # Without a limit nothing is counted.
        window = FixedWindow(6, 100)
        Rules(limiter=window).charge(A.twin, 5, NOW)
        self.assertEqual([window.measure(A.twin, 1, NOW) for _ in range(2)], [True, False])


class RouteTests(SynchronousTestCase):
    def test_where_a_message_for_an_absent_session_goes(self) -> None:
        rules = Rules({"here", "also here"})
        forward, queue = Action.FORWARD, Action.QUEUE
        for relay, tags, expected in (
            (None, "", Decision(Action.REFUSE, drop=Drop.NO_RELAY)),
            ("", "", Decision(Action.REFUSE, drop=Drop.NO_RELAY)),
            ("there", "", Decision(forward, frozenset({"there"}))),
            ("there_elsewhere", "fail-fast", Decision(forward, frozenset({"there", "elsewhere"}))),
            ("here", "", Decision(queue)),
            ("here_also here", "", Decision(queue)),
            ("here_there", "", Decision(queue, frozenset({"there"}))),
            ("here_there", "fail-fast", Decision(Action.PROBE, frozenset({"there"}))),
            ("here", "fail-fast", Decision(Action.REFUSE, drop=Drop.OFFLINE)),
        ):
            self.assertEqual(rules.route(header(tags=tags), Twin(2, bytes(32), relay)), expected, relay)
        self.assertEqual(rules.route(header(), None), Decision(Action.REFUSE, drop=Drop.UNKNOWN_DESTINATION))
