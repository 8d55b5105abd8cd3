"""The files of one directory over HTTP: ranges, types, listings; nothing outside, nothing that blocks."""

from __future__ import annotations

import errno
import html
import os
import stat
import time
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import quote

from twisted.web.resource import IResource, Resource
from twisted.web.server import Request
from twisted.web.static import File

from dmsg.apps.parts import PART_SUFFIX
from dmsg.base.units import human_size

MAX_RANGES = 16
"""Parts of a file in one answer."""
SORTS = {"name": "name", "size": "size", "time": "modified"}
"""Columns of a listing and the attribute that orders them."""


class Contained(File):
    """Regular files and directories below ``root``; a link that leads out of it is not there."""

    root = ""
    title = ""
    hidden = False
    """Names that begin with a dot, and parts of copies under way, are there too."""

    def getChild(self, path: bytes, request: Request) -> IResource:
        try:
            name = path.decode()
        except UnicodeDecodeError:
            return self.childNotFound
        if "\0" in name:
            return self.childNotFound
        child: Any = super().getChild(path, request)  # type: ignore[no-untyped-call]
        if isinstance(child, Contained):
            child.root, child.title, child.hidden = self.root, self.title, self.hidden
            if not servable(child.path, self.root, hidden=self.hidden):
                return self.childNotFound
        return child  # type: ignore[no-any-return]

    def createSimilarFile(self, path: str) -> Any:
        similar = super().createSimilarFile(path)  # type: ignore[no-untyped-call]
        similar.root, similar.title, similar.hidden = self.root, self.title, self.hidden
        return similar

    def openForReading(self) -> IO[bytes]:
        # what was a file when it was looked at may be a pipe now, which would wait for a writer
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EACCES, "not a regular file", self.path)
        return os.fdopen(descriptor, "rb")

    def makeProducer(self, request: Request, fileForReading: IO[bytes]) -> Any:
        if (request.getHeader(b"range") or b"").count(b",") >= MAX_RANGES:
            request.requestHeaders.removeHeader(b"range")  # as for who does not know ranges: all of it, once
        return super().makeProducer(request, fileForReading)  # type: ignore[no-untyped-call]

    def directoryListing(self) -> Resource:
        return Listing(self.path, self.root, self.title, hidden=self.hidden)


def servable(path: str, root: str, *, hidden: bool) -> bool:
    """A regular file or a directory, inside ``root`` after all links.

    :param hidden: also if it, where a link leads, or a directory on the way begins with a dot, or is a part of a copy.
    """
    try:
        real = os.path.realpath(path)
        mode = os.stat(real).st_mode
    except (OSError, ValueError):
        return False
    inside = real == root or real.startswith(root.rstrip(os.sep) + os.sep)
    if not inside or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return False
    names = (os.path.basename(path), *os.path.relpath(real, root).split(os.sep))
    return hidden or not any(_is_hidden(name) for name in names if name != os.curdir)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith(PART_SUFFIX)


@dataclass(frozen=True)
class _Row:
    name: str
    directory: bool
    size: int
    modified: float


class Listing(Resource):
    """What is in one directory, as a page: names, sizes, times, sorted by any of them."""

    isLeaf = True

    def __init__(self, path: str, root: str, title: str, *, hidden: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden = hidden
        self._path = path
        self._root = root
        self._title = title

    def _rows(self) -> list[_Row]:
        rows = []
        with os.scandir(self._path) as found:
            for one in found:
                try:
                    one.name.encode()  # what is no text cannot be asked for
                    if not servable(one.path, self._root, hidden=self._hidden):
                        continue
                    status = one.stat()
                except (OSError, UnicodeEncodeError):
                    continue
                rows.append(_Row(one.name, stat.S_ISDIR(status.st_mode), status.st_size, status.st_mtime))
        return rows

    def render_GET(self, request: Request) -> bytes:
        assert request.args is not None and request.path is not None
        request.setHeader(b"content-type", b"text/html; charset=utf-8")
        by = request.args.get(b"sort", [b"name"])[0].decode("ascii", "replace")
        by = by if by in SORTS else "name"
        down = request.args.get(b"order", [b"asc"])[0] == b"desc"
        try:
            rows = self._rows()
        except OSError:
            request.setResponseCode(403)
            return b"this directory cannot be read\n"
        rows.sort(key=lambda row: row.name)
        rows.sort(key=lambda row: getattr(row, SORTS[by]), reverse=down)
        rows.sort(key=lambda row: not row.directory)
        below = "/" + "/".join(segment.decode("utf-8", "replace") for segment in (request.prepath or []) if segment)
        return self._page(below, rows, by, down).encode()

    def _page(self, below: str, rows: list[_Row], by: str, down: bool) -> str:
        title = html.escape(f"{self._title}: {below}")
        heads = []
        for column in SORTS:
            order = "desc" if column == by and not down else "asc"
            mark = (" \u25bc" if down else " \u25b2") if column == by else ""
            heads.append(f'<th><a href="?sort={column}&amp;order={order}">{column}{mark}</a></th>')
        lines = [] if below == "/" else ['<tr><td><a href="../">../</a></td><td></td><td></td></tr>']
        for row in rows:
            slash = "/" if row.directory else ""
            link = f'<a href="./{html.escape(quote(row.name))}{slash}">{html.escape(row.name)}{slash}</a>'
            size = "" if row.directory else f'<span title="{row.size} bytes">{human_size(row.size)}</span>'
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.modified))
            lines.append(f"<tr><td>{link}</td><td class=size>{size}</td><td>{when}</td></tr>")
        return _PAGE.format(title=title, heads="".join(heads), rows="\n".join(lines))


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
       color: #1c1e21; background: #fff; }}
h1 {{ font-size: 1.25rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; }}
th {{ border-bottom: 1px solid #999; }}
td.size {{ text-align: right; white-space: nowrap; }}
td:last-child {{ white-space: nowrap; font-variant-numeric: tabular-nums; }}
td:first-child {{ overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #e4e6eb; background: #18191a; }} a {{ color: #8ab4f8; }} }}
</style></head><body>
<h1>{title}</h1>
<table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table>
<p><small>Times are UTC.</small></p>
</body></html>
"""


def file_site(directory: str | os.PathLike[str], title: str = "", *, hidden: bool = False) -> IResource:
    """A resource with the files of ``directory``.

    :param title: whose they are, for listings.
    :param hidden: with those that begin with a dot.
    """
    resource = Contained(os.fspath(directory))
    resource.root = os.path.realpath(directory)
    resource.title = title
    resource.hidden = hidden
    return resource
