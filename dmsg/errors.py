"""Errors that several parts of dmsg share, and the reasons for refusals, drops and the ends of connections and streams.

There are two kinds of protocol errors, as in h11. :class:`LocalProtocolError` means that *this* program misused an API;
it is raised to the caller. :class:`RemoteProtocolError` means that the *peer* broke a rule; it ends only the peer's
connection.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class CloseReason(IntEnum):
    """Reason for which a stream or a transport has ended.

    In this package's code, a reason may be any number from 0 on, because applications and newer programs may use
    numbers that are not listed here. A frame has room for small numbers only (see ``fit_close_reason``): a CLOSE frame
    of 2019 has one byte for the reason. The reference of 2019 writes 0 there, and does not read the byte.
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
    # Only clients and servers that support secure transports send the following reasons.
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
    # The following reasons are never sent: an end that detects the problem reports them only to its own application.
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
    """Return a text for people that explains a close reason; ``reason N`` for a number that is not listed."""
    return _CLOSE_TEXTS.get(reason) or f"reason {reason}"  # type: ignore[call-overload]


NOBODY_LISTENS = "nobody listens at"


def not_listening(address: str) -> str:
    """Return a text for people that explains a refusal with ``REFUSED``.

    The remote answers the same way if no program listens and if the program accepts only other keys.
    """
    return f"{NOBODY_LISTENS} {address}, or not for this key"


def as_close_reason(reason: int) -> int:
    """Return the :class:`CloseReason` with this number; the number itself if it is not listed."""
    return CloseReason(reason) if reason in _CLOSE_TEXTS else reason


def fit_close_reason(reason: int, size: int = 1) -> int:
    """Return ``reason`` if it fits into ``size`` bytes, otherwise ``ABORTED``.

    Truncated, a reason would have another meaning: the lower byte of 256 is 0, which means a clean end.
    """
    return reason if 0 <= reason < 1 << 8 * size else CloseReason.ABORTED


class DropReason(Enum):
    """Reason for which a connection, request or frame was refused, dropped or ended. The values are
    labels of metrics.
    """

    # The following are reasons to end a connection before its handshake is complete.
    TOO_MANY_CONNECTIONS = "too_many_connections"
    DRAINING = "draining"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    HANDSHAKE_FAILED = "handshake_failed"
    HANDSHAKE_EVICTED = "handshake_evicted"
    HANDSHAKE_ABANDONED = "handshake_abandoned"
    HTTP_REQUEST = "http_request"
    BAD_PROXY_HEADER = "bad_proxy_header"
    # The following are reasons to end an established connection.
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
    # The following are reasons to refuse a REQUEST.
    BAD_REQUEST = "bad_request"
    NO_SUCH_PEER = "no_such_peer"
    ID_IN_USE = "id_in_use"
    TOO_MANY_TRANSPORTS = "too_many_transports"
    REFUSED = "refused"
    # The following are reasons to drop a frame or to end a transport.
    NO_SUCH_TRANSPORT = "no_such_transport"
    QUEUE_FULL = "queue_full"
    PEER_DISCONNECTED = "peer_disconnected"
    BAD_FRAME = "bad_frame"
    BUFFER_FULL = "buffer_full"
    BAD_RECEIPT = "bad_receipt"
    # The following reasons depend on settings of the operator, such as limits.
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
    """Error: the peer was reached, and refused the request."""


class WrongUse(DmsgError):
    """Error: an option, an argument or a name is invalid. The program has not begun its work."""


class CutShort(DmsgError):
    """Error: the transfer was interrupted. If the user runs the same command again, the transfer is resumed."""


class KeyFormatError(DmsgError, ValueError):
    """Error: the text or bytes are not a valid public key, secret key or signature."""


class SignatureError(DmsgError):
    """Error: a signature was not made with this key over this payload."""


class KeyFileError(DmsgError):
    """Error: a key file is missing, malformed, readable by others, in use, or cannot be written."""


class LocalProtocolError(DmsgError):
    """Error: this program requested an operation that the protocol does not allow in the present state."""


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
    """Error: a request for a transport was refused, by the remote or by the server.

    :ivar final: whether the remote itself refused, so that an attempt through another server is pointless.
    """

    final = False

    def __init__(self, reason: int, text: str = "") -> None:
        super().__init__(reason, text or f"refused: {close_reason_text(reason)}")


class EncryptionUnavailable(DmsgError):
    """Error: this client requires secure transports, and the remote or the server does not support them."""


class PingUnavailable(DmsgError):
    """Error: the remote does not answer pings, because its program is of 2019 or an earlier version of dmsg."""


class DmsgTimeout(DmsgError, TimeoutError):
    """Error: an operation did not finish within the timeout that the caller set."""


class SendBufferFull(LocalProtocolError):
    """Error: the program wrote more bytes to a stream than fit into the send buffer."""


class ConnectFailed(NobodyThere):
    """Error: the remote could not be reached through any of its servers.

    :ivar attempts: servers that were tried, in order, each with the reason why it failed.
    :ivar key: public key of the remote, 66 hexadecimal characters; empty if the code that raised the error did not know
        it.
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
    """Error: ``connect`` did not finish within its timeout. ``attempts`` lists the servers that
    were tried until then.
    """


class DiscoveryError(DmsgError):
    """Error: discovery answered with an error, or could not be reached.

    :ivar status: HTTP status; 0 without an answer.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class WrongDiscovery(DiscoveryError):
    """Error: the program at this URL is not a discovery of this network, so that trying again is pointless."""


class EntryNotFound(DiscoveryError, NobodyThere):
    """Error: discovery has no entry of the key.

    :ivar key: public key, 66 hexadecimal characters; empty if the code that raised the error did not know it.
    """

    def __init__(self, text: str = "entry of public key is not found", key: str = "") -> None:
        super().__init__(text, 404)
        self.key = key


class EntryError(DmsgError, ValueError):
    """Error: an entry is malformed or breaks a rule; see :mod:`dmsg.discovery.entries.entry`."""


class ExtraNotInstalled(DmsgError):
    """Error: the packages of an optional extra are not installed."""


def needs_extra(extra: str) -> str:
    """Return a text for an error message that says how to install the packages of an optional extra."""
    return (
        f"more packages are needed; in a clone of dmsg: pip install -e '.[{extra}]', "
        f"or with its wheel: pip install 'dmsg-VERSION-py3-none-any.whl[{extra}]'"
    )
