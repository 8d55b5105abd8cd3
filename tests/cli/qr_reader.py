"""Camera for tests: reads the QR code that a command has drawn on a terminal, with the decoder zxing-cpp."""

from __future__ import annotations

import zxingcpp

PIXELS = 4
"""Pixels of the picture for each module of the code, in both directions."""
_HALVES = {"█": (255, 255), "▀": (255, 0), "▄": (0, 255), " ": (0, 0)}
"""Grey values of the upper and the lower half of a character, on a terminal whose background is dark."""


def qr_rows(screen: str) -> list[str]:
    """Return the consecutive lines of a terminal that form a QR code."""
    lines = screen.splitlines()
    rows = [index for index, line in enumerate(lines) if line.startswith("██") or set(line.strip()) == {"▀"}]
    assert rows and rows == list(range(rows[0], rows[-1] + 1)), screen
    return [lines[index] for index in rows]


def read_qr(screen: str) -> str:
    """Return the text of the QR code on a terminal.

    :raises AssertionError: the terminal shows no QR code that can be read.
    """
    rows = qr_rows(screen)
    width = max(map(len, rows))
    picture = bytearray()
    for row in rows:
        for half in (0, 1):
            line = bytes(_HALVES[one][half] for one in row.ljust(width) for _ in range(PIXELS))
            picture += line * PIXELS
    shape = (len(rows) * 2 * PIXELS, width * PIXELS)
    # The code must be readable as it is drawn: without rotation, and not as its negative.
    found = zxingcpp.read_barcode(
        memoryview(picture).cast("B", shape),
        zxingcpp.BarcodeFormats(zxingcpp.BarcodeFormat.QRCode),
        try_rotate=False,
        try_invert=False,
    )
    assert found is not None, screen
    return found.text
