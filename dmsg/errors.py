"""All errors of dmsg, and the named reasons for refusals, drops and ends.

There are two kinds of protocol errors, as in h11.  :class:`LocalProtocolError` means that *our* program misused an API;
it is raised to the caller.  :class:`RemoteProtocolError` means that the *peer* broke a rule; it ends the peer's
connection and nothing else.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class CloseReason(IntEnum):
    """Reason for which a stream or a transport has ended.

    Inside the library a reason is any number from 0 on, listed here or not (see ``close_reason_text``).  Each protocol
    family writes as much of it as fits into its frames (``fit_close_reason``).  A CLOSE frame of 2019 has one byte for
    the reason; the 2019 reference writes only 0 and does not read it.
    """

    UNSPECIFIED = 0
    NO_SUCH_PEER = 1
    BAD_REQUEST = 2
    ID_IN_USE = 3
    NO_SUCH_TRANSPORT = 4
    PEER_DISCONNECTED = 5
    QUEUE_FULL = 6
    TOO_MANY_TRANSPORTS = 7
    SHUTTING_DOWN = 8
    REFUSED = 9
    BAD_FRAME = 10
    TIMEOUT = 11
    ABORTED = 12
    BUFFER_FULL = 13
    # The following reasons are only sent by clients and servers that know secure transports.
    ENCRYPTION_REQUIRED = 14
    NOT_AUTHENTIC = 15
    FRAME_MISSING = 16
    FRAME_REPEATED = 17
    HASH_MISMATCH = 18
    NO_SUCH_STREAM = 19
    RATE_LIMITED = 20
    NOT_ADMITTED = 21
    MOVED = 22
    STALLED = 23
    FULL = 24
    TOO_MANY_FROM_ADDRESS = 25
    # The following reasons are never sent: only one end knows them.
    ACKS_UNKNOWN = 253
    ACKS_DIFFER = 254
    UNCONFIRMED = 255


_CLOSE_TEXTS = {
    CloseReason.UNSPECIFIED: "no reason given",
    CloseReason.NO_SUCH_PEER: "the remote is not connected to this server",
    CloseReason.BAD_REQUEST: "malformed REQUEST",
    CloseReason.ID_IN_USE: "transport id is in use",
    CloseReason.NO_SUCH_TRANSPORT: "no such transport",
    CloseReason.PEER_DISCONNECTED: "the peer's program ended, or a connection to the server was lost",
    CloseReason.QUEUE_FULL: "the remote reads too slowly",
    CloseReason.TOO_MANY_TRANSPORTS: "too many streams of this key are open",
    CloseReason.SHUTTING_DOWN: "the server is shutting down",
    CloseReason.REFUSED: "nobody listens there",
    CloseReason.BAD_FRAME: "malformed frame",
    CloseReason.TIMEOUT: "took too long",
    CloseReason.ABORTED: "the remote ended it early",
    CloseReason.BUFFER_FULL: "more data was sent than the receiver can buffer",
    CloseReason.ENCRYPTION_REQUIRED: "the remote accepts only secure transports",
    CloseReason.NOT_AUTHENTIC: "a frame was changed on its way",
    CloseReason.FRAME_MISSING: "a frame was left out on its way",
    CloseReason.FRAME_REPEATED: "a frame was repeated on its way",
    CloseReason.HASH_MISMATCH: "the remote received other data than was sent",
    CloseReason.NO_SUCH_STREAM: "the remote does not know the stream that was to be resumed",
    CloseReason.RATE_LIMITED: "too many requests",
    CloseReason.NOT_ADMITTED: "the server does not admit this key",
    CloseReason.MOVED: "the stream continues on another transport",
    CloseReason.STALLED: "no data was read for too long",
    CloseReason.FULL: "the server is full",
    CloseReason.TOO_MANY_FROM_ADDRESS: "the server accepts no more connections from this address",
    CloseReason.ACKS_UNKNOWN: "whether the remote uses acknowledgements is not known, and it sends nothing first: "
    "use --acks yes (acks=True) for a Go program before 2019-04-15, --acks no (acks=False) for a later one",
    CloseReason.ACKS_DIFFER: "the remote sends no valid acknowledgements: use --acks no",
    CloseReason.UNCONFIRMED: "all data was sent, but the other end did not confirm the close",
}


def close_reason_text(reason: int) -> str:
    """Return the text of a close reason for a person, or ``reason N`` for an unlisted one."""
    return _CLOSE_TEXTS.get(reason) or f"reason {reason}"  # type: ignore[call-overload]


NOBODY_LISTENS = "nobody listens at"


def not_listening(address: str) -> str:
    """Return the text of a CLOSE with ``REFUSED`` for a person; a port that listens only for other keys cannot be
    distinguished."""
    return f"{NOBODY_LISTENS} {address}, or not for this key"


def as_close_reason(reason: int) -> int:
    """Return the :class:`CloseReason` with this number, or the number itself if there is none."""
    return CloseReason(reason) if reason in _CLOSE_TEXTS else reason


def fit_close_reason(reason: int, size: int = 1) -> int:
    """Return a close reason that fits into ``size`` bytes; ``ABORTED`` replaces one that does not.

    Cutting off bytes would change the meaning: the lower byte of 256 is 0, which is a clean end.
    """
    return reason if 0 <= reason < 1 << 8 * size else CloseReason.ABORTED


class DropReason(Enum):
    """Reason for which something was refused, dropped or ended; each value is a metric label."""

    # The following reasons end a connection before its handshake is done.
    TOO_MANY_CONNECTIONS = "too_many_connections"
    DRAINING = "draining"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    HANDSHAKE_FAILED = "handshake_failed"
    HANDSHAKE_EVICTED = "handshake_evicted"
    HANDSHAKE_ABANDONED = "handshake_abandoned"
    HTTP_REQUEST = "http_request"
    BAD_PROXY_HEADER = "bad_proxy_header"
    # The following reasons end an established connection.
    BAD_WEBSOCKET = "bad_websocket"
    SMALL_PIECES = "small_pieces"
    BAD_RECORD = "bad_record"
    REPLAYED_RECORD = "replayed_record"
    NONCES_USED_UP = "nonces_used_up"
    UNKNOWN_FRAME = "unknown_frame"
    REQUEST_ON_USED_ID = "request_on_used_id"
    SEND_BUFFER_FULL = "send_buffer_full"
    STALLED = "stalled"
    NO_OK_FRAME = "no_ok_frame"
    REPLACED = "replaced"
    # The following reasons refuse a REQUEST.
    BAD_REQUEST = "bad_request"
    NO_SUCH_PEER = "no_such_peer"
    ID_IN_USE = "id_in_use"
    TOO_MANY_TRANSPORTS = "too_many_transports"
    REFUSED = "refused"
    # The following reasons drop a frame or end a transport.
    NO_SUCH_TRANSPORT = "no_such_transport"
    QUEUE_FULL = "queue_full"
    PEER_DISCONNECTED = "peer_disconnected"
    BAD_FRAME = "bad_frame"
    BUFFER_FULL = "buffer_full"
    BAD_RECEIPT = "bad_receipt"
    # The following reasons come from limits that the operator sets.
    RATE_LIMITED = "rate_limited"
    DESTINATION_RATE = "destination_rate"
    FLOOD = "flood"
    FLOODED_BEFORE = "flooded_before"
    FAILED_BEFORE = "failed_before"
    TOO_MANY_FROM_ADDRESS = "too_many_from_address"
    CROWDED_OUT = "crowded_out"
    TOO_MANY_PER_PAIR = "too_many_per_pair"
    NOT_ADMITTED = "not_admitted"
    WRONG_PROFILE = "wrong_profile"
    MEMORY = "memory"


class DmsgError(Exception):
    """Base class of all errors of this package."""


class NobodyThere(DmsgError):
    """Error: the peer does not exist or cannot be reached."""


class Unwanted(DmsgError):
    """Error: the other side was reached, and refused the request."""


class WrongUse(DmsgError):
    """Error: the user gave an invalid option, argument or name; nothing was done."""


class CutShort(DmsgError):
    """Error: the transfer was interrupted; the same command resumes it."""


class KeyFormatError(DmsgError, ValueError):
    """Error: the text or bytes are no valid public key, secret key or signature."""


class SignatureError(DmsgError):
    """Error: a signature does not belong to the key and the payload."""


class KeyFileError(DmsgError):
    """Error: a key file is missing, malformed, or readable by others."""


class LocalProtocolError(DmsgError):
    """Error: the caller asked for an operation that the protocol does not allow now."""


class RemoteProtocolError(DmsgError):
    """Error: the peer broke a rule of the protocol; its connection has to end.

    :ivar reason: :class:`DropReason` under which the error is counted.
    """

    def __init__(self, reason: DropReason, text: str = "") -> None:
        super().__init__(text or reason.value.replace("_", " "))
        self.reason = reason


class HandshakeError(RemoteProtocolError):
    """Error: the Noise handshake failed, because of a wrong key or a damaged or malformed message."""

    def __init__(self, text: str, reason: DropReason = DropReason.HANDSHAKE_FAILED) -> None:
        super().__init__(reason, text)


class TransportClosed(DmsgError):
    """Error: a transport ended before the requested operation was done.

    :ivar reason: reason in the CLOSE frame, see :class:`CloseReason`.
    """

    def __init__(self, reason: int, text: str = "") -> None:
        super().__init__(text or f"transport closed: {close_reason_text(reason)}")
        self.reason = as_close_reason(reason)


class TransportRefused(TransportClosed, Unwanted):
    """Error: the answer to a REQUEST was CLOSE.

    :ivar final: whether the remote itself refused, so that no other server would help.
    """

    final = False

    def __init__(self, reason: int, text: str = "") -> None:
        super().__init__(reason, text or f"refused: {close_reason_text(reason)}")


class EncryptionUnavailable(DmsgError):
    """Error: the client requires secure transports, and the remote or the server does not offer them."""


class PingUnavailable(DmsgError):
    """Error: the remote's client does not answer pings, because it is of 2019 or of an earlier version of dmsg."""


class DmsgTimeout(DmsgError, TimeoutError):
    """Error: a deadline given by the caller passed."""


class SendBufferFull(LocalProtocolError):
    """Error: more bytes were written to a transport than its send buffer may contain."""


class ConnectFailed(NobodyThere):
    """Error: no server of the remote could carry a transport to it.

    :ivar attempts: servers that were tried and the reason why each failed, in order.
    :ivar key: 66 hexadecimal characters of the remote's public key, if it is known here.
    """

    def __init__(self, text: str, attempts: tuple[tuple[str, str], ...] = (), key: str = "") -> None:
        if attempts and all(why == text for _, why in attempts):
            tried = f"asked through server {', '.join(server for server, _ in attempts)}"
        else:
            tried = "; ".join(f"through server {server}: {why}" for server, why in attempts)
        super().__init__(f"{text} ({tried})" if tried else text)
        self.attempts = attempts
        self.key = key


class ConnectTimeout(ConnectFailed, DmsgTimeout):
    """Error: the time for ``connect`` passed; ``attempts`` lists the servers that were tried until then."""


class DiscoveryError(DmsgError):
    """Error: discovery answered with an error, or could not be reached.

    :ivar status: HTTP status; 0 without an answer.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class WrongDiscovery(DiscoveryError):
    """Error: the discovery at this URL belongs to another network, so asking again is useless."""


class EntryNotFound(DiscoveryError, NobodyThere):
    """Error: discovery has no entry of the key.

    :ivar key: 66 hexadecimal characters of the public key, if it is known here.
    """

    def __init__(self, text: str = "entry of public key is not found", key: str = "") -> None:
        super().__init__(text, 404)
        self.key = key


class EntryError(DmsgError, ValueError):
    """Error: an entry is malformed or breaks a rule; see :mod:`dmsg.discovery.entries.entry`."""


def needs_extra(extra: str) -> str:
    """Return a text, for an error message, that says how to install an extra of setup.cfg."""
    return f"more packages are needed; in dmsg's directory: pip install -e '.[{extra}]'"
