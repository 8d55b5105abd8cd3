"""Commands ``dmsg serve`` and ``dmsg curl``: HTTP over dmsg."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.cli.access import Access, AllowOption, allow_option, anything_option, check_offered
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.files.urls import HTTP_PORT, SCHEME, name_of
from dmsg.cli.options import WRITTEN_FILE, command
from dmsg.cli.output import notice, state, tell
from dmsg.cli.params import client_options, client_options_of, timeout_option

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


@command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, readable=True, path_type=Path))
@click.option(
    "--port", "-p", default=HTTP_PORT, show_default=True, type=click.IntRange(0, 65535), help="Port for peers."
)
@allow_option
@click.option(
    "--hidden", is_flag=True, help="Serve files whose names begin with a dot, and parts of unfinished copies."
)
@anything_option
@client_options
def serve(
    directory: Path,
    port: int,
    allow: tuple[AllowOption, ...],
    hidden: bool,
    anything: bool,
    settings: ClientSettings,
) -> None:
    """Serve the files of DIRECTORY over HTTP to peers.

    Files and directories whose names begin with a dot are not served without --hidden. Keys and settings of
    dmsg are never served.

    \b
    Example:
      dmsg serve public --key-file alice.key
      dmsg curl dmsg://alice/notes.txt
    """

    from dmsg.apps.http_directory import file_site
    from dmsg.cli.client_run import listening_at, run, serve_until_interrupted, with_client
    from dmsg.cli.files.web_run import FileSite
    from dmsg.clients.address_book import AddressBook

    check_offered(directory, any_directory=anything)
    access = Access(allow)

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            title = AddressBook().name_of(client.public_key) or client.public_key.short + "..."
            listening = await listening_at(
                client,
                FileSite(reactor, file_site(directory, title, hidden=hidden, reactor=reactor), access),
                port,
                access=access,
                offers=f"files of {directory.absolute()}",
            )
            url = f"{SCHEME}://{client.public_key.text}{'' if port == HTTP_PORT else f':{port}'}/"
            tell(f"{directory} is at {url}", directory=str(directory), at=url, **access.fields)
            access.show()
            await serve_until_interrupted(listening)

        await with_client(reactor, settings, use, published=True)

    run(main)


def _data_or_discovery(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the value of ``-d`` as data, as in curl.  If it is a URL, use it as ``--discovery`` and return None.

    In earlier versions, ``-d`` was short for ``--discovery``.
    """
    if value is not None and value.startswith(("http://", "https://")) and not ctx.params.get("discovery"):
        notice("-d means data, as in curl; use --discovery for the discovery")
        ctx.params["discovery"] = (value,)
        return None
    return value


def _file_or_stdout(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Return the path of ``--output``; None for -, with which curl names standard output."""
    return None if value == Path("-") else value


@command()
@click.argument("url", required=False)
@click.option(
    "--output",
    "-o",
    type=WRITTEN_FILE,
    callback=_file_or_stdout,
    help="Write to this file; - stands for standard output, the default.",
)
@click.option("--remote-name", "-O", is_flag=True, help="Write to a file named after the last part of the URL.")
@click.option(
    "--continue-at", "-C", metavar="OFFSET", help="Resume at this byte; - resumes at the end of the local file."
)
@click.option("--range", "-r", "byte_range", metavar="FROM-TO", help="Fetch only these bytes.")
@click.option("--request", "-X", "method", help="Request method.  Default: GET, or POST with --data.")
@click.option("--head", "-I", is_flag=True, help="Fetch and show only the status and the headers.")
@click.option("--data", "-d", "body", callback=_data_or_discovery, help="Body of a POST; @FILE reads it from a file.")
@click.option(
    "--header", "-H", "headers", multiple=True, metavar="NAME: VALUE", help="Add a request header; repeatable."
)
@click.option("--include", "-i", is_flag=True, help="Show the status and the headers before the body.")
@click.option(
    "--fail",
    "-f",
    "fail_fast",
    is_flag=True,
    help="Exit with status 22 and print nothing when the HTTP status is 400 or above.",
)
@click.option("--location", "-L", is_flag=True, help="Follow redirects.")
@click.option("--silent", "-s", is_flag=True, help="Print no progress and no errors.")
@click.option(
    "--write-out",
    "-w",
    metavar="FORMAT",
    help="Print this text at the end; %{http_code}, %{size_download} and %{time_total} are replaced.",
)
@client_options_of(short_discovery=False)
@timeout_option
# The function has many branches, because many options of curl need one each.
def curl(  # noqa: C901
    url: str | None,
    output: Path | None,
    remote_name: bool,
    continue_at: str | None,
    byte_range: str | None,
    method: str | None,
    head: bool,
    body: str | None,
    headers: tuple[str, ...],
    include: bool,
    fail_fast: bool,
    location: bool,
    silent: bool,
    write_out: str | None,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Fetch URL, as in dmsg://KEY:PORT/PATH or dmsg://NAME/PATH.

    \b
    Examples:
      dmsg curl dmsg://alice/notes.txt
      dmsg curl -o film.mkv -C - dmsg://alice/film.mkv
    """

    from contextlib import suppress

    from twisted.web.http_headers import Headers

    from dmsg.apps.exposure import check_written, has_dot
    from dmsg.cli.client_run import run
    from dmsg.cli.files.web_run import FetchRequest, fetch, start_at

    if url is None and continue_at is not None and "/" in continue_at:
        notice("-C takes an offset, as in curl; use -C - to resume at the end of the local file")
        url, continue_at = continue_at, "-"
    if url is None:
        raise click.UsageError("Missing argument 'URL'.")
    if remote_name:
        name = name_of(url)
        if output is not None or name in ("", ".", "..") or "\0" in name:
            raise click.UsageError("-O needs a URL that ends with a file name, and excludes -o")
        if has_dot(name):
            raise click.UsageError(f"{name} begins with a dot; to write this file, use -o {name}")
        output = Path(name)
    if output is not None:
        # The file that -O names is checked, too, because the working directory can be a shared one.
        WRITTEN_FILE.check(output, None, None)
        with suppress(FileNotFoundError):
            # If the directory is missing, opening the file reports that.
            check_written(output)
    if continue_at is not None and output is None:
        raise click.UsageError("--continue-at needs --output or -O")
    fields = Headers({"user-agent": ["dmsg"]})
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon:
            raise click.UsageError(f"{header!r} is not NAME: VALUE")
        fields.addRawHeader(name.strip(), value.strip())
    start = start_at(continue_at, output)
    if start:
        byte_range = f"{start}-"
    if byte_range:
        fields.setRawHeaders("range", [f"bytes={byte_range}"])
    if silent:
        state.quiet = True

    wanted = FetchRequest(
        url,
        (method or ("HEAD" if head else "GET" if body is None else "POST")).upper().encode(),
        fields,
        body,
        output=output,
        start=start,
        head=head,
        shows_head=include or head,
        fails=fail_fast or output is not None,
        follows=location,
        silent=silent,
        write_out=write_out,
    )

    async def main(reactor: Reactor) -> None:
        await fetch(reactor, settings, wanted, timeout)

    run(main)
