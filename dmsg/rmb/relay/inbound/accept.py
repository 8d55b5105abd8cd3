"""Acceptance of messages that another relay sends to this one: each message is delivered, stored or refused, and then
answered."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.rmb.errors import Drop, QueueUnavailable
from dmsg.rmb.relay.mail import Header, Mail
from dmsg.rmb.relay.queue.interface import QueueId
from dmsg.rmb.relay.rules import Action, Decision, MessageRefused
from dmsg.rmb.relay.switch import Switch
from dmsg.rmb.socket.confirm import Ledger
from dmsg.rmb.twins.twin import Twin


class InboundAcceptor:
    """Acceptor of the messages that other relays send to sessions of this relay."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def take(self, header: Header, data: bytes, twin: Twin | None, *, only_connected: bool) -> Deferred[None]:
        """Accept a verified message from another relay. The Deferred fires when the message is confirmed or stored.

        The Deferred fails with :class:`~dmsg.rmb.relay.rules.MessageRefused` or QueueUnavailable.

        :param twin: registry entry of the destination; None if the registry has none.
        :param only_connected: whether to refuse the message if the session is not connected.
        """
        switch = self._switch
        taken: Deferred[None] = Deferred()

        def settled(payload: bytes) -> None:
            if not taken.called:
                taken.callback(None)

        def lost() -> None:
            # The message is neither confirmed nor stored, so the other relay must send it again.
            if not taken.called:
                taken.errback(QueueUnavailable("the queue of this relay cannot store messages now"))

        ledger = Ledger(settled, lost)
        mail = Mail(data, header.until(switch.now()), ledger, header)
        ledger.add(mail)
        # The ledger answers this ping, and so fires ``taken``, when the message is settled. Messages of sessions are
        # confirmed by the same rule.
        ledger.ping(b"")
        receiver = switch.sessions.get(header.destination)
        if receiver is not None and receiver.delivery.is_crowded and not mail.is_answer:
            # If a session of this relay had sent the message, the session would be paused. Another relay cannot be
            # paused, so it must send the message again later.
            taken.errback(MessageRefused(Drop.BUSY))
            return taken
        # The other relay deletes the message when it gets the answer. So the answer is sent only when the message is
        # confirmed or stored here.
        if receiver is not None and receiver.delivery.offer(mail):
            switch.count_in(mail)
            return taken
        decision = switch.rules.route_inbound(header, twin)
        if receiver is None and only_connected and decision.action is Action.QUEUE:
            decision = Decision(Action.REFUSE, drop=Drop.OFFLINE)
        if receiver is not None or decision.drop is None:
            self._store(mail, decision.relays, taken)
        elif decision.drop is Drop.OFFLINE:
            self._find(mail, taken)
        else:
            taken.errback(MessageRefused(decision.drop))
        return taken

    def _find(self, mail: Mail, accepted: Deferred[None]) -> None:
        """Find the receiver at another process that shares the queue, or wait a moment for it to reconnect here."""
        switch = self._switch

        def known(elsewhere: bool) -> None:
            if elsewhere:
                self._store(mail, frozenset(), accepted)
            else:
                switch.presence.wait_for_session(mail.destination).addCallback(back)

        def back(is_back: bool) -> None:
            receiver = switch.sessions.get(mail.destination)
            if not is_back or receiver is None:
                accepted.errback(MessageRefused(Drop.OFFLINE))
            elif receiver.delivery.offer(mail):
                switch.count_in(mail)
            else:
                self._store(mail, frozenset(), accepted)

        switch.queue.is_elsewhere(str(mail.destination)).addErrback(lambda _: False).addCallback(known)

    def _store(self, mail: Mail, other_relays: frozenset[str], accepted: Deferred[None]) -> None:
        """Store a message in the queue of its receiver.

        :param other_relays: relays to which the receiver may be connected.
        """
        switch = self._switch

        def kept(number: QueueId) -> None:
            switch.settle_stored(mail.destination, mail, number, other_relays)

        def failed(failure: Failure) -> None:
            switch.rules.drops[Drop.QUEUE_FAILED] += 1
            accepted.errback(failure)

        switch.count_in(mail)
        switch.queue.append(str(mail.destination), mail.data, mail.until, mail.sender).addCallbacks(kept, failed)
