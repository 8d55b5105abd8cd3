"""``dmsg serve`` and ``dmsg curl``: HTTP over dmsg."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import click
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from twisted.web.client import Agent, BrowserLikeRedirectAgent, FileBodyProducer, ResponseDone
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from twisted.web.resource import IResource
from twisted.web.server import Request, Site
from twisted.web.static import File
from zope.interface import implementer

from dmsg.cli.files import transfer_progress
from dmsg.cli.forward import allow_option, only
from dmsg.cli.running import (
    ClientSettings,
    client_options,
    human_size,
    run,
    serve_until_interrupted,
    timeout_option,
    with_client,
)
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.names import Names
from dmsg.net.endpoints import DmsgClientEndpoint
from dmsg.net.stream import DmsgAddress
from dmsg.transport.service import Client
from dmsg.transport.strings import parse_port

HTTP_PORT = 80
SCHEME = "dmsg"
IDLE_TIMEOUT = 120
"""Seconds that a connection may be silent."""


class _Contained(File):
    """Files of one directory; a link that leads out of it is not there."""

    root = ""

    def getChild(self, path: bytes, request: Request) -> IResource:
        child: Any = super().getChild(path, request)  # type: ignore[no-untyped-call]
        if isinstance(child, _Contained):
            child.root = self.root
            real = os.path.realpath(child.path)
            if real != self.root and not real.startswith(self.root.rstrip(os.sep) + os.sep):
                return self.childNotFound
        return child  # type: ignore[no-any-return]

    def createSimilarFile(self, path: str) -> Any:
        similar = super().createSimilarFile(path)  # type: ignore[no-untyped-call]
        similar.root = self.root
        return similar


def file_site(directory: str | os.PathLike[str]) -> IResource:
    """A resource with the files of ``directory``: ranges, listings, nothing outside."""
    resource = _Contained(os.fspath(directory))
    resource.root = os.path.realpath(directory)
    return resource


class _Site(Site):
    noisy = False

    def __init__(self, resource: Any, allow: tuple[PubKey, ...]) -> None:
        super().__init__(resource, timeout=IDLE_TIMEOUT)  # type: ignore[no-untyped-call]
        self._allowed = only(allow)
        self.displayTracebacks = False

    def buildProtocol(self, addr: Any) -> Any:
        return super().buildProtocol(addr) if self._allowed(addr) else None  # type: ignore[no-untyped-call]

    def log(self, request: Any) -> None:
        peer: IAddress = request.getClientAddress()
        who = peer.public_key.short if isinstance(peer, DmsgAddress) else "?"
        path = "".join(char if char.isprintable() else "?" for char in request.uri.decode("ascii", "replace"))
        click.echo(f"{who} {request.method.decode('ascii', 'replace')} {path} {request.code}")


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, readable=True, path_type=Path))
@click.option("--port", "-p", default=HTTP_PORT, show_default=True, type=click.IntRange(0, 65535))
@allow_option
@client_options
def serve(directory: Path, port: int, allow: tuple[PubKey, ...], settings: ClientSettings) -> None:
    """Serve the files of DIRECTORY over HTTP to peers.

    \b
    Example:
      dmsg serve public --key-file alice.key
      dmsg curl dmsg://alice/notes.txt
    """

    async def main(reactor: Any) -> None:
        async def use(client: Client) -> None:
            listening = client.listen(_Site(file_site(directory), allow), port)
            url = f"{SCHEME}://{client.public_key}{'' if port == HTTP_PORT else f':{port}'}/"
            click.echo(f"{directory} is at {url}")
            await serve_until_interrupted(listening)

        await with_client(reactor, settings, use, published=True)

    run(main)


@implementer(IAgentEndpointFactory)
class DmsgEndpointFactory:
    """For :meth:`twisted.web.client.Agent.usingEndpointFactory`: ``http://KEY/`` and ``http://NAME/`` over dmsg."""

    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def endpointForURI(self, uri: Any) -> DmsgClientEndpoint:
        """As in :class:`twisted.web.iweb.IAgentEndpointFactory`."""
        key = Names().find(uri.host.decode("ascii"))
        return DmsgClientEndpoint(self._client, key, self._timeout, port=uri.port)


class _Body(Protocol):
    """Writes what comes to a file."""

    def __init__(self, output: IO[bytes], progress: Any) -> None:
        self._output = output
        self._progress = progress
        self.size = 0
        self.done: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        try:
            self._output.write(data)
        except OSError:
            self.transport.stopProducing()  # type: ignore[union-attr]
            if not self.done.called:
                self.done.errback(Failure())
            return
        self.size += len(data)
        self._progress(self.size)

    def connectionLost(self, reason: Failure = Failure(ResponseDone())) -> None:
        if not self.done.called:
            self.done.callback(None if reason.check(ResponseDone) else reason)


def _http_url(url: str) -> bytes:
    """``dmsg://KEY:PORT/PATH`` as the HTTP client wants it.

    :raises DmsgError: it is none.
    """
    try:
        parts = urlsplit(url if "://" in url else f"{SCHEME}://{url}")
        if parts.scheme != SCHEME or not parts.hostname:
            raise ValueError
        key = Names().find(parts.hostname)
        port = parse_port(parts.netloc.rpartition(":")[2]) if ":" in parts.netloc else HTTP_PORT
    except DmsgError:
        raise
    except ValueError:
        raise DmsgError(f"{url[:200]!r} is not a URL, as dmsg://KEY:PORT/PATH is") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return f"http://{key}:{port}{path}".encode()


@click.command()
@click.argument("url")
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write there, not to stdout.")
@click.option("--continue", "-C", "go_on", is_flag=True, help="Go on with the file that --output names.")
@click.option("--range", "-r", "byte_range", metavar="FROM-TO", help="Only these bytes.")
@click.option("--request", "-X", "method", help="Method; GET if there is no --data.")
@click.option("--data", "body", help="Body of a POST; @FILE takes it from a file.")
@click.option("--header", "-H", "headers", multiple=True, metavar="NAME: VALUE", help="Header; repeatable.")
@click.option("--include", "-i", is_flag=True, help="Show status and headers too.")
@click.option("--fail", "-f", "fail_fast", is_flag=True, help="A status of 400 and more ends with 22 and no output.")
@click.option("--location", "-L", is_flag=True, help="Follow redirections.")
@client_options
@timeout_option
def curl(
    url: str,
    output: Path | None,
    go_on: bool,
    byte_range: str | None,
    method: str | None,
    body: str | None,
    headers: tuple[str, ...],
    include: bool,
    fail_fast: bool,
    location: bool,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Fetch URL, as in dmsg://KEY:PORT/PATH or dmsg://NAME/PATH.

    \b
    Examples:
      dmsg curl dmsg://alice/notes.txt
      dmsg curl -o film.mkv -C dmsg://alice/film.mkv
    """
    if go_on and output is None:
        raise click.UsageError("--continue needs --output")
    fields = Headers({"user-agent": ["dmsg"]})
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon:
            raise click.UsageError(f"{header!r} is not NAME: VALUE")
        fields.addRawHeader(name.strip(), value.strip())
    start = output.stat().st_size if go_on and output is not None and output.exists() else 0
    if start:
        byte_range = f"{start}-"
    if byte_range:
        fields.setRawHeaders("range", [f"bytes={byte_range}"])

    async def main(reactor: Any) -> None:
        target = _http_url(url)
        producer = None
        if body is not None:
            file = Path(body[1:]).open("rb") if body.startswith("@") else _bytes_file(body)
            producer = FileBodyProducer(file)

        async def use(client: Client) -> None:
            agent: Any = Agent.usingEndpointFactory(reactor, DmsgEndpointFactory(client, timeout))
            if location:
                agent = BrowserLikeRedirectAgent(agent)
            verb = (method or ("GET" if body is None else "POST")).upper().encode()
            response = await _requested(agent, verb, target, fields, producer)
            if include:
                click.echo(f"HTTP/1.1 {response.code} {response.phrase.decode('latin-1')}")
                for name, values in response.headers.getAllRawHeaders():
                    for value in values:
                        click.echo(f"{name.decode('latin-1')}: {value.decode('latin-1')}")
                click.echo()
            if start and response.code == 416:
                click.echo(f"{output} is whole already", err=True)
                return
            if response.code >= 400 and (fail_fast or output is not None):
                click.echo(f"dmsg: {url[:200]}: status {response.code}", err=True)
                raise SystemExit(22)
            await _save(response, output, append=bool(start) and response.code == 206)

        await with_client(reactor, settings, use)

    run(main)


async def _requested(agent: Any, verb: bytes, target: bytes, fields: Headers, producer: Any) -> Any:
    try:
        return await agent.request(verb, target, fields, producer)
    except DmsgError:
        raise
    except Exception as error:
        reasons = getattr(error, "reasons", None)
        cause = reasons[0].value if reasons else error
        raise DmsgError(" ".join(str(cause).split()) or type(cause).__name__) from None


async def _save(response: Any, output: Path | None, *, append: bool) -> None:
    length = response.length if isinstance(response.length, int) else None
    if output is None:
        body = _Body(sys.stdout.buffer, lambda size: None)
        response.deliverBody(body)
        await _arrived(body, length)
        sys.stdout.buffer.flush()
        return
    with output.open("ab" if append else "wb") as file, transfer_progress() as progress:
        bar = progress.add_task(output.name, total=length)
        body = _Body(file, lambda size: progress.update(bar, completed=size))
        response.deliverBody(body)
        await _arrived(body, length)
    click.echo(f"{output}: {human_size(body.size)}", err=True)


async def _arrived(body: _Body, length: int | None) -> None:
    try:
        await body.done
    except OSError:
        raise
    except Exception as error:
        got = f"{body.size} of {length} bytes" if length is not None else f"{body.size} bytes"
        raise DmsgError(f"cut after {got}: {' '.join(str(error).split()) or type(error).__name__}") from None


def _bytes_file(text: str) -> IO[bytes]:
    import io

    return io.BytesIO(text.encode())
