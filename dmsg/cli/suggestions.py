"""Suggestions for users who type a command, or arguments, of another program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import takewhile

COMMANDS = {
    "ssh": "dmsg forward 2222 NAME:22, and in another terminal: ssh -p 2222 localhost (docs/tutorials/ssh.md)",
    "scp": "dmsg cp FILE NAME:FILE, or dmsg cp NAME:FILE .",
    "sftp": "dmsg cp FILE NAME:FILE, or dmsg cp NAME:FILE .",
    "rsync": "dmsg cp -r DIRECTORY NAME:",
    "copy": "dmsg cp FILE NAME:FILE",
    "mv": "dmsg cp FILE NAME:FILE; the original file remains",
    "rm": "dmsg name remove NAME takes a name out of the address book; nothing of a peer can be removed",
    "ls": "dmsg curl dmsg://NAME/ lists what dmsg serve offers; dmsg name list shows the address book",
    "list": "dmsg name list shows the address book, dmsg discovery list the servers",
    "cat": "dmsg curl dmsg://NAME/FILE",
    "get": "dmsg cp NAME:FILE . or dmsg curl -O dmsg://NAME/FILE",
    "put": "dmsg cp FILE NAME:",
    "wget": "dmsg curl -O dmsg://NAME/FILE",
    "http": "dmsg curl dmsg://NAME/",
    "netcat": "dmsg nc NAME:PORT",
    "ncat": "dmsg nc NAME:PORT",
    "telnet": "dmsg nc NAME:PORT",
    "tunnel": "dmsg forward LOCAL_PORT NAME:PORT, and at the other end dmsg expose PORT",
    "proxy": "dmsg socks",
    "share": "dmsg send FILE",
    "recv": "dmsg receive CODE",
    "traceroute": "dmsg trace NAME",
    "iperf3": "dmsg iperf NAME",
    "init": "dmsg up, which makes a key at its first start",
    "login": "dmsg up, which makes a key at its first start",
    "start": "dmsg up",
    "stop": "dmsg down",
    "add": "dmsg name add NAME KEY",
    "keygen": "dmsg key new FILE",
    "genkey": "dmsg key new FILE",
    "whoami": "dmsg status, or dmsg key show FILE",
    "id": "dmsg status, or dmsg key show FILE",
    "contacts": "dmsg name list",
    "names": "dmsg name list",
    "keys": "dmsg key new FILE, dmsg key show FILE",
    "server": "twistd -n dmsg-server --help",
    "version": "dmsg --version",
}
"""Text with the command of dmsg to use, by the command of another program."""
SUBCOMMANDS = {
    "rm": "remove",
    "del": "remove",
    "delete": "remove",
    "ls": "list",
    "get": "show",
    "set": "add",
    "create": "new",
    "make": "new",
    "generate": "new",
    "gen": "new",
}
"""Names of subcommands of dmsg, by the names that other programs use for the same purpose."""


def instead_of(given: str, path: str, commands: Iterable[str]) -> str | None:
    """Return a suggestion of what to type in place of an unknown command; None if no command is similar.

    :param given: command that the user typed.
    :param path: group to which the command would belong, such as ``dmsg name``.
    :param commands: names of the commands in that group.
    """
    names = list(commands)
    if path == "dmsg" and given in COMMANDS:
        return COMMANDS[given]
    if SUBCOMMANDS.get(given) in names:
        return f"{path} {SUBCOMMANDS[given]}"
    near = get_close_matches(given, names, 1, 0.7)
    return f"{path} {near[0]}" if near else None


def arguments_instead(command: str, arguments: Sequence[str]) -> str | None:
    """Return the correct command line if the arguments follow the conventions of another program; else None.

    :param command: command of dmsg, such as ``nc``.
    """
    # A word after an option may be the option's value, so only words before the first option are used.
    plain = list(takewhile(lambda one: not one.startswith("-"), arguments))
    if command in ("nc", "ping", "iperf", "trace") and len(plain) == 2 and plain[1].isdigit():
        return f"dmsg {command} {plain[0]}:{plain[1]}"
    if command == "forward":
        rest = " ".join(arguments)
        found = re.match(r"(?:-L ?)?(?:[\w.]+:)?(\d+):([\w-]+:\d+)(?: |$)", rest)
        found = found or re.match(r"(?P<to>[\w-]+:\d+) (?P<port>\d+)(?: |$)", rest)
        if found is not None:
            port, to = (found["port"], found["to"]) if "to" in found.groupdict() else found.groups()
            return f"dmsg forward {port} {to}"
    if command == "expose" and plain:
        host, _, port = plain[0].rpartition(":")
        if host and port.isdigit():
            return f"dmsg expose {port}" if host == "localhost" else f"dmsg expose {port} --host {host}"
    if command == "socks" and len(plain) == 1 and plain[0].isdigit():
        return f"dmsg socks --listen {plain[0]}"
    if command == "serve" and plain and plain[0].isdigit() and len(plain) == 1:
        return f"dmsg serve . --port {plain[0]}"
    return None
