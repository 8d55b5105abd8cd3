"""``dmsg key``."""

from __future__ import annotations

import click

from dmsg.errors import KeyFileError
from dmsg.keys import SecKey, read_key_file, write_key_file


@click.group()
def key() -> None:
    """Make and show keys.

    \b
    Examples:
      dmsg key new alice.key
      dmsg key show alice.key
    """


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
def new(file: str) -> None:
    """Make a key, write it to FILE (mode 0600), print its public key."""
    secret = SecKey.generate()
    try:
        write_key_file(file, secret)
    except KeyFileError as error:
        raise click.ClickException(str(error)) from None
    click.echo(secret.public.hex())


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
def show(file: str) -> None:
    """Print the public key of the key in FILE."""
    try:
        click.echo(read_key_file(file).public.hex())
    except KeyFileError as error:
        raise click.ClickException(str(error)) from None
