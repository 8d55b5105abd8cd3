"""Hash function XXH64 of several values, as Spark's ``xxhash64`` computes it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from struct import unpack_from

import pyarrow as pa
import pyarrow.compute as pc

SEED = 42
_MANY = 64
"""Number of texts of one length from which Arrow hashes them together."""
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


def xxhash64(texts: Iterable[str | None], seed: int = SEED) -> int:
    """Return the hash of several texts, as a signed number. A text that is None does not count."""
    for text in texts:
        if text is not None:
            seed = hash_bytes(text.encode(), seed)
    return seed - 2**64 if seed >= 2**63 else seed


def xxhash64_of_texts(texts: pa.StringArray) -> pa.Array:
    """Return the hash of each text of a column, as signed numbers."""
    hashes = pa.array([], pa.int64())
    places = pa.array([], pa.int64())
    lengths = pc.binary_length(texts)
    for length in pc.unique(lengths).to_pylist():
        place = pc.indices_nonzero(pc.is_null(lengths) if length is None else pc.equal(lengths, length))
        some = texts.take(place)
        if length is None or len(some) < _MANY:
            found = pa.array([xxhash64((text,)) for text in some.to_pylist()], pa.int64())
        else:
            found = _hash_of_length(some, length)
        hashes, places = pa.concat_arrays([hashes, found]), pa.concat_arrays([places, place.cast(pa.int64())])
    return hashes.take(pc.sort_indices(places))


def _number(number: int) -> pa.Scalar:
    return pa.scalar(number & _BITS, pa.uint64())


def _rotate_all(numbers: pa.Array, bits: int) -> pa.Array:
    return pc.bit_wise_or(pc.shift_left(numbers, _number(bits)), pc.shift_right(numbers, _number(64 - bits)))


def _mix_all(lanes: pa.Array | pa.Scalar, values: pa.Array) -> pa.Array:
    mixed = _rotate_all(pc.add(lanes, pc.multiply(values, _number(_P2))), 31)
    return pc.multiply(mixed, _number(_P1))


def _hash_of_length(texts: pa.StringArray, length: int) -> pa.Array:
    """Return the hash of each text, as :func:`hash_bytes` with :data:`SEED` computes it. Arrow's arithmetic of unsigned
    numbers has no overflow, so each step is computed for all texts at once.

    :param length: length of each text in bytes.
    """
    count = len(texts)
    # ``take`` has copied the texts, so they follow each other in the buffer from its start.
    data = texts.buffers()[2]
    bytes_of = pa.Array.from_buffers(pa.binary(length), count, [None, data])

    def words(start: int, kind: pa.DataType) -> pa.Array:
        size = kind.bit_width // 8
        return pc.binary_slice(bytes_of, start, start + size).cast(pa.binary(size)).view(kind).cast(pa.uint64())

    place = 0
    if length >= 32:
        starts = (SEED + _P1 + _P2, SEED + _P2, SEED, SEED - _P1)
        lanes = [pa.repeat(_number(start), count) for start in starts]
        while place + 32 <= length:
            lanes = [_mix_all(lane, words(place + 8 * index, pa.uint64())) for index, lane in enumerate(lanes)]
            place += 32
        found = pa.repeat(_number(0), count)
        for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
            found = pc.add(found, _rotate_all(lane, bits))
        for lane in lanes:
            mixed = pc.bit_wise_xor(found, _mix_all(_number(0), lane))
            found = pc.add(pc.multiply(mixed, _number(_P1)), _number(_P4))
    else:
        found = pa.repeat(_number(SEED + _P5), count)
    found = pc.add(found, _number(length))
    while place + 8 <= length:
        mixed = pc.bit_wise_xor(found, _mix_all(_number(0), words(place, pa.uint64())))
        found = pc.add(pc.multiply(_rotate_all(mixed, 27), _number(_P1)), _number(_P4))
        place += 8
    if place + 4 <= length:
        mixed = pc.bit_wise_xor(found, pc.multiply(words(place, pa.uint32()), _number(_P1)))
        found = pc.add(pc.multiply(_rotate_all(mixed, 23), _number(_P2)), _number(_P3))
        place += 4
    for start in range(place, length):
        mixed = pc.bit_wise_xor(found, pc.multiply(words(start, pa.uint8()), _number(_P5)))
        found = pc.multiply(_rotate_all(mixed, 11), _number(_P1))
    for bits, factor in ((33, _P2), (29, _P3)):
        mixed = pc.bit_wise_xor(found, pc.shift_right(found, _number(bits)))
        found = pc.multiply(mixed, _number(factor))
    return pc.bit_wise_xor(found, pc.shift_right(found, _number(32))).view(pa.int64())
