"""Link that sends its frames unencrypted. The clients encrypt the content of frames end to end, or not at all."""

from __future__ import annotations

from dmsg.base.pool import DIRECT_SIZE
from dmsg.net.links.interfaces import LinkHandshake
from dmsg.net.links.link import MAX_TAIL, Link
from dmsg.net.links.reading import READ_SIZE

SCRATCH_SIZE = MAX_TAIL + READ_SIZE

_scratch: list[bytearray] = []


class PlainLink(Link):
    """Link with any kind of handshake, followed by plain frames.

    A handshake may have an attribute ``optional`` with some bytes. If the data after the handshake begin with these
    bytes, they are skipped.
    """

    _optional = b""

    def _begin(self, handshake: LinkHandshake) -> None:
        self._optional = getattr(handshake, "optional", b"")

    def _receive(self, data: bytes | memoryview) -> None:
        if self._optional:
            optional, self._optional = self._optional, b""
            data = bytes(data).removeprefix(optional)
        # Each call uses a separate buffer, because a callback may deliver data to another link before it returns.
        buffer = _scratch.pop() if _scratch else bytearray(SCRATCH_SIZE)
        try:
            tail = self._tail
            start = len(tail)
            end = start + len(data)
            buffer[:start] = tail
            buffer[start:end] = data
            if self._user is not None:
                # The unprocessed rest is copied, because the buffer is reused. It is copied from the buffer and not
                # from ``data``, because the core may have modified it in the buffer.
                taken = self._user.frames_received(buffer, end)
                self._tail = b"" if taken == end else bytes(memoryview(buffer)[taken:end])
        finally:
            _scratch.append(buffer)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames, which are sent at the end of the reactor turn."""
        if self._is_lost or self._closing:
            return
        self._pending.append(bytes(data))
        self._pending_size += len(data)
        self._mark_dirty()

    def _take_outgoing(self) -> tuple[list[bytes], int]:
        pending, size = self._pending, self._pending_size
        self._pending = []
        self._pending_size = 0
        # Small pieces are joined, because each write may be a system call. For large pieces the copy would cost more.
        if len(pending) > 1 and size < len(pending) * DIRECT_SIZE:
            pending = [b"".join(pending)]
        return pending, size

    def _unwritten_size(self) -> int:
        return self._pending_size
