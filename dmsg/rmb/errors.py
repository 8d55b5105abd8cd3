"""Exceptions of the message bus, and the reasons for refusing or dropping messages, sessions and requests."""

from __future__ import annotations

from enum import Enum

from dmsg.errors import DmsgError, NobodyThere


class Drop(Enum):
    """Reasons for which a message, a session or a request was refused or dropped. Each value is a label in the
    metrics."""

    # Reasons to refuse or end a session.
    NO_TOKEN = "no_token"  # noqa: S105  # not a password
    BAD_TOKEN = "bad_token"  # noqa: S105
    BAD_UPGRADE = "bad_upgrade"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    SLOW_REQUEST = "slow_request"
    UNREADABLE_REQUEST = "unreadable_request"
    SMALL_PIECES = "small_pieces"
    UNKNOWN_TWIN = "unknown_twin"
    REGISTRY_DOWN = "registry_down"
    TOO_MANY_SESSIONS = "too_many_sessions"
    CROWDED_OUT = "crowded_out"
    DRAINING = "draining"
    REPLACED = "replaced"
    BAD_FRAME = "bad_frame"
    SILENT = "silent"
    UNFINISHED = "unfinished"
    FRAGMENTS = "fragments"
    STALLED = "stalled"
    # Reasons to drop a message that a session sent.
    RATE_LIMITED = "rate_limited"
    WRONG_SOURCE = "wrong_source"
    NO_DESTINATION = "no_destination"
    UNKNOWN_DESTINATION = "unknown_destination"
    NO_RELAY = "no_relay"
    OFFLINE = "offline"
    EXPIRED = "expired"
    QUEUE_FULL = "queue_full"
    MEMORY = "memory"
    QUEUE_FAILED = "queue_failed"
    BUSY = "busy"
    # Reasons to drop a message that another relay sent.
    BAD_INTAKE = "bad_intake"
    INTAKE_SIGNATURE = "intake_signature"
    INTAKE_TOO_LARGE = "intake_too_large"
    INTAKE_RATE = "intake_rate"
    # Reasons to drop a message on its way to another relay.
    FEDERATION_REFUSED = "federation_refused"
    FEDERATION_FULL = "federation_full"
    # Reasons to drop a message at a peer.
    NOT_SIGNED = "not_signed"
    BAD_SIGNATURE = "bad_signature"
    BAD_TIMES = "bad_times"
    NOT_FOR_US = "not_for_us"
    REPLAYED = "replayed"
    NOT_HANDLED = "not_handled"
    BAD_PAYLOAD = "bad_payload"
    UNKNOWN_REPLY = "unknown_reply"
    BAD_REQUEST = "bad_request"


class RmbError(DmsgError):
    """Base class of all errors of the message bus."""


class EnvelopeError(RmbError, ValueError):
    """Error: the bytes are not an envelope, or an envelope lacks a required field."""


class IdentityError(RmbError, ValueError):
    """Error: the words, seed or address is malformed."""


class SignatureInvalid(RmbError):
    """Error: the signature is missing, malformed, or made with another key."""


class TokenError(RmbError, ValueError):
    """Error: a relay refused a token; the text is the relay's answer."""


class CipherError(RmbError):
    """Error: the payload cannot be encrypted or decrypted."""


class TwinNotFound(RmbError, NobodyThere, LookupError):
    """Error: the registry has no such twin."""


class RegistryUnavailable(RmbError):
    """Error: the registry did not answer, so it is unknown whether the twin exists."""


class RegistryRefused(RmbError, ValueError):
    """Error: the registry refused an update; the text gives the reason."""


class RegistryConflict(RegistryRefused):
    """Error: a statement does not fit the registry's entry of its twin. The statement has another id, or a counter that
    is not higher."""


class NotTheOwner(RegistryRefused):
    """Error: a statement about a twin is not signed by the owner of the twin's account."""


class QueueUnavailable(RmbError):
    """Error: the queue of a relay cannot be read or written now."""


class RemoteError(RmbError):
    """Error: a twin or a relay answered a call with an error.

    :ivar code: ``Error.code`` of the answer; errors of relays have the code 0.
    :ivar by_relay: whether a relay made the error. Such an error is not signed.
    """

    def __init__(self, code: int, text: str, *, by_relay: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.by_relay = by_relay


class TwinOffline(RemoteError, NobodyThere):
    """Error: the destination is not connected, and the sender asked relays not to store the message."""


class CallTimeout(RmbError, TimeoutError):
    """Error: no answer arrived before the deadline."""
