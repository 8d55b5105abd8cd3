"""Packets of multicast DNS (RFC 6762) with one question for a TXT record, and with its answer. No I/O.

A question that is sent from a port other than 5353 is answered as in unicast DNS (RFC 6762, section 6.7). The answer
goes to that port only, with the identifier of the question and with the question repeated. So the network as a whole
sees neither the answer nor who received it.

Anybody on the network can send anything to these parsers, so they accept one form of packet only. The only compressed
name is the pointer to the question. There are no further records, and no bytes after the answer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dmsg.errors import DmsgError

PORT = 5353
"""UDP port of multicast DNS."""
TXT, IN = 16, 1
MAX_PACKET = 512
"""Maximum number of bytes of a packet. Longer packets are not parsed."""
MAX_TEXT = 255
"""Maximum number of bytes of a character string in a TXT record."""
ANSWER_TTL = 10
"""Seconds for which an answer may be cached. This is the maximum that RFC 6762 permits for an answer to a port other
than 5353."""

_HEADER = struct.Struct(">HHHHHH")
_TYPE = struct.Struct(">HH")
_RECORD = struct.Struct(">HHIH")
_ANSWER = 0x8400
"""Flags of a multicast DNS answer: it is a response, and authoritative."""
_UNICAST = 0x8000
"""Highest bit of the class field in a DNS question or record. In a question it requests a unicast answer; in an answer
it marks the record as the only one with this name and type."""
_FLAGS_OF_ANSWER = 0xF80F
"""Flags that must have fixed values in an answer without error: response, opcode and error code."""
_POINTER_TO_QUESTION = b"\xc0\x0c"
MAX_LABEL = 63

Name = tuple[bytes, ...]
"""DNS name as a tuple of its labels, in lower case."""


class MalformedPacket(DmsgError):
    """Error: the packet does not have the accepted form of a question or of an answer. It may still be valid DNS."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question of multicast DNS for the TXT record of a name.

    :ivar identifier: 16 bits that the answer repeats.
    """

    identifier: int
    name: Name

    def encode(self) -> bytes:
        """Return the packet with the question."""
        return _HEADER.pack(self.identifier, 0, 1, 0, 0, 0) + self._encode_question()

    def encode_answer(self, text: bytes) -> bytes:
        """Return the packet with the answer to this question.

        :param text: at most 255 bytes, the only character string of the record.
        """
        if len(text) > MAX_TEXT:
            raise ValueError("the text of a record has at most 255 bytes")
        record = _RECORD.pack(TXT, IN, ANSWER_TTL, 1 + len(text)) + bytes((len(text),)) + text
        head = _HEADER.pack(self.identifier, _ANSWER, 1, 1, 0, 0)
        return head + self._encode_question() + _POINTER_TO_QUESTION + record

    def _encode_question(self) -> bytes:
        return encode_name(self.name) + _TYPE.pack(TXT, IN)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question of multicast DNS.

    :ivar text: the only character string of the TXT record.
    """

    question: Question
    text: bytes


def encode_name(name: Name) -> bytes:
    """Return the encoding of a name, without compression."""
    if not all(0 < len(label) <= MAX_LABEL for label in name):
        raise ValueError("a label has 1 to 63 bytes")
    return b"".join(bytes((len(label),)) + label for label in name) + b"\0"


def parse_question(data: bytes) -> Question:
    """Parse a packet with one question.

    :raises MalformedPacket: the packet is anything else.
    """
    identifier, flags, questions, *others = _header(data)
    if flags or questions != 1 or any(others):
        raise MalformedPacket("the packet does not have one question and nothing else")
    question, end = _question(data, identifier)
    if end != len(data):
        raise MalformedPacket("the packet has further bytes after its question")
    return question


def parse_answer(data: bytes) -> Answer:
    """Parse a packet with one question and its answer.

    :raises MalformedPacket: the packet is anything else.
    """
    identifier, flags, *counts = _header(data)
    if flags & _FLAGS_OF_ANSWER != 0x8000 or counts != [1, 1, 0, 0]:
        raise MalformedPacket("the packet does not have one question and one answer")
    question, position = _question(data, identifier)
    if data[position : position + 2] == _POINTER_TO_QUESTION:
        position += 2
    else:
        name, position = _name(data, position)
        if name != question.name:
            raise MalformedPacket("the answer has another name than the question")
    text_at = position + _RECORD.size
    if text_at >= len(data):
        raise MalformedPacket("the record is cut off")
    kind, group, _, size = _RECORD.unpack_from(data, position)
    text = data[text_at + 1 :]
    if kind != TXT or group & ~_UNICAST != IN or size != 1 + len(text) or data[text_at] != len(text):
        raise MalformedPacket("the record is not a TXT record with one character string")
    return Answer(question, text)


def _header(data: bytes) -> tuple[int, ...]:
    if not _HEADER.size <= len(data) <= MAX_PACKET:
        raise MalformedPacket("the packet is too short or too long")
    return _HEADER.unpack_from(data)


def _question(data: bytes, identifier: int) -> tuple[Question, int]:
    name, position = _name(data, _HEADER.size)
    if len(data) < position + _TYPE.size:
        raise MalformedPacket("the question is cut off")
    kind, group = _TYPE.unpack_from(data, position)
    if kind != TXT or group & ~_UNICAST != IN:
        raise MalformedPacket("the question is not for a TXT record")
    return Question(identifier, name), position + _TYPE.size


def _name(data: bytes, position: int) -> tuple[Name, int]:
    labels: list[bytes] = []
    while position < len(data):
        size = data[position]
        position += 1
        if not size:
            return tuple(labels), position
        # This check also refuses a compressed name: its first two bits are set, so it looks like a label that is too
        # long.
        if size > MAX_LABEL or position + size > len(data):
            break
        labels.append(bytes(data[position : position + size]).lower())
        position += size
    raise MalformedPacket("the name is compressed or cut off")
