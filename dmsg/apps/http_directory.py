"""HTTP site with the files of one directory: ranges of bytes, content types and listings of directories.

The site serves no file outside the directory.  Reading large directories does not block the reactor.
"""

from __future__ import annotations

import errno
import html
import os
import stat
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from twisted.internet.defer import Deferred, DeferredSemaphore
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.web.resource import IResource, Resource
from twisted.web.server import NOT_DONE_YET, Request
from twisted.web.static import File, StaticProducer

from dmsg.apps.descriptors import open_within
from dmsg.apps.exposure import has_dot, own_files
from dmsg.apps.partial_files import PART_SUFFIX
from dmsg.apps.sources import Source, SourceChanged, open_regular
from dmsg.apps.transfer import TransferError
from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.net.threads import in_thread, paced

MAX_RANGES = 16
"""Maximum number of ranges in one request.  A request with more gets the whole file."""
ROWS_LIMIT = 20_000
"""Maximum number of rows of a listing.  The listing says how many files it leaves out."""
LISTINGS_AT_ONCE = 1
"""Maximum number of listings that are made concurrently.  Each has a thread, which competes with the reactor's
thread.
"""
LISTINGS_WAITING = 64
"""Maximum number of requests that wait for a listing.  Further requests are answered with status 503."""
SORTS = {"name": "name", "size": "size", "time": "modified"}
"""Attribute by which each column of a listing sorts."""


class ListingThreads:
    """Queue of listings, which are made in threads, a few at a time and in the order of the requests.

    Requests that wait for the same listing share one page.  A page that is already being made is not shared with a new
    request, because the page may lack files that were added since.

    :param reactor: reactor whose threads to use; None makes each listing at once in the calling thread.
    """

    def __init__(self, reactor: IReactorTime | None) -> None:
        self._reactor = reactor
        self._places = DeferredSemaphore(LISTINGS_AT_ONCE)
        self._waiting: dict[Hashable, list[Deferred[bytes]]] = {}

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of requests is waiting."""
        return sum(map(len, self._waiting.values())) >= LISTINGS_WAITING

    def run(self, key: Hashable, act: Callable[[], bytes], disconnected: Deferred[None]) -> Deferred[bytes]:
        """Call ``act`` in a thread to make a page, after the earlier listings are made.

        :param key: value that is equal for requests that can share a page.
        :param disconnected: Deferred that fails when the HTTP client has disconnected.  A listing for which no client
            waits any more is skipped, unless it has started.
        :returns: Deferred that fires with the page.
        """
        made: Deferred[bytes] = Deferred()
        if key in self._waiting:
            self._waiting[key].append(made)
        else:
            self._waiting[key] = [made]
            # The waiting requests have received the error already, so it is not logged here.
            self._places.run(self._make, key, act).addErrback(lambda _: None)

        def left(_: object) -> None:
            if made in self._waiting.get(key, ()):
                self._waiting[key].remove(made)
                made.cancel()

        disconnected.addErrback(left)
        return made

    def _make(self, key: Hashable, act: Callable[[], bytes]) -> Deferred[None] | None:
        waiting = self._waiting.pop(key)
        if not waiting:
            return None  # All clients that waited for this listing have disconnected.

        def tell(page: bytes | Failure) -> None:
            for one in waiting:
                one.callback(page)

        return in_thread(self._reactor, act).addBoth(tell)


class ContainedFile(File):
    """Resource of a file or directory below ``root``.  A link that leads outside ``root`` counts as absent."""

    root = ""
    title = ""
    hidden = False
    """Whether to serve names that begin with a dot, and partial files of copies."""
    threads: ListingThreads
    _size: int | None = None

    def getChild(self, path: bytes, request: Request) -> IResource:
        if b"\0" in path:
            return self.childNotFound
        # Twisted would refuse the bytes of a name that is not UTF-8.
        child: IResource = super().getChild(os.fsdecode(path), request)  # type: ignore[no-untyped-call]
        if isinstance(child, ContainedFile):
            child.root, child.title, child.hidden, child.threads = self.root, self.title, self.hidden, self.threads
            if not servable(child.path, self.root, hidden=self.hidden):
                return self.childNotFound
        return child

    def createSimilarFile(self, path: str) -> File:
        similar: ContainedFile = super().createSimilarFile(path)  # type: ignore[no-untyped-call]
        similar.root, similar.title, similar.hidden, similar.threads = self.root, self.title, self.hidden, self.threads
        return similar

    def openForReading(self) -> Source:
        """Open the file, and check again that it is a regular file below ``root``; it may have been replaced since the
        last check.
        """
        real = Path(os.path.realpath(self.path))
        try:
            at = open_within(Path(self.root), real.parent)
            try:
                source = Source(open_regular(real.name, real.name, at), real.name)
            finally:
                os.close(at)
        except (TransferError, OSError, ValueError):
            raise OSError(errno.EACCES, "this file cannot be read", self.path) from None
        self._size = source.size
        return source

    def getFileSize(self) -> int:
        """Return the size of the opened file.  The file at the path may be another one by now."""
        return super().getFileSize() if self._size is None else self._size  # type: ignore[no-untyped-call]

    def makeProducer(self, request: Request, fileForReading: Source) -> StaticProducer:
        if (request.getHeader(b"range") or b"").count(b",") >= MAX_RANGES:
            # A request with too many ranges gets the whole file, as from a server that does not support ranges.
            request.requestHeaders.removeHeader(b"range")
        producer: StaticProducer = super().makeProducer(request, fileForReading)  # type: ignore[no-untyped-call]
        resume = producer.resumeProducing

        def resume_or_abort() -> None:
            try:
                resume()  # type: ignore[no-untyped-call]
            except (SourceChanged, OSError):
                # The response header has promised more bytes, so only an abort of the connection can report the error.
                producer.stopProducing()
                request.unregisterProducer()
                request.channel.transport.abortConnection()  # type: ignore[union-attr]

        producer.resumeProducing = resume_or_abort  # type: ignore[method-assign]
        return producer

    def directoryListing(self) -> Resource:
        return Listing(self.path, self.root, self.title, hidden=self.hidden, threads=self.threads)


def servable(path: str, root: str, *, hidden: bool) -> bool:
    """Whether a path may be served: a regular file or directory inside ``root``, after all links are resolved.

    :param hidden: whether the path may contain names that begin with a dot, or partial files.
    """
    try:
        real = os.path.realpath(path)
        status = os.stat(real)
    except (OSError, ValueError):
        return False
    mode = status.st_mode
    inside = real == root or real.startswith(root.rstrip(os.sep) + os.sep)
    if not inside or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return False
    own = own_files()
    if own.has_directory(status) or own.has_file(status) or own.is_below(real):
        return False
    names = (os.path.basename(path), *os.path.relpath(real, root).split(os.sep))
    return hidden or not any(_is_hidden(name) for name in names if name != os.curdir)


def _is_hidden(name: str) -> bool:
    return has_dot(name) or name.endswith(PART_SUFFIX)


@dataclass(frozen=True)
class _Row:
    name: str
    directory: bool
    size: int
    modified: float


class Listing(Resource):
    """Page that lists a directory with names, sizes and times; the reader can sort it by each column."""

    isLeaf = True

    def __init__(self, path: str, root: str, title: str, *, hidden: bool, threads: ListingThreads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hidden = hidden
        self._path = path
        self._root = root
        self._title = title
        self._threads = threads

    def _rows(self) -> list[_Row]:
        rows = []
        own = own_files()
        with os.scandir(self._path) as found:
            for one in paced(found):
                try:
                    status = one.stat(follow_symlinks=False)
                    if stat.S_ISLNK(status.st_mode):
                        if not servable(one.path, self._root, hidden=self._hidden):
                            continue
                        status = one.stat()
                    elif not self._hidden and _is_hidden(one.name):
                        continue
                    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                        continue
                    if own.has_directory(status) or own.has_file(status):
                        continue
                except OSError:
                    continue
                rows.append(_Row(one.name, stat.S_ISDIR(status.st_mode), status.st_size, status.st_mtime))
        return rows

    def render_GET(self, request: Request) -> bytes:
        assert request.args is not None and request.path is not None
        request.setHeader(b"content-type", b"text/html; charset=utf-8")
        by = request.args.get(b"sort", [b"name"])[0].decode("ascii", "replace")
        by = by if by in SORTS else "name"
        down = request.args.get(b"order", [b"asc"])[0] == b"desc"
        below = "/" + "/".join(os.fsdecode(segment) for segment in (request.prepath or []) if segment)
        if self._threads.is_full:
            request.setResponseCode(503)
            request.setHeader(b"retry-after", b"5")
            return b"too many listings are being made\n"
        made = self._threads.run(
            (self._path, below, by, down), lambda: self._make_listing(below, by, down), request.notifyFinish()
        )
        answer: list[bytes] = []
        left: list[object] = []
        request.notifyFinish().addErrback(left.append)

        def over(page: bytes | Failure) -> None:
            if left:
                return
            if isinstance(page, Failure):
                page.trap(OSError)
                request.setResponseCode(403)
                page = b"this directory cannot be read\n"
            if waits:
                request.write(page)
                request.finish()
            else:
                answer.append(page)

        waits = False
        made.addBoth(over).addErrback(request.processingFailed)
        if answer:
            return answer[0]
        waits = True
        return NOT_DONE_YET  # type: ignore[return-value]

    def _make_listing(self, below: str, by: str, down: bool) -> bytes:
        rows = self._rows()
        rows.sort(key=lambda row: row.name)
        rows.sort(key=lambda row: getattr(row, SORTS[by]), reverse=down)
        rows.sort(key=lambda row: not row.directory)
        return self._page(below, rows, by, down).encode()

    def _page(self, below: str, rows: list[_Row], by: str, down: bool) -> str:
        title = html.escape(printable(f"{self._title}: {below}"))
        heads = []
        for column in SORTS:
            order = "desc" if column == by and not down else "asc"
            mark = (" \u25bc" if down else " \u25b2") if column == by else ""
            heads.append(f'<th><a href="?sort={column}&amp;order={order}">{column}{mark}</a></th>')
        lines = [] if below == "/" else ['<tr><td><a href="../">../</a></td><td></td><td></td></tr>']
        for row in paced(rows[:ROWS_LIMIT]):
            slash = "/" if row.directory else ""
            target, shown = quote(os.fsencode(row.name)), printable(row.name)
            link = f'<a href="./{html.escape(target)}{slash}">{html.escape(shown)}{slash}</a>'
            size = "" if row.directory else f'<span title="{row.size} bytes">{human_size(row.size)}</span>'
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.modified))
            lines.append(f"<tr><td>{link}</td><td class=size>{size}</td><td>{when}</td></tr>")
        if len(rows) > ROWS_LIMIT:
            lines.append(f"<tr><td>and {len(rows) - ROWS_LIMIT:,} more</td><td></td><td></td></tr>")
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


def file_site(
    directory: str | os.PathLike[str],
    title: str = "",
    *,
    hidden: bool = False,
    reactor: IReactorTime | None = None,
) -> IResource:
    """Return a resource that serves the files of ``directory``.

    :param title: name of the owner of the files, for the headings of listings.
    :param hidden: whether to serve names that begin with a dot, and partial files of copies.
    :param reactor: reactor whose threads make the listings; None makes each listing at once in the calling thread.
    """
    resource = ContainedFile(os.fspath(directory))
    resource.root = os.path.realpath(directory)
    resource.title = title
    resource.hidden = hidden
    resource.threads = ListingThreads(reactor)
    return resource
