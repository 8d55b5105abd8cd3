"""Replacement of some rows of a table: only the files that contain these rows are written again.

A late event affects few rows, and a day may have millions. So the files of the day are searched for the affected rows,
and all other files stay as they are. Each replacement adds a small file for the new rows. If a day has many small
files, these are merged with the next replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from dmsg.analytics.affected_rows import Groups, WholeDays, with_columns
from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.parquet import arrow_schema, read_part

MAX_SEARCHED_ROWS = 20_000_000
"""Maximum number of stored rows of a table that one run searches. The search takes about 0.2 µs for each row."""
MAX_REPLACED_ROWS = 300_000
"""Maximum number of rows of a table that one run replaces by rewriting their files."""
SMALL_ROWS = 10_000
"""Number of rows below which a file counts as small, so that it may be merged with other files."""
SMALL_FILES_TO_MERGE = 16
"""Minimum number of small files of one day at which these files are merged."""
FILE_ROWS = 100_000
"""Approximate maximum number of rows of a file that this process writes. A late event causes one such file to be
written again."""


@dataclass(frozen=True)
class Rewrite:
    """File to write again without some of its rows.

    :ivar is_former: for each row of the file, whether it is replaced; None if all rows are kept, and the file is only
        merged with others.
    :ivar former: the rows that are replaced.
    """

    file: File
    is_former: pa.Array | None
    former: pa.Table


def find_rewrites(
    table: Delta,
    days: Iterable[str],
    is_former: Callable[[pa.Table], pa.Array] | None,
    columns: Sequence[str] | None = None,
    among: tuple[str, pa.Array] | None = None,
) -> list[Rewrite]:
    """Search the files of some days for rows to replace.

    :param is_former: function that gets rows, and returns for each row whether it is replaced; None to replace no row.
    :param columns: columns that ``is_former`` needs; None for all.
    :param among: column, and the texts that a replaced row can have in this column. Files without any of these texts
        are not searched. None to search all files.
    :raises WholeDays: there are too many rows to search or to replace.
    """
    schema, storage, chosen = arrow_schema(table.schema), table.reading_storage(), set(days)
    files = [file for file in table.files() if file.values["dt"] in chosen]
    merged = _small_files(files)
    needed = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    found: dict[str, Rewrite] = {file.path: Rewrite(file, None, schema.empty_table()) for file in merged}
    if is_former is not None:
        if among is not None:
            files = [file for file in files if table.search.texts.can_contain(file.path, *among)]
        if sum(MAX_SEARCHED_ROWS + 1 if file.rows is None else file.rows for file in files) > MAX_SEARCHED_ROWS:
            raise WholeDays
        count = 0
        for file in files:
            rows = with_columns(read_part(storage, file.path, needed.names), needed, file.values)
            mask = is_former(rows)
            affected = pc.sum(mask).as_py() or 0
            count += affected
            if count > MAX_REPLACED_ROWS:
                raise WholeDays
            if affected:
                if columns is not None:
                    rows = with_columns(read_part(storage, file.path), schema, file.values)
                found[file.path] = Rewrite(file, mask, rows.filter(mask))
    return list(found.values())


def find_groups(table: Delta, days: Iterable[str], groups: Groups) -> list[Rewrite]:
    """Search the files of some days for rows of groups. Files in which the first column of the groups has none of the
    groups' texts are not searched.

    :raises WholeDays: there are too many rows to search or to replace.
    """
    return find_rewrites(table, days, groups.contains, groups.columns, (groups.columns[0], groups.first_texts))


def _small_files(files: Iterable[File]) -> list[File]:
    """Return the small files of those days that have many of them."""
    small: dict[str, list[File]] = {}
    for file in files:
        if file.rows is not None and file.rows < SMALL_ROWS:
            small.setdefault(file.values["dt"], []).append(file)
    return [file for some in small.values() if len(some) >= SMALL_FILES_TO_MERGE for file in some]


def kept_rows(table: Delta, rewrites: Iterable[Rewrite]) -> Iterator[pa.Table]:
    """Return the rows of each file that are not replaced, one file at a time."""
    schema, storage = arrow_schema(table.schema), table.reading_storage()
    for one in rewrites:
        rows = with_columns(read_part(storage, one.file.path), schema, one.file.values)
        yield rows if one.is_former is None else rows.filter(pc.invert(one.is_former))


def in_files(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Divide rows of one day into tables of about :data:`FILE_ROWS` rows, one for each file to write."""
    waiting: list[pa.Table] = []
    count = 0
    for table in tables:
        for start in range(0, table.num_rows, FILE_ROWS):
            waiting.append(table.slice(start, FILE_ROWS))
            count += waiting[-1].num_rows
            if count >= FILE_ROWS:
                yield pa.concat_tables(waiting)
                waiting, count = [], 0
    if count:
        yield pa.concat_tables(waiting)
