"""Responses of discovery with JSON in their body."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from twisted.web.http import CACHED
from twisted.web.iweb import IRequest


def json_response(request: IRequest, body: bytes, status: int = 200) -> bytes:
    """Set the status and the type of a response; return its body."""
    request.setResponseCode(status)
    request.setHeader(b"content-type", b"application/json")
    return body


def entry_response(request: IRequest, body: bytes) -> bytes:
    """Return a response with an entry. If the client already has this version of it (``If-None-Match``), the response
    is empty and has status 304.
    """
    if request.setETag(b'"%s"' % blake2b(body, digest_size=12).hexdigest().encode()) is CACHED:
        return b""
    return json_response(request, body)


def list_response(request: IRequest, bodies: Iterable[bytes]) -> bytes:
    """Return a response with a JSON array of ``bodies``, which are already encoded as JSON."""
    return json_response(request, b"[" + b",".join(bodies) + b"]")
