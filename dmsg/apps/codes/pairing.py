"""Pairing: two people who know one code exchange the lasting keys by which their programs recognise each other later.

Both sides send ``length(4) || {"key": HEX, "signature": HEX}``, big endian.  The signature is made with the lasting
key.  The signed bytes are ``dmsg pair 1 ``, then ``sender `` or ``receiver ``, the binding of the stream (32 bytes),
and the lasting public key (33 bytes).  Nobody can therefore present another person's key as their own.  Each side ends
with ``{"ok": true}``, after it has stored the other key.
"""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.apps.codes.pake import Role
from dmsg.apps.transfer import TransferError, _message, _take_message, lost_text
from dmsg.base.printable import MAX_PEER_TEXT, shorten
from dmsg.errors import DmsgError
from dmsg.keys import PubKey, SecKey, Signature
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.streams.transports import stream_of

PROTOCOL = b"dmsg pair 1 "
PAIR_TIMEOUT = 30.0
"""Seconds that the whole exchange may take."""


class PairingError(DmsgError):
    """Error: the keys were not exchanged."""


def signed_bytes(role: Role, binding: bytes, key: PubKey) -> bytes:
    """Return the bytes that the owner of a lasting key signs.

    :param role: role of the owner in the agreement.
    :param binding: binding of the stream.
    """
    return PROTOCOL + (b"sender " if role is Role.SENDER else b"receiver ") + binding + bytes(key)


class Pairing(Protocol):
    """Protocol of one side of a pairing.

    When ``key`` fires, the caller stores the other side's key and then calls :meth:`confirm_stored`, or calls
    :meth:`refuse`.  If the pairing fails, ``key`` fails with :class:`PairingError`, or ``done`` if ``key`` has fired.

    :ivar key: Deferred that fires with the lasting key of the other side, once that side has proved it.
    :ivar done: Deferred that fires once both sides have stored the keys.
    """

    def __init__(self, reactor: IReactorTime, role: Role, key: SecKey) -> None:
        self._reactor = reactor
        self._role = role
        self._key = key
        self._buffer = bytearray()
        self._has_kept_key = self._is_kept_there = self._given_up = False
        self._timer: FairTimeout | None = None
        self.key: Deferred[PubKey] = Deferred(lambda _: self._give_up())
        self.done: Deferred[None] = Deferred(lambda _: self._give_up())

    def connectionMade(self) -> None:
        self._timer = FairTimeout(self._reactor, PAIR_TIMEOUT, self._on_timeout)
        binding = stream_of(self).binding
        assert binding is not None
        signature = self._key.sign(signed_bytes(self._role, binding, self._key.public))
        self._say(key=self._key.public.hex(), signature=signature.hex())

    def dataReceived(self, data: bytes) -> None:
        self._buffer += data
        try:
            while not self.done.called and (message := _take_message(self._buffer)) is not None:
                self._take(message)
        except TransferError:
            self._fail("the other side does not exchange keys: it is to run `dmsg pair`, too")
        except PairingError as error:
            self._fail(str(error))

    def _take(self, message: dict[str, object]) -> None:
        if "error" in message:
            raise PairingError(f"the other side reported an error: {shorten(str(message['error']), MAX_PEER_TEXT)}")
        if not self.key.called:
            self.key.callback(self._proved_key(message))
        elif message.get("ok") is True:
            self._is_kept_there = True
            self._read_state()
        else:
            raise TransferError

    def _proved_key(self, message: dict[str, object]) -> PubKey:
        other = Role.RECEIVER if self._role is Role.SENDER else Role.SENDER
        binding = stream_of(self).binding
        assert binding is not None
        if "key" not in message:
            raise TransferError
        try:
            key = PubKey.from_hex(str(message["key"]))
            key.verify(signed_bytes(other, binding, key), Signature.from_hex(str(message.get("signature"))))
        except DmsgError as error:
            raise PairingError(f"the other side did not prove its key: {error}") from None
        if key == self._key.public:
            raise PairingError("both sides have the same key: one of them needs a key of its own (dmsg key new)")
        return key

    def confirm_stored(self) -> None:
        """Tell the other side that this side has stored the other side's key."""
        self._has_kept_key = True
        self._say(ok=True)
        self._read_state()

    def refuse(self, reason: str) -> None:
        """Refuse the other side's key, and close the connection.

        :param reason: text that the other side shows to its user.
        """
        stop_timeout(self._timer)
        self._given_up = True
        self._say(error=reason)
        self.transport.loseConnection()  # type: ignore[union-attr]

    def _read_state(self) -> None:
        if self._has_kept_key and self._is_kept_there and not self.done.called:
            stop_timeout(self._timer)
            # The connection is closed first, because the callback of ``done`` may end the program.
            self.transport.loseConnection()  # type: ignore[union-attr]
            self.done.callback(None)

    def _say(self, **message: object) -> None:
        self.transport.write(_message(message))  # type: ignore[union-attr]

    def _on_timeout(self) -> None:
        self._fail(f"the other side did not answer within {PAIR_TIMEOUT:g} s")

    def _fail(self, reason: str) -> None:
        stop_timeout(self._timer)
        self.transport.loseConnection()  # type: ignore[union-attr]
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        """Report that the pairing has failed: fail the Deferred ``key``, or if it has fired, the Deferred ``done``."""
        waiting: Deferred[None] | Deferred[PubKey] = self.done if self.key.called else self.key
        if not waiting.called and not self._given_up:
            self._given_up = True
            waiting.errback(Failure(PairingError(reason)))

    def _give_up(self) -> None:
        self._given_up = True
        stop_timeout(self._timer)
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        stop_timeout(self._timer)
        self._lost(lost_text(reason))
