"""Hash function XXH64 of several values, as Spark's ``xxhash64`` computes it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from struct import unpack_from

SEED = 42
_BITS = 2**64 - 1
_P1 = 0x9E3779B185EBCA87
_P2 = 0xC2B2AE3D27D4EB4F
_P3 = 0x165667B19E3779F9
_P4 = 0x85EBCA77C2B2AE63
_P5 = 0x27D4EB2F165667C5


def _rotate(number: int, bits: int) -> int:
    return ((number << bits) | (number >> (64 - bits))) & _BITS


def _mix(lane: int, value: int) -> int:
    return _rotate((lane + value * _P2) & _BITS, 31) * _P1 & _BITS


def hash_bytes(data: bytes, seed: int) -> int:
    """Return XXH64 of some bytes, as an unsigned number."""
    length, place = len(data), 0
    if length >= 32:
        lanes = [(seed + _P1 + _P2) & _BITS, (seed + _P2) & _BITS, seed, (seed - _P1) & _BITS]
        while place + 32 <= length:
            lanes = [_mix(lane, value) for lane, value in zip(lanes, unpack_from("<4Q", data, place), strict=True)]
            place += 32
        found = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _BITS
        for lane in lanes:
            found = ((found ^ _mix(0, lane)) * _P1 + _P4) & _BITS
    else:
        found = (seed + _P5) & _BITS
    found = (found + length) & _BITS
    while place + 8 <= length:
        (value,) = unpack_from("<Q", data, place)
        found = (_rotate(found ^ _mix(0, value), 27) * _P1 + _P4) & _BITS
        place += 8
    if place + 4 <= length:
        (value,) = unpack_from("<I", data, place)
        found = (_rotate(found ^ (value * _P1 & _BITS), 23) * _P2 + _P3) & _BITS
        place += 4
    for value in data[place:]:
        found = _rotate(found ^ (value * _P5 & _BITS), 11) * _P1 & _BITS
    found = (found ^ (found >> 33)) * _P2 & _BITS
    found = (found ^ (found >> 29)) * _P3 & _BITS
    return found ^ (found >> 32)


@lru_cache(maxsize=50_000)
def xxhash64_of_text(text: str | None) -> int:
    """Return the hash of a single text. The cache holds the names of clients, which occur in the rows of many days."""
    return xxhash64((text,))


def xxhash64(texts: Iterable[str | None], seed: int = SEED) -> int:
    """Return the hash of several texts, as a signed number. A text that is None does not count."""
    for text in texts:
        if text is not None:
            seed = hash_bytes(text.encode(), seed)
    return seed - 2**64 if seed >= 2**63 else seed
