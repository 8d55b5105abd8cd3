"""Client of TLS over the OpenSSL library of this machine, whose messages a test can choose one by one."""

from __future__ import annotations

import ctypes
import ctypes.util
import hmac
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from twisted.internet.protocol import Protocol

TLS_1_2 = 0x0303
_SET_MAX_VERSION = 124
_WANT_READ = 2


def _library(name: str, **results: Any) -> Any:
    found = ctypes.util.find_library(name)
    if found is None:
        return None
    library = ctypes.CDLL(found)
    for function, result in results.items():
        getattr(library, function).restype = result
    return library


_POINTER = ctypes.c_void_p
_ssl = _library("ssl", TLS_client_method=_POINTER, SSL_CTX_new=_POINTER, SSL_new=_POINTER, SSL_get_session=_POINTER)
_crypto = _library("crypto", BIO_new=_POINTER, BIO_s_mem=_POINTER)
MISSING = "" if _ssl and _crypto and hasattr(_ssl, "SSL_key_update") else "there is no OpenSSL library here"


def _prf(secret: bytes, seed: bytes, size: int) -> bytes:
    """Return key material as TLS 1.2 derives it with SHA-256 (RFC 5246, 5)."""
    found, part = b"", seed
    while len(found) < size:
        part = hmac.digest(secret, part, "sha256")
        found += hmac.digest(secret, part + seed, "sha256")
    return found[:size]


class OpenSSLClient(Protocol):
    """Connection of a TLS client.

    :param inner: protocol inside TLS, which is connected when the handshake is done.
    :param newest: newest version of TLS that the client offers; 0 is the newest of the library.
    :param offers: protocol that the client names (ALPN); none if it is empty.
    """

    def __init__(self, inner: Any = None, newest: int = 0, offers: bytes = b"") -> None:
        self.inner = inner
        self.shaken = self.closed = False
        self._context = _POINTER(_ssl.SSL_CTX_new(_POINTER(_ssl.TLS_client_method())))
        _ssl.SSL_CTX_ctrl(self._context, _SET_MAX_VERSION, newest, None)
        self._tls = _POINTER(_ssl.SSL_new(self._context))
        self._incoming, self._outgoing = (_POINTER(_crypto.BIO_new(_POINTER(_crypto.BIO_s_mem()))) for _ in range(2))
        _ssl.SSL_set_bio(self._tls, self._incoming, self._outgoing)
        _ssl.SSL_set_connect_state(self._tls)
        _ssl.SSL_set_cipher_list(self._tls, b"ECDHE-ECDSA-AES128-GCM-SHA256")
        if offers:
            listed = bytes([len(offers)]) + offers
            _ssl.SSL_set_alpn_protos(self._tls, listed, len(listed))

    def connectionMade(self) -> None:
        self._advance()

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True
        _ssl.SSL_free(self._tls)
        _ssl.SSL_CTX_free(self._context)
        if self.inner is not None and self.shaken:
            self.inner.connectionLost(reason)

    def _advance(self) -> bool:
        """Continue a handshake; return whether it is done."""
        done = bool(_ssl.SSL_do_handshake(self._tls) == 1)
        self.flush()
        return done

    def flush(self) -> None:
        """Send what OpenSSL has written."""
        buffer = ctypes.create_string_buffer(65536)
        data = b""
        while (size := _crypto.BIO_read(self._outgoing, buffer, len(buffer))) > 0:
            data += buffer.raw[:size]
        if data:
            self.transport.write(data)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        if self.closed:
            return
        _crypto.BIO_write(self._incoming, data, len(data))
        if not self.shaken and self._advance():
            self.shaken = True
            if self.inner is not None:
                self.inner.makeConnection(self)
        buffer = ctypes.create_string_buffer(65536)
        while self.shaken and not self.closed and (size := _ssl.SSL_read(self._tls, buffer, len(buffer))) > 0:
            if self.inner is not None:
                self.inner.dataReceived(buffer.raw[:size])
        self.flush()

    def write(self, data: bytes) -> None:
        """Send data, unless the connection has ended."""
        if self.closed:
            return
        assert _ssl.SSL_write(self._tls, data, len(data)) == len(data)
        self.flush()

    def update_keys(self, times: int, *, answer: bool = False) -> None:
        """Send messages KeyUpdate, which ask for an answer or do not."""
        for _ in range(0 if self.closed else times):
            assert _ssl.SSL_key_update(self._tls, int(answer)) == 1
            assert _ssl.SSL_do_handshake(self._tls) == 1
        self.flush()

    def refused_hellos(self, times: int) -> bytes:
        """Return records of TLS 1.2 that begin a renegotiation again and again, which OpenSSL's client does not do.

        The client must not send anything else, because OpenSSL does not count these records.
        """
        master, client, server = (ctypes.create_string_buffer(size) for size in (48, 32, 32))
        _ssl.SSL_SESSION_get_master_key(_POINTER(_ssl.SSL_get_session(self._tls)), master, 48)
        _ssl.SSL_get_client_random(self._tls, client, 32)
        _ssl.SSL_get_server_random(self._tls, server, 32)
        block = _prf(master.raw, b"key expansion" + server.raw + client.raw, 40)
        cipher, salt = AESGCM(block[:16]), block[32:36]
        hello, kind = b"\1\0\0\0", b"\x16\3\3"
        records = []
        # The client's Finished message was record 0.
        for number in range(1, times + 1):
            nonce = number.to_bytes(8, "big")
            body = nonce + cipher.encrypt(salt + nonce, hello, nonce + kind + len(hello).to_bytes(2, "big"))
            records.append(kind + len(body).to_bytes(2, "big") + body)
        return b"".join(records)

    def renegotiate(self) -> None:
        """Ask for a renegotiation."""
        assert _ssl.SSL_renegotiate(self._tls) == 1
        self._advance()

    @property
    def alpn(self) -> bytes:
        """Protocol that the server chose; empty if it chose none."""
        name, size = _POINTER(), ctypes.c_uint()
        _ssl.SSL_get0_alpn_selected(self._tls, ctypes.byref(name), ctypes.byref(size))
        return ctypes.string_at(name, size.value) if size.value else b""
