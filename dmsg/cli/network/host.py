"""Command ``dmsg host``: runs a network of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dmsg.cli.options import WRITTEN_DIRECTORY, command
from dmsg.cli.output import fail, notice, tell
from dmsg.cli.params import URLType, qr_option
from dmsg.errors import DmsgError
from dmsg.net.carriers.names import Carrier, parse_carrier

if TYPE_CHECKING:
    from dmsg.cli.network.host_run import HostSettings
    from dmsg.clients.invitations import Invitation
    from dmsg.net.reactor import Reactor

PORT = click.IntRange(1, 65535)


class CarrierType(click.ParamType[Carrier]):
    """Parameter type of ``--carrier``: a carrier and its port, such as ``wss:443``."""

    name = "carrier"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Carrier:
        if isinstance(value, Carrier):
            return value
        try:
            return parse_carrier(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@command()
@click.option(
    "--public-address",
    metavar="HOST",
    help="Name or IP address at which others reach this machine.  Default: a public IPv4 address of this machine, else "
    "the address of its default route.",
)
@click.option("--name", default="home", show_default=True, help="Name of the network in the invitation.")
@click.option("--discovery-port", default=9090, show_default=True, type=PORT, help="TCP port of discovery.")
@click.option("--server-port", default=8080, show_default=True, type=PORT, help="TCP port of the server.")
@click.option(
    "--status-port",
    default=9180,
    show_default=True,
    type=click.IntRange(1, 65534),
    help="TCP port of the server's status page, for this machine alone; discovery's status page has the next port. "
    "The password of both pages is in page.token of --directory.",
)
@click.option(
    "--allow",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Admit only the public keys in FILE, one per line; the file is read again when it changes.",
)
@click.option("--tls", metavar="CERT,KEY", help="Files with the TLS certificate and its key, for discovery.")
@click.option(
    "--behind-proxy",
    metavar="URL",
    type=URLType(by_name=False),
    help="Public URL of discovery at your reverse proxy; discovery then accepts connections from this machine only.",
)
@click.option(
    "--carrier",
    "carriers",
    multiple=True,
    type=CarrierType(),
    metavar="wss:PORT",
    help="Port of the public address at which clients also reach the server by websocket over TLS, such as wss:443 of "
    "a reverse proxy; repeatable.",
)
@click.option(
    "--directory",
    type=WRITTEN_DIRECTORY,
    help="Directory of the server's key and of the entries.  Default: ~/.local/share/dmsg/host.",
)
@click.option(
    "--invitation",
    "only_invitation",
    is_flag=True,
    help="Print the invitation of the dmsg host that runs with --directory, and exit.  If none runs, print the "
    "invitation of a network with the given options, without starting it.",
)
@qr_option
def host(
    public_address: str | None,
    name: str,
    discovery_port: int,
    server_port: int,
    status_port: int,
    allow: Path | None,
    tls: str | None,
    behind_proxy: str | None,
    carriers: tuple[Carrier, ...],
    directory: Path | None,
    only_invitation: bool,
    no_qr: bool,
) -> None:
    """Run a network of your own: a discovery and a server, until you stop it.

    The command prints an invitation: others type `dmsg join INVITATION` to join the network. Without --allow, the
    network is open to anyone who reaches its ports. If discovery or the server ends, it is started again.

    \b
    Examples:
      dmsg host
      dmsg host --public-address relay.example.org
      dmsg host --public-address 127.0.0.1
      dmsg host --allow members.txt
      dmsg host --public-address example.org --behind-proxy https://example.org --carrier wss:443
    """
    from dmsg.cli.hosted_network import running_network
    from dmsg.cli.network.host_run import HostSettings
    from dmsg.directories import host_directory

    if tls is not None and behind_proxy is not None:
        raise click.UsageError("--tls and --behind-proxy exclude each other: the proxy speaks TLS for discovery")
    directory = (directory or host_directory()).absolute()
    try:
        if only_invitation and (running := running_network(directory)) is not None:
            tell(running.invitation.text, **_fields(running.invitation))
            return
        settings = HostSettings.prepare(
            directory,
            name=name,
            public_address=public_address,
            discovery_port=discovery_port,
            server_port=server_port,
            status_port=status_port,
            allow=None if allow is None else allow.absolute(),
            tls=_files_of_tls(tls),
            proxy_url=behind_proxy,
            carriers=carriers,
        )
        if only_invitation:
            invitation = settings.invitation
            notice(
                f"no dmsg host runs with the directory {directory}: this is the invitation of a network with the "
                f"options of this command, discovery at {invitation.discovery} and server at {invitation.address}"
            )
            tell(invitation.text, **_fields(invitation))
            return
        lock = settings.hold()
    except (DmsgError, OSError) as error:
        fail(error)
    try:
        _run(settings, show_qr=not no_qr)
    finally:
        lock.release()


def _run(settings: HostSettings, *, show_qr: bool) -> None:
    from dmsg.cli.client_run import run
    from dmsg.cli.code_display import print_qr
    from dmsg.cli.network.host_run import Host

    def ready() -> None:
        line = f"dmsg join {settings.invitation.text}"
        notice(settings.admission_text)
        notice(
            f"status page of this network: {settings.status_url}, with any user name and the password in "
            f"{settings.page_token}"
        )
        if show_qr:
            print_qr(line)
        # The line with the invitation is printed after the QR code, because the QR code fills a terminal of 24 rows.
        tell(line, **_fields(settings.invitation))

    async def main(reactor: Reactor) -> None:
        await Host(reactor, settings).run(ready)

    run(main)


def _fields(invitation: Invitation) -> dict[str, object]:
    return {
        "invitation": invitation.text,
        "name": invitation.name,
        "discovery": invitation.discovery,
        "server": str(invitation.server),
        "address": invitation.address,
    }


def _files_of_tls(tls: str | None) -> tuple[Path, Path] | None:
    if tls is None:
        return None
    certificate, comma, key = tls.partition(",")
    if not comma:
        raise click.UsageError("--tls needs two files, as in --tls cert.pem,key.pem")
    for file in (certificate, key):
        if not Path(file).is_file():
            raise click.UsageError(f"--tls: there is no file {file}")
    return Path(certificate).absolute(), Path(key).absolute()
