"""Handshakes of secure transports on one connection: REQUEST, ACCEPT, and the initiator's confirmation.

This part of the client's table decides whether a handshake message is authentic, whether it begins or resumes a stream,
and when the stream may carry data. Its results are events and frames to send. :mod:`dmsg.v2019.core.state` defines the
states of a transport, and :mod:`dmsg.streams.core.agreement` the messages.

A server can record and replay a REQUEST. So the responder delivers no data before it has received an authentic frame of
the initiator, and until then does not change a stream that is to be resumed. In the same way, the initiator does not
change the stream that it resumes before it has received an authentic frame of the responder
(:mod:`dmsg.streams.core.resumption`). No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace

from dmsg.errors import CloseReason, HandshakeError
from dmsg.keys import PUBKEY_SIZE, PubKey
from dmsg.noise.handshake import HANDSHAKE_FRAMES, HandshakeResult
from dmsg.streams.core.agreement import PREFACE_FRAMES, Hello, Offer, agreed_cipher, is_secure, preface
from dmsg.streams.core.resumption import Answer, SecureError
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.events import (
    Accepted,
    AcknowledgedAll,
    Closed,
    Confirmed,
    DataEnded,
    DataReceived,
    EndedBy,
    Event,
    Requested,
    Resumed,
)
from dmsg.v2019.core.state import ClientTransport, Input, State
from dmsg.v2019.core.transports import PLAIN_CLIENT, TableSettings, TransportTable
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HANDSHAKE_PAYLOAD_SIZE,
    SEQUENCE_SIZE,
    encode_frame,
    encode_fwd_header,
)


class SecureTable(TransportTable):
    """Table of one connection's transports that also runs the handshakes of secure transports."""

    def __init__(self, local: PubKey, settings: TableSettings = PLAIN_CLIENT) -> None:
        super().__init__(local, settings)
        self._budget = settings.budget
        self.refusal = settings.refusal
        self._handshake_cost = 0
        """Time that the handshakes of the present read have taken, as the number of frames that take equally long."""

    def _new_end(
        self,
        transport: ClientTransport,
        result: HandshakeResult,
        window: int,
        token: bytes | None,
        request: Hello,
        answer: Hello,
    ) -> SecureEnd:
        return SecureEnd(
            result.hash,
            initiator=transport.initiator,
            window=window,
            token=token,
            budget=self._budget,
            peer=transport.remote,
            tags=request.tags and answer.tags,
            half_close=request.half_close and answer.half_close,
        )

    # --- answers of the responder ---

    def accept_secure(self, transport: ClientTransport, hello: Hello) -> SecureEnd:
        """Accept the REQUEST for a new secure stream. :class:`Confirmed` or :class:`Closed` follows.

        :param hello: hello of this end.
        :raises LocalProtocolError: the transport is not waiting for an answer.
        """
        offer, result = self._answer(transport, hello)
        end = self._new_end(transport, result, hello.window, offer.hello.token, offer.hello, hello)
        end.attach(transport, result, offer.hello, hello.window, agreed_cipher(offer.hello, hello))
        return end

    def answer_resume(self, transport: ClientTransport, end: SecureEnd, *, aes_gcm: bool = False) -> None:
        """Answer RESUME with the position of ``end``. :class:`Confirmed` or :class:`Closed` follows.

        The stream is not changed before :class:`Confirmed`, because the sender of the REQUEST has not yet proved that
        it holds the initiator's key.

        :param aes_gcm: whether this end prefers AES-256-GCM.
        :raises LocalProtocolError: the transport is not waiting for an answer.
        """
        assert transport.offer is not None
        asked = transport.offer.hello
        assert asked.resume is not None
        position = replace(end.position(), generation=asked.resume.generation)
        told = Hello(0, end.offer_window(), resume=position, aes_gcm=aes_gcm and asked.aes_gcm)
        offer, result = self._answer(transport, told)
        transport.answer = end.answer(result, offer.hello, told)
        end.keep_answer(transport, transport.answer)

    def _answer(self, transport: ClientTransport, hello: Hello) -> tuple[Offer, HandshakeResult]:
        self._move(transport, Input.SEND_ANSWER)
        offer, transport.offer = transport.offer, None
        assert offer is not None
        result, payload = offer.accept(hello)
        self._identify(transport, payload)
        if transport.upgrade:
            self._send_message(transport, payload[HANDSHAKE_PAYLOAD_SIZE:])
        else:
            self._outgoing.append(encode_frame(ACCEPT, transport.id, payload))
        return offer, result

    def answer_ended(self, transport: ClientTransport, reason: int) -> None:
        """Refuse to resume a stream that is closed.

        :param reason: reason for which the stream was closed.
        """
        self._answer(transport, Hello(ended=reason))
        # No data follow the answer. Without a CLOSE, the server would keep the route of the transport.
        self.close(transport, reason)

    # --- upgrades: after a plain REQUEST and ACCEPT, the handshake messages follow in FWD frames ---

    def invite(self, transport: ClientTransport) -> None:
        """Accept a plain REQUEST and invite its initiator to upgrade the transport. :class:`Requested` or
        :class:`Closed` follows.

        :raises LocalProtocolError: the transport is not waiting for an answer.
        """
        self._move(transport, Input.SEND_INVITATION)
        transport.upgrade = transport.is_secure = True
        self._outgoing.append(encode_frame(ACCEPT, transport.id, transport.payload))
        self._outgoing += [encode_fwd_header(transport.id, sequence, 0) for sequence in preface(transport.payload)]

    def _send_message(self, transport: ClientTransport, message: bytes) -> None:
        self._outgoing += (encode_fwd_header(transport.id, transport.next_sequence, len(message)), message)

    def _upgrade(self, transport: ClientTransport, frame_type: int, payload: bytes, events: list[Event]) -> None:
        """Process a frame of a transport that is being upgraded."""
        if frame_type == ACK and len(payload) == SEQUENCE_SIZE:
            # The ACK is ignored. A remote of 2019 takes the preface (the frames that announce the upgrade) for data,
            # and acknowledges it.
            return
        if frame_type != FWD or len(payload) < SEQUENCE_SIZE:
            self._fail(transport, CloseReason.BAD_FRAME, events)
            return
        message = payload[SEQUENCE_SIZE:]
        if transport.state is State.INVITED:
            self._on_offered(transport, transport.payload + message, events)
        elif transport.prefaced == PREFACE_FRAMES:
            self._on_secure_accept(transport, transport.payload + message, events)
        else:
            self._on_preface(transport, int.from_bytes(payload[:SEQUENCE_SIZE], "big"), message, events)

    def _on_preface(self, transport: ClientTransport, sequence: int, data: bytes, events: list[Event]) -> None:
        assert transport.prefaced is not None and transport.proposal is not None
        if data or sequence != preface(transport.payload)[transport.prefaced]:
            # The remote is a program of 2019, so the upgrade is abandoned. No data have been sent unencrypted.
            self._fail(transport, CloseReason.ENCRYPTION_REQUIRED, events)
            return
        transport.prefaced += 1
        if transport.prefaced == PREFACE_FRAMES:
            self._send_message(transport, transport.proposal.message)

    def _on_offered(self, transport: ClientTransport, payload: bytes, events: list[Event]) -> None:
        assert self._key is not None
        try:
            reason = self._check_unseen(payload)
            if reason is None:
                self._handshake_cost += HANDSHAKE_FRAMES
                transport.offer = Offer(self._key, payload, upgrade=True)
        except HandshakeError:
            reason = CloseReason.NOT_AUTHENTIC
        if reason is not None:
            self._fail(transport, reason, events)
            return
        self._move(transport, Input.RECV_OFFER)
        events.append(Requested(transport))

    def _check_unseen(self, request: bytes) -> CloseReason | None:
        # The two static keys are followed by the first handshake message, which begins with an ephemeral key.
        ephemeral = request[HANDSHAKE_PAYLOAD_SIZE : HANDSHAKE_PAYLOAD_SIZE + PUBKEY_SIZE]
        return self.refusal(request[:PUBKEY_SIZE], ephemeral if is_secure(request) else None)

    # --- frames from the server ---

    def _receive_secure(
        self, transport: ClientTransport, frame_type: int, payload: memoryview, events: list[Event]
    ) -> None:
        end = transport.secure
        if end is None:
            return  # The frame is ignored, because the stream has moved to another transport.
        proved = end.unproven is not None and self._prove(transport, end, frame_type, payload, events)
        try:
            if frame_type == FWD:
                data = end.open_data(payload)
                if not transport.ack_due:
                    transport.ack_due = True
                    self._due.append(transport)
                if data:
                    events.append(DataReceived(transport, data))
                elif data is None:
                    events.append(DataEnded(transport))
            else:
                count, tickets = end.open_ack(payload)
                # The number of acknowledged frames is reduced by one, because the frame that asked for the proof
                # carries no data of the application.
                events.append(AcknowledgedAll(transport, count - 1 if proved and count else count, tickets))
        except SecureError as error:
            self._fail(transport, error.reason, events)

    @staticmethod
    def _prove(
        transport: ClientTransport, end: SecureEnd, frame_type: int, payload: bytes | memoryview, events: list[Event]
    ) -> bool:
        """Return whether a frame is authentic, and so proves that the other end also continues its stream over
        ``transport``."""
        if not end.is_authentic(frame_type, payload):
            return False
        events.append(Resumed(transport, *end.prove()))
        return True

    def _on_secure_accept(self, transport: ClientTransport, payload: bytes, events: list[Event]) -> None:
        proposal, transport.proposal = transport.proposal, None
        assert proposal is not None
        end = transport.secure
        try:
            result, hello = proposal.process_answer(payload)
            if hello.ended is not None:
                self.close(transport)
                events.append(Closed(transport, hello.ended, refused=True, by=EndedBy.REMOTE, end=end))
                return
            if end is None:
                token = hello.token if hello.token == proposal.hello.token else None
                end = self._new_end(transport, result, transport.told_window, token, proposal.hello, hello)
                cipher = agreed_cipher(proposal.hello, hello)
                end.attach(transport, result, hello, transport.told_window, cipher)
            elif hello.resume is None or hello.resume.token != end.token:
                raise HandshakeError("ACCEPT does not resume the requested stream")
            else:
                cipher = agreed_cipher(proposal.hello, hello)
                asking = end.attach_resumed(transport, result, hello, transport.told_window, cipher)
                self._outgoing.append(encode_frame(FWD, transport.id, asking))
        except HandshakeError:
            self._fail(transport, CloseReason.NOT_AUTHENTIC, events)
            return
        except SecureError as error:
            self._fail(transport, error.reason, events)
            return
        self._identify(transport, payload)
        self._move(transport, Input.RECV_ACCEPT)
        # The next frame is an ACK of the data received so far. It proves to the other end that this end has the keys.
        transport.ack_due = True
        self._due.append(transport)
        events.append(Accepted(transport, hello))

    def _confirm(self, transport: ClientTransport, frame_type: int, payload: bytes, events: list[Event]) -> None:
        """Process the first frame after ACCEPT. If it is authentic, it proves that the initiator holds the keys."""
        if transport.answer is not None:
            self._resume_stream(transport, transport.answer, frame_type, payload, events)
        if transport.secure is None or transport.state is State.CLOSED:
            return  # Another transport carries the stream now, or this frame did not confirm the resumption.
        after: list[Event] = []
        if frame_type in (FWD, ACK):
            self._receive_secure(transport, frame_type, memoryview(payload), after)
        else:
            self._fail(transport, CloseReason.BAD_FRAME, after)
        if transport.state is State.ANSWERED:
            self._move(transport, Input.RECV_CONFIRM)
            events.append(Confirmed(transport))
        if transport.state is State.OPEN and not transport.ack_due:
            assert transport.secure is not None
            if transport.secure.offer_window() != transport.secure.told_window:
                # The application has read data since ACCEPT stated the window. So an ACK announces the larger window.
                transport.ack_due = True
                self._due.append(transport)
        events += after

    def _resume_stream(
        self, transport: ClientTransport, answer: Answer, frame_type: int, payload: bytes, events: list[Event]
    ) -> None:
        """Resume a stream over ``transport``, if this first frame of the transport is authentic."""
        self.withdraw(transport)
        if answer.is_late or not answer.is_confirmed_by(frame_type, payload):
            if frame_type != CLOSE:
                # The caller processes a CLOSE that confirms nothing. Such a CLOSE ends only the transport, because any
                # server may have sent it.
                self._fail(
                    transport, CloseReason.NO_SUCH_STREAM if answer.is_late else CloseReason.NOT_AUTHENTIC, events
                )
            return
        end, confirmed = answer.end, Confirmed(transport, answer.end.transport)
        self._move(transport, Input.RECV_CONFIRM)
        events.append(confirmed)
        try:
            confirmed.tickets, confirmed.unsent = end.resume_over(transport, answer)
        except SecureError as error:
            # Both ends have the keys, so the CLOSE with the reason is authenticated.
            self._fail(transport, error.reason, events)

    def _fail(self, transport: ClientTransport, reason: CloseReason, events: list[Event]) -> None:
        refused = transport.state is not State.OPEN
        self.close(transport, reason)
        events.append(Closed(transport, reason, refused, EndedBy.LOCAL, transport.secure))
