"""Sources of a run, which are directories of files, and the listing of their files. This process lists local
directories, Spark lists others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, DataFrameReader, Row, SparkSession

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.atomic_write import write_atomically
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.store import local_path
from dmsg.errors import DmsgError
from dmsg.telemetry.schema import EVENTS_PREFIX, RECEIPTS_PREFIX, SEGMENT_SUFFIX
from dmsg.telemetry.spool_listing import Reason, file_uri, list_sealed

DIRECTORIES = ".directories-read.json"
"""Name of a file in the directory of the tables. It names the local directories that need not be listed again."""
DIRECTORIES_LIMIT = 200_000
"""Maximum number of directories of a source in the file :data:`DIRECTORIES`."""
FULL_LISTING = 86_400
"""Seconds after which all directories are listed again."""
BATCH_BYTES = 2 * 1024**3
"""Approximate maximum number of bytes of files that one batch of a stream reads."""
MAX_FILE_AGE = "36500d"
"""Maximum age of a file that a stream reads, relative to the newest file that it has read. With the seven days that are
Spark's default, a stream would never read files that were copied with their old times, and after a file whose time is
in the future, it would not read the files of the present."""
AS_NAMED = {"__globPaths__": "false", "recursiveFileLookup": "true"}
"""Options with which Spark's reader treats names literally: not as glob patterns, nor as partition directories. The
option ``__globPaths__`` is internal, because Spark has no public one. Spark's own streams use it for the same purpose.
"""


@dataclass(frozen=True)
class Source:
    """Directory of files to read.

    :ivar name: name of the source in bronze.
    :ivar path: directory or URI; its subdirectories are read, too.
    :ivar pattern: glob pattern of the file names.
    :ivar checked: whether the files contain receipts whose signatures were checked.
    """

    name: str
    path: str
    pattern: str
    checked: bool = False


def spool_source(path: str) -> Source:
    """Return the source of the events that entities wrote."""
    return Source("spool", path, f"{EVENTS_PREFIX}*{SEGMENT_SUFFIX}")


def receipts_source(path: str) -> Source:
    """Return the source of the checked receipts."""
    return Source("receipts", path, f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}", checked=True)


@dataclass(frozen=True)
class Unread:
    """File that no run has read.

    :ivar uri: name of the file in bronze.
    :ivar path: path to pass to Spark's reader.
    """

    uri: str
    path: str
    size: int


def list_local(
    sources: Iterable[Source],
    left: list[Mapping[Reason, set[str]]],
    directories: DirectoriesRead | None = None,
) -> list[Unread]:
    """Return the files of the local sources.

    :param left: list to which this function appends the files and directories of local sources that cannot be read.
    :param directories: local directories to skip, because the tables record all of their files.
    :raises LakeError: a source is not a readable directory.
    """
    files = []
    for source in sources:
        if (directory := local_path(source.path)) is not None:
            try:
                found = list_sealed(directory, [source.pattern], {} if directories is None else directories.of(source))
            except DmsgError as error:
                raise LakeError(str(error)) from None
            if directories is not None:
                directories.add(source, found.quiet)
            left.append(found.left)
            files += [Unread(file_uri(one.path), f"file:{one.path}", one.size) for one in found.files]
    return files


def list_remote(spark: Callable[[], SparkSession], sources: Iterable[Source]) -> DataFrame | None:
    """Return a row for each file of the sources that are not local: its name as a URI, its path for Spark's reader, and
    its length in bytes. None if all sources are local.

    :param spark: function that returns the Spark session; called only if the session is needed.
    """
    listing = None
    for source in sources:
        if local_path(source.path) is None:
            reader = spark().read.format("binaryFile").option("pathGlobFilter", source.pattern).options(**AS_NAMED)
            files = _names(reader.load(source.path))
            listing = files if listing is None else listing.unionByName(files)
    return listing


def follow_files(spark: SparkSession, source: Source) -> DataFrame:
    """Return the files of a source, and those that are added later, as a streaming DataFrame. Its columns are those of
    :func:`list_remote`. Spark's file source divides the files into batches, and notes in its checkpoint which files
    were in a batch.
    """
    reader = (
        spark.readStream.format("binaryFile")
        .schema("path string, modificationTime timestamp, length long, content binary")
        .option("pathGlobFilter", source.pattern)
        .option("recursiveFileLookup", "true")
        .option("ignoreMissingFiles", "true")
        .option("maxBytesPerTrigger", BATCH_BYTES)
        .option("maxFileAge", MAX_FILE_AGE)
    )
    return _names(reader.load(source.path))


def _names(files: DataFrame) -> DataFrame:
    """Return the names and lengths of files. Spark reads no content, because the column ``content`` is not selected."""
    return files.select(bronze.uri(F.col("_metadata.file_path")).alias("file"), "path", "length")


def as_unread(rows: Iterable[Row]) -> list[Unread]:
    """Return the files in rows of :func:`list_remote` or :func:`follow_files`."""
    return [Unread(row.file, row.path, row.length) for row in rows]


def unreadable(
    sources: Iterable[Source], quiet: dict[Path, Mapping[str, int]] | None = None
) -> list[Mapping[Reason, set[str]]]:
    """Return the files and directories of local sources that cannot be read. The directory of a source may be one of
    them.

    :param quiet: directories that need not be listed again, by source. Pass the same mapping to each call; each call
        updates it.
    """
    kept = {} if quiet is None else quiet
    patterns = [f"{prefix}*{SEGMENT_SUFFIX}" for prefix in (EVENTS_PREFIX, RECEIPTS_PREFIX)]

    def left(directory: Path) -> Mapping[Reason, set[str]]:
        try:
            found = list_sealed(directory, patterns, kept.get(directory, {}))
            kept[directory] = found.quiet
            return found.left
        except DmsgError:
            return {Reason.UNREADABLE: {str(directory)}}

    return [left(directory) for one in sources if (directory := local_path(one.path)) is not None]


class DirectoriesRead:
    """Local directories whose files are all recorded in the tables. The list is stored in a file beside the tables.

    The file names the run that wrote it, and is ignored if that run is later than the newest run of the tables. The
    tables were then restored from a backup, and lack some of the files in these directories. Every :data:`FULL_LISTING`
    seconds all directories are listed, because some file systems do not update the times of directories.

    :param out: directory of the tables; None if the tables are not local.
    :param run: number of the newest run of the tables.
    """

    def __init__(self, out: Path | None, run: int, clock: Callable[[], float] | None = None) -> None:
        self._path = None if out is None else out / DIRECTORIES
        self._known: dict[str, dict[str, int]] = {}
        self._now: dict[str, dict[str, int]] = {}
        clock = clock or time.time
        self._listed_at = clock()
        try:
            read = json.loads(self._path.read_bytes()) if self._path is not None else {}
            if read and read["run"] <= run and 0 <= clock() - read["at"] < FULL_LISTING:
                self._known, self._listed_at = read["directories"], read["at"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # If the file is missing or damaged, all directories are listed.

    def of(self, source: Source) -> dict[str, int]:
        """Return those directories of a source that need not be listed again, for the argument ``known`` of
        :func:`~dmsg.telemetry.spool_listing.list_sealed`."""
        return self._known.get(_key(source), {})

    def add(self, source: Source, quiet: Mapping[str, int]) -> None:
        """Record the directories of a source that need not be listed again."""
        self._now[_key(source)] = dict(islice(quiet.items(), DIRECTORIES_LIMIT))

    def save(self, run: int) -> None:
        """Write the file. Call this method after the tables have recorded all files that were listed.

        :param run: number of the run that has recorded them.
        """
        if self._path is not None and self._path.parent.is_dir():
            said = {"run": run, "at": self._listed_at, "directories": self._now}
            write_atomically(self._path, json.dumps(said).encode())


def _key(source: Source) -> str:
    return f"{source.pattern} {source.path}"


def recent_bytes(source: Source, directories: DirectoriesRead) -> int | None:
    """Return the total size in bytes of the files of a source that may be unread; None if the source is not local."""
    directory = local_path(source.path)
    return None if directory is None else list_sealed(directory, [source.pattern], directories.of(source)).size


def open_files(reader: DataFrameReader, paths: list[str]) -> DataFrame | None:
    """Return the rows of those files that Spark can open, with a column ``file``. Files that were removed meanwhile are
    left out.

    :param paths: paths for Spark's reader.
    :returns: the rows; None if Spark can open none of the files.
    :raises LakeError: files were added or removed while they were read.
    """

    def opened(some: list[str]) -> DataFrame | None:
        try:
            found = reader.load(some)
            # Spark Connect opens the files, and reports missing ones, only when the columns are read.
            _ = found.columns
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            return None
        return found.withColumn("file", F.col("_metadata.file_path"))

    while paths:
        if (found := opened(paths)) is not None:
            return found
        # The error names only the first missing file, so each file is tried.
        there = [path for path in paths if opened([path]) is not None]
        if len(there) == len(paths):
            raise LakeError(f"files were added or removed while they were read, such as {paths[0]}")
        paths = there
    return None
