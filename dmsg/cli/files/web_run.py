"""Implementation of ``dmsg serve`` and ``dmsg curl``: HTTP over streams."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol as TypingProtocol, TextIO, cast

import click
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web import http
from twisted.web.client import Agent, BrowserLikeRedirectAgent, FileBodyProducer, ResponseDone
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from twisted.web.resource import IResource

from dmsg.apps.exposure import check_source
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.printable import MAX_PEER_TEXT, printable, shorten, without_userinfo
from dmsg.base.units import human_size
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.files.urls import http_url
from dmsg.cli.output import name_file_in_errors, notice, say, state, writing_output
from dmsg.cli.standard_io import StandardOutput
from dmsg.clients.http import DmsgEndpointFactory
from dmsg.errors import DmsgError
from dmsg.net.web.channel import BoundedChannel, BoundedSite

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress
    from twisted.web.http_headers import Headers

    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


IDLE_TIMEOUT = 120
"""Seconds without data after which a connection is closed."""
HARMLESS = "\n\t\u00a0\u202f\u3000\u200d"
"""Characters of a response's body that a terminal shows as they are, although they are not printable: line feed, tab,
three wide or unbreakable spaces, and the character that joins others to one symbol."""


class FileSite(BoundedSite):
    """HTTP site for the peers that an access rule allows.  It prints a line for each request."""

    def __init__(self, reactor: Reactor, resource: IResource, is_allowed: Callable[[IAddress], bool]) -> None:
        from dmsg.net.web.site import bounded_arguments

        seldom = LogThrottle(reactor.seconds)

        def refused(reason: str) -> None:
            if (more := seldom.suffix()) is not None:
                notice(f"a request was refused: {reason}{more}")

        super().__init__(resource, **bounded_arguments(reactor, 0, refused, IDLE_TIMEOUT))
        self.admits = self._allowed = is_allowed
        self.displayTracebacks = False

    def buildProtocol(self, addr: IAddress | None) -> BoundedChannel | None:  # type: ignore[override]
        return super().buildProtocol(addr) if self._allowed(cast("IAddress", addr)) else None

    def log(self, request: http.Request) -> None:
        from dmsg.net.streams.address import DmsgAddress

        peer = request.getClientAddress()
        who = peer.public_key.short if isinstance(peer, DmsgAddress) else "?"
        # With long texts, a stranger could fill the disk if the output is a file.
        method, uri = (
            printable(shorten(text.decode("ascii", "replace"), MAX_PEER_TEXT)) for text in (request.method, request.uri)
        )
        say(f"{who} {method} {uri} {request.code}")


class BinaryBody(DmsgError):
    """Error: a response's body is not text, so a terminal does not show it."""


class _Writer(TypingProtocol):
    """Interface of what a response's body is written to."""

    def write(self, data: bytes, /) -> object:
        """Write the next bytes of the body."""


class _Body(Protocol):
    """Protocol that writes a response's body to a file.

    :param make_output: function that returns the file.  Its argument is the transport of the body.
    :ivar done: Deferred that fires when the body is complete, and fails if it cannot be read or written.
    :ivar failure: reason why the body cannot be written; None if it can.
    """

    _output: _Writer

    def __init__(self, make_output: Callable[[Any], _Writer], progress: Callable[[int], object]) -> None:
        self._make_output = make_output
        self._progress = progress
        self.size = 0
        self.done: Deferred[None] = Deferred()
        self.failure: Exception | None = None

    def connectionMade(self) -> None:
        self._output = self._make_output(self.transport)

    def dataReceived(self, data: bytes) -> None:
        try:
            self._output.write(data)
        except (OSError, BinaryBody) as error:
            self.fail(error)
            return
        self.size += len(data)
        self._progress(self.size)

    def fail(self, error: Exception) -> None:
        """Stop the response, because its body cannot be written."""
        self.failure = self.failure or error
        self.transport.stopProducing()  # type: ignore[union-attr]
        if not self.done.called:
            self.done.errback(Failure(error))

    def connectionLost(self, reason: Failure = Failure(ResponseDone())) -> None:
        if not self.done.called:
            self.done.callback(None if reason.check(ResponseDone) else reason)


class TerminalText:
    """Output for a response's body on a terminal.  Characters that would control the terminal are replaced.

    :param terminal: standard output.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_return = False
        self._replaces = False

    def write(self, data: bytes) -> None:
        """Print the next bytes of the body.

        :raises BinaryBody: the body is not text.
        """
        if b"\0" in data:
            raise BinaryBody("the answer is not text: write it to a file with -o FILE, or to a pipe")
        self._print(self._decoder.decode(data))

    def end(self) -> None:
        """Print the rest of the body, and tell the user if characters were replaced."""
        self._print(self._decoder.decode(b"", True), is_last=True)
        if self._replaces:
            notice("control characters of the answer were replaced: to get them, write it to a file with -o FILE")

    def _print(self, text: str, *, is_last: bool = False) -> None:
        text = "\r" * self._has_return + text
        # The line break CR LF may arrive in two pieces.
        self._has_return = text.endswith("\r") and not is_last
        text = text.removesuffix("\r" * self._has_return).replace("\r\n", "\n")
        shown = printable(text, HARMLESS)
        self._replaces |= shown != text
        self._terminal.buffer.write(shown.encode(self._terminal.encoding or "ascii", "replace"))


@dataclass(frozen=True)
class FetchRequest:
    """HTTP request that the arguments of ``dmsg curl`` describe.

    :ivar start: offset in bytes from which to resume.
    :ivar shows_head: whether to print the status and the headers.
    :ivar fails: whether a status of 400 or more is an error.
    :ivar follows: whether to follow redirects.
    """

    url: str
    verb: bytes
    fields: Headers
    body: str | None
    output: Path | None
    start: int
    head: bool
    shows_head: bool
    fails: bool
    follows: bool
    silent: bool
    write_out: str | None

    def producer(self) -> FileBodyProducer | None:
        """Return a producer of the request's body; None if there is no body."""

        if self.body is None:
            return None
        return FileBodyProducer(
            _body_file(self.body[1:]) if self.body.startswith("@") else io.BytesIO(self.body.encode())
        )


async def fetch(reactor: Reactor, settings: ClientSettings, request: FetchRequest, timeout: float) -> None:
    """Send the request, and write the response to the output."""

    from dmsg.cli.client_run import with_client
    from dmsg.net.web.fetch import make_pool

    target, producer = http_url(request.url), request.producer()
    before = reactor.seconds()

    async def use(client: Client) -> None:
        agent: IAgent = Agent.usingEndpointFactory(
            reactor, DmsgEndpointFactory(client, timeout=timeout), make_pool(reactor, persistent=False)
        )
        if request.follows:
            agent = BrowserLikeRedirectAgent(agent)
        response = await _send_request(agent, request.verb, target, request.fields, producer)
        if request.shows_head:
            _show_head(response)
        if request.start and response.code == 416:
            notice(f"{request.output} is complete already")
            return
        if response.code >= 400 and request.fails:
            if not request.silent:
                say(f"dmsg: {without_userinfo(request.url)[:200]}: the answer has status {response.code}", err=True)
            raise SystemExit(22)
        append = bool(request.start) and response.code == 206
        size = 0 if request.head else await _save(reactor, response, request.output, append=append)
        if request.write_out is not None:
            values = {"http_code": str(response.code), "size_download": str(size)}
            values["time_total"] = f"{reactor.seconds() - before:.6f}"
            with writing_output():
                sys.stdout.write(_written_out(request.write_out, values))

    await with_client(reactor, settings, use)


def _show_head(response: IResponse) -> None:
    say(f"HTTP/1.1 {response.code} {response.phrase.decode('latin-1')}")
    for name, values in response.headers.getAllRawHeaders():
        for value in values:
            say(f"{name.decode('latin-1')}: {value.decode('latin-1')}")
    say()


def start_at(continue_at: str | None, output: Path | None) -> int:
    """Return the offset in bytes from which to resume.

    :param continue_at: value of ``--continue-at``.
    :param output: file to write.
    :raises click.UsageError: the value is not a number.
    """
    if continue_at is None or output is None:
        return 0
    if continue_at == "-":
        return output.stat().st_size if output.exists() else 0
    if not continue_at.isascii() or not continue_at.isdigit():
        raise click.UsageError(
            f"{continue_at!r} is not an offset: give a number of bytes, or - to continue the local file"
        )
    return int(continue_at)


def _written_out(text: str, values: dict[str, str]) -> str:
    """Return a format of ``--write-out`` with ``%{NAME}``, ``\\n`` and ``\\t`` replaced, as in curl."""
    text = re.sub(r"%\{(\w+)\}", lambda match: values.get(match[1], ""), text)
    return text.replace("\\n", "\n").replace("\\t", "\t").replace("%%", "%")


def _body_file(path: str) -> IO[bytes]:
    """Open the file that contains the request's body.

    :raises OSError: the file cannot be read, or is not a regular file. The content of a pipe or device might have no
        end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        check_source(descriptor, path, path=path)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


async def _send_request(
    agent: IAgent, verb: bytes, target: bytes, fields: Headers, producer: IBodyProducer | None
) -> IResponse:
    try:
        return await agent.request(verb, target, fields, producer)
    except DmsgError:
        raise
    except Exception as error:
        reasons = getattr(error, "reasons", None)
        cause = reasons[0].value if reasons else error
        raise DmsgError(" ".join(str(cause).split()) or type(cause).__name__) from None


async def _save(reactor: Reactor, response: IResponse, output: Path | None, *, append: bool) -> int:
    """Write the response's body to a file or to standard output, and return its number of bytes.

    :param append: whether to append to the file.
    """

    from dmsg.cli.files.send_by_key import transfer_progress

    length = response.length if isinstance(response.length, int) else None
    if output is None and not sys.stdout.isatty() and not stat.S_ISREG(os.fstat(1).st_mode):
        return await _save_to_pipe(reactor, response, length)
    if output is None:
        screen = TerminalText(sys.stdout) if sys.stdout.isatty() else None
        body = _Body(lambda _: sys.stdout.buffer if screen is None else screen, lambda size: None)
        with writing_output():
            response.deliverBody(body)
            await _arrived(body, length)
            if screen is not None:
                screen.end()
        return body.size
    mode = "ab" if append else "wb"
    with (
        name_file_in_errors(output),
        open(output, mode, opener=_open_without_waiting) as file,
        transfer_progress() as progress,
    ):
        bar = progress.add_task(output.name, total=length)
        body = _Body(lambda _: file, lambda size: progress.update(bar, completed=size))
        response.deliverBody(body)
        await _arrived(body, length)
    if not state.quiet:
        say(f"{output}: {human_size(body.size)}", err=True)
    return body.size


async def _save_to_pipe(reactor: Reactor, response: IResponse, length: int | None) -> int:
    """Write the response's body to standard output, which is no file, and return the body's number of bytes.

    A blocking write would block the whole command while the reader of the pipe does not read: neither would Ctrl-C end
    it, nor would it answer the pings of its server.
    """
    piped: list[StandardOutput] = []

    def make_output(source: Any) -> StandardOutput:
        piped.append(StandardOutput(reactor, source, body.fail))
        return piped[0]

    body = _Body(make_output, lambda size: None)
    with writing_output():
        sys.stdout.flush()
        response.deliverBody(body)
        await _arrived(body, length)
        await piped[0].close()
        if body.failure is not None:
            raise body.failure
    return body.size


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file for writing, without waiting for a reader if the file is a named pipe.  While the command waited,
    neither Ctrl-C nor SIGTERM could end the command.

    :raises OSError: the file cannot be opened, or is a named pipe that no program reads.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "no program reads this pipe", path) from None
    os.set_blocking(descriptor, True)
    return descriptor


async def _arrived(body: _Body, length: int | None) -> None:

    try:
        await body.done
    except (OSError, BinaryBody):
        raise
    except CancelledError:
        raise  # A cancellation, such as that of Ctrl-C, must not become another error.
    except Exception as error:
        if error is body.failure:
            raise
        # Twisted's HTTP client wraps errors in a list; the first of them is reported.
        reasons = getattr(error, "reasons", None)
        if reasons:
            error = reasons[0].value
        got = f"{body.size} of {length} bytes" if length is not None else f"{body.size} bytes"
        raise DmsgError(
            f"the transfer was cut after {got}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from None
