"""Path of the agent's socket, and a check whether an agent answers there, without a reactor.

The path is ``$DMSG_AGENT`` (``off`` disables the agent for this program), or else ``dmsg/agent.sock`` in
``$XDG_RUNTIME_DIR`` or, without that variable, in ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dmsg.agent.wire import (
    MAX_LINE,
    MAX_STATUS,
    PROTOCOL,
    Answer,
    Reader,
    WireError,
    encode_line,
    parse_line,
    raise_error,
)
from dmsg.directories import SOCKET_NAME, socket_directory
from dmsg.errors import DmsgError
from dmsg.keys import PubKey

MAX_PATH = 100
"""Maximum bytes of the socket's path; the system allows 107."""
ANSWER_TIMEOUT = 2.0
"""Seconds that a command waits for an answer that the agent can compute at once. Programs wait longer
(:mod:`dmsg.agent.connections`), because nobody sits in front of them."""
_CREDENTIALS = struct.Struct("3i")


class AgentError(DmsgError):
    """Error: an agent is running but cannot be used, or a new agent cannot open its socket."""


@dataclass(frozen=True)
class FoundAgent:
    """Description of a running agent.

    :ivar path: path of its socket.
    :ivar key: public key of its client.
    :ivar pid: id of its process.
    :ivar discovery: URLs of the discoveries that its client uses.
    :ivar encryption: encryption policy of its client: ``require``, ``prefer`` or ``off``.
    """

    path: Path
    key: PubKey
    pid: int
    discovery: tuple[str, ...]
    encryption: str


def agent_path() -> Path | None:
    """Return the path of the agent's socket, or None if ``DMSG_AGENT`` is ``off``.  The socket need not exist."""
    named = os.environ.get("DMSG_AGENT", "")
    if named.lower() == "off":
        return None
    if named:
        return Path(named)
    return socket_directory() / SOCKET_NAME


def find_agent(path: Path | None = None) -> FoundAgent | None:
    """Return the running agent, or None if no agent is running.

    :param path: path of the agent's socket; None stands for the result of ``agent_path``.
    :raises AgentError: the socket belongs to another user, or the agent does not answer or has another version.
    """
    path = path or agent_path()
    if path is None or not is_socket(path):
        return None
    try:
        answer = ask(path, {"do": "hello"})
    except (FileNotFoundError, ConnectionRefusedError):
        return None  # There is no socket, or a killed agent has left it.
    except OSError as error:
        raise AgentError(f"agent at {path}: {error.strerror or error}") from None
    except DmsgError as error:
        raise AgentError(f"agent at {path}: {error}") from None
    if answer.get("protocol") != PROTOCOL:
        raise AgentError(
            f"agent at {path}: the agent is another version of dmsg; restart the agent with: dmsg down, dmsg up"
        )
    try:
        return FoundAgent(
            path,
            PubKey.from_hex(str(answer["key"])),
            int(answer["pid"]),
            tuple(str(one) for one in answer["discovery"]),
            str(answer["encryption"]),
        )
    except (KeyError, TypeError, ValueError):
        raise AgentError(f"agent at {path}: the agent's answer is malformed") from None


def is_socket(path: Path) -> bool:
    """Whether there is a socket at the path.

    :raises AgentError: the socket belongs to another user.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        return False
    if found.st_uid not in (os.getuid(), 0):
        raise AgentError(f"agent at {path}: the agent's socket belongs to another user")
    return True


def ask(path: Path, request: dict[str, object], *, timeout: float = ANSWER_TIMEOUT) -> Answer:
    """Send a request and return the first line of its answer.  Blocks.

    :param timeout: seconds to wait for the answer.
    :raises OSError: no answer came.
    :raises DmsgError: the agent reports a failure.
    """
    for answer in lines(path, request, timeout=timeout, limit=MAX_STATUS):
        return answer
    raise ConnectionResetError(None, "the agent closed the connection without an answer")


def lines(
    path: Path, request: dict[str, object], *, timeout: float = ANSWER_TIMEOUT, limit: int = MAX_LINE
) -> Iterator[Answer]:
    """Send a request, and yield the lines of the answer until the agent closes the connection.  Blocks.

    :param timeout: seconds to wait for each line.
    :param limit: maximum bytes of a line.
    :raises OSError: the agent is not running, or did not send a line in time.
    :raises DmsgError: the agent reports a failure.
    """
    reader = Reader()
    with closing(open_socket(path, timeout)) as channel:
        channel.sendall(encode_line(request))
        while True:
            try:
                text = reader.next_line(limit)
                while text is None:
                    data = channel.recv(65536)
                    if not data:
                        return
                    reader.feed(data)
                    text = reader.next_line(limit)
                answer = parse_line(text)
            except WireError as error:
                raise AgentError(f"agent at {path}: {error}") from None
            except TimeoutError:
                raise TimeoutError(None, f"the agent did not answer within {timeout:g} s") from None
            raise_error(answer)
            yield answer


def open_socket(path: Path, timeout: float = ANSWER_TIMEOUT) -> socket.socket:
    """Return a socket that is connected to the agent.

    :param timeout: timeout of the socket's operations, in seconds.
    :raises OSError: the connection failed.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(timeout)
        channel.connect(os.fspath(path))
    except OSError:
        channel.close()
        raise
    return channel


def peer_of(channel: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a Unix socket."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid
