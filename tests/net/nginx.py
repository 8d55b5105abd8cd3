"""Configurations of nginx for tests: those of ``contrib/nginx``, with ports of the test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CONTRIB = Path(__file__).parents[2] / "contrib" / "nginx"
STREAM_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
"""Module of nginx for proxies of TCP, where Debian installs it."""
_WRITABLE = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Kinds of temporary files, for each of which nginx wants a directory."""


def part(name: str, addresses: Mapping[str, str]) -> str:
    """Return a file of ``contrib/nginx`` with other addresses in place of those of the example.

    :raises ValueError: the file does not name an address that is to be replaced.
    """
    text = (CONTRIB / f"{name}.conf").read_text()
    for old, new in addresses.items():
        if f" {old};" not in text and f"//{old};" not in text:
            raise ValueError(f"{name}.conf does not name {old}")
        text = text.replace(f" {old};", f" {new};").replace(f"//{old};", f"//{new};")
    return text


def main_part(home: Path) -> str:
    """Return the settings of a process that keeps its files in ``home`` and writes errors to standard error."""
    return (
        f"daemon off; master_process off; pid {home}/pid; error_log stderr warn;\nevents {{ worker_connections 64; }}\n"
    )


def web_server(home: Path, listen: str, certificate: Path, *parts: str) -> str:
    """Return the configuration of a web server with TLS.

    :param listen: address and port.
    :param certificate: file with the certificate and its key.
    :param parts: texts inside ``server``.
    """
    directories = " ".join(f"{one}_temp_path {home}/{one};" for one in _WRITABLE)
    return (
        f"{main_part(home)}"
        f"http {{ access_log off; {directories}\n"
        f"server {{ listen {listen} ssl; ssl_certificate {certificate}; ssl_certificate_key {certificate};\n"
        f"{''.join(parts)}}} }}\n"
    )


def tcp_proxy(home: Path, listen: str, server: str) -> str:
    """Return the configuration of a proxy of TCP."""
    text = part("stream", {"8080": listen, "127.0.0.1:8081": server})
    return f"load_module {STREAM_MODULE};\n{main_part(home)}{text}"
