"""Receipts: signed statements of one end of a transport about the bytes that were delivered. No I/O.

A receipt has 198 bytes, with integers big-endian (docs/pipeline/receipts.md)::

    version(1) = 1
    role(1)           0: this end is the initiator of the transport, 1: the responder
    transport(16)     id of the transport, which the other end and the server know, too
    server(33)        the server's public key
    signer(33)        the public key of this end
    peer(33)          the public key of the other end
    delivered_out(8)  bytes of user data that the other end has acknowledged
    delivered_in(8)   bytes of user data that this end has received
    signature(65)     of SHA-256 of "dmsg receipt 1" and all bytes before this field

A server cannot forge a receipt, because it has the secret key of neither client. It can withhold a receipt, but then
the traffic is not credited to the server.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

from dmsg.errors import KeyFormatError, SignatureError
from dmsg.keys import SIGNATURE_SIZE, PubKey, SecKey, Signature

VERSION = 1
_CONTEXT = b"dmsg receipt 1"
_BODY = struct.Struct(">BB16s33s33s33sQQ")
RECEIPT_SIZE = _BODY.size + SIGNATURE_SIZE
IDENTITY_SIZE = 16
_IDENTITY = b"dmsg transport 1"


def transport_identity(request: bytes, accept: bytes) -> bytes:
    """Return the 16 bytes that identify a transport. Only its two clients and its server know them.

    The identity is the first half of SHA-256 over ``dmsg transport 1``, the payload of REQUEST and the payload of
    ACCEPT. A secure transport's payloads contain fresh keys, so every identity is unique.
    """
    return sha256(_IDENTITY + request + accept).digest()[:IDENTITY_SIZE]


class ReceiptError(Exception):
    """Error: the data is not a valid receipt. Its text says why."""


class Role(IntEnum):
    """Role of the signer of a receipt: whether the signer opened the transport or accepted it."""

    INITIATOR = 0
    RESPONDER = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """Content of a receipt."""

    role: Role
    transport: bytes
    server: PubKey
    signer: PubKey
    peer: PubKey
    delivered_out: int
    delivered_in: int

    def sign(self, key: SecKey) -> bytes:
        """Return the 198 bytes of the receipt, signed with the signer's secret key."""
        body = _BODY.pack(
            VERSION,
            self.role,
            self.transport,
            self.server,
            self.signer,
            self.peer,
            min(self.delivered_out, 2**63 - 1),
            min(self.delivered_in, 2**63 - 1),
        )
        return body + key.sign(_CONTEXT + body)


def named_keys(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the transport, the server's key and the signer's key that a receipt names, without any check.

    :param data: ``RECEIPT_SIZE`` bytes.
    """
    _, _, transport, server, signer, _, _, _ = _BODY.unpack_from(data)
    return transport, server, signer


def parse_receipt(data: bytes) -> Receipt:
    """Parse a receipt and verify its signature.

    :raises ReceiptError: the receipt is malformed or not signed by its signer.
    """
    if len(data) != RECEIPT_SIZE:
        raise ReceiptError(f"a receipt cannot have {len(data)} bytes")
    body = data[: _BODY.size]
    version, role, transport, server, signer, peer, out, received = _BODY.unpack(body)
    if version != VERSION or role not in (0, 1) or max(out, received) >= 2**63:
        raise ReceiptError("malformed")
    if signer == peer:
        raise ReceiptError("the receipt names one client as both ends")
    try:
        receipt = Receipt(Role(role), transport, PubKey(server), PubKey(signer), PubKey(peer), out, received)
        receipt.signer.verify(_CONTEXT + body, Signature(data[_BODY.size :]))
    except KeyFormatError:
        raise ReceiptError("a key or the signature in the receipt is malformed") from None
    except SignatureError:
        raise ReceiptError("the receipt is not signed by the client that it names") from None
    return receipt


def unpack_verified(data: bytes) -> Receipt:
    """Return the content of a receipt that :func:`parse_receipt` has accepted before, without any check."""
    _, role, transport, *keys, out, received = _BODY.unpack_from(data)
    server, signer, peer = (bytes.__new__(PubKey, key) for key in keys)
    return Receipt(Role(role), transport, server, signer, peer, out, received)
