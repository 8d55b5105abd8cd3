"""Commands ``dmsg analytics statement`` and ``verify-statement``.

A statement is a signed list of the bytes that servers delivered on a day, as receipts of both ends confirm.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dmsg.base.printable import printable
from dmsg.base.units import human_size
from dmsg.cli import output
from dmsg.cli.options import WRITTEN_FILE, command
from dmsg.cli.params import create_option
from dmsg.cli.pipeline.common import errors_in_one_line, local_directory_option
from dmsg.errors import DmsgError, WrongUse

if TYPE_CHECKING:
    from dmsg.keys import PubKey
    from dmsg.telemetry.credits import Credits
    from dmsg.telemetry.statements import Statement

MAX_LINES = 20
"""Maximum number of lines of each kind that are printed for people."""
_COUNTS = ("transports", "credited", "difference", "one_sided", "conflict", "bytes_ab", "bytes_ba")


@command()
@click.argument("day", metavar="DAY", type=click.DateTime(["%Y-%m-%d"]))
@local_directory_option(
    "--inputs", "Directory with sealed files of receipts; its subdirectories are read, too.", exists=True
)
@click.option("--key-file", "-k", required=True, metavar="FILE", help="File with the operator's secret key.")
@create_option
@click.option("--file", type=WRITTEN_FILE, help="File to write.  Default: statement-DAY.jsonl")
@click.option(
    "--days-before",
    type=click.IntRange(0, 365),
    help="Number of earlier days whose receipts are read, too, so that no transport is credited twice.  [default: 30]",
)
@errors_in_one_line
def statement(
    day: datetime, inputs: Path, key_file: str, create: bool, file: Path | None, days_before: int | None
) -> None:
    """Sign a statement of the bytes that each server delivered on DAY; needs no Java.

    Only bytes that the receipts of both ends confirm are credited. Anybody with the same files of receipts can compute
    the same statement, and so check it with `dmsg analytics verify-statement`.

    \b
    Example:
      dmsg analytics statement 2026-01-31 --inputs /srv/spool -k operator.key
    """
    from dmsg.analytics.atomic_write import write_atomically
    from dmsg.keys import load_or_create_key
    from dmsg.telemetry.credits import DAYS_BEFORE, compute_credits
    from dmsg.telemetry.statements import body_of, sign_statement

    wanted = day.date()
    if wanted >= datetime.now(UTC).date():
        raise WrongUse(f"{wanted} has not ended in UTC: a statement covers a whole day")
    key = load_or_create_key(key_file, create=create)
    before = DAYS_BEFORE if days_before is None else days_before
    try:
        first = wanted - timedelta(before)
    except OverflowError:
        raise WrongUse(f"the calendar has no date {before} days before {wanted}") from None
    found = compute_credits(_files(inputs), wanted, first)
    _warn(found)
    if not found.servers:
        raise DmsgError(f"there are no receipts of {wanted} in {inputs}")
    target = file or Path(f"statement-{wanted}.jsonl")
    write_atomically(target, sign_statement(body_of(found), key))
    credited = sum(total.credited for total in found.servers.values())
    output.tell(
        f"wrote {target}: {len(found.servers):,} servers delivered {human_size(credited)} on {wanted}, as both "
        f"ends confirm, from {len(found.inputs):,} files; signed by {key.public.text}",
        wrote=str(target),
        day=str(wanted),
        servers=len(found.servers),
        pairs=len(found.pairs),
        credited=credited,
        inputs=len(found.inputs),
        refused=found.refused.total(),
        damaged=len(found.damaged),
        operator=key.public.hex(),
    )


def _files(inputs: Path) -> list[Path]:
    """Return all sealed files of receipts below a directory, and print which files cannot be read."""
    from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX
    from dmsg.telemetry.spool_listing import left_lines, list_sealed, merge

    listing = list_sealed(inputs, [f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}"])
    for line in left_lines(merge([listing.left])):
        output.notice(line)
    return [Path(one.path) for one in listing.files]


def _warn(credits: Credits) -> None:
    for path, reason in list(credits.damaged.items())[:MAX_LINES]:
        output.notice(f"{printable(str(path))} is left out: {reason}")
    if len(credits.damaged) > MAX_LINES:
        output.notice(f"{len(credits.damaged) - MAX_LINES:,} more files are left out")
    for reason, count in credits.refused.most_common(5):
        output.notice(f"{count:,} receipts of {credits.day} are ignored: {reason}")


@command("verify-statement")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--inputs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory with files of receipts, from which the statement is computed again.",
)
@click.option(
    "--operator", metavar="KEY", help="Key of the operator who must have signed, or a name of the address book."
)
@click.option(
    "--key",
    "about",
    metavar="KEY",
    help="Show only the lines of the statement about this server or client.  With --inputs, compare these lines with "
    "the receipts of this key only.",
)
@errors_in_one_line
def verify_statement(file: Path, inputs: Path | None, operator: str | None, about: str | None) -> None:
    """Check a signed statement, and with --inputs compute it again; needs no Java.

    Without --operator, the command prints who signed the statement, which may be anybody. With --key, --inputs needs to
    contain only the receipts of that server or client.

    \b
    Examples:
      dmsg analytics verify-statement statement-2026-01-31.jsonl --operator akvy... --inputs /srv/spool
      dmsg analytics verify-statement statement-2026-01-31.jsonl --key akvy... --inputs /var/lib/dmsg/telemetry
    """
    from dmsg.clients.address_book import AddressBook
    from dmsg.telemetry.statements import MAX_SIZE, StatementError, read_statement

    book = AddressBook()
    with open(file, "rb") as opened:
        found = read_statement(opened.read(MAX_SIZE + 1))
    if operator is not None and (wanted := book.find(operator)) != found.operator:
        raise StatementError(f"the statement is signed by {found.operator.text}, not by {wanted.text}")
    if about is not None:
        _verify_lines(found, book.find(about), inputs)
        return
    found.check_lines()
    head = next(found.lines())
    remade = None
    if inputs is not None:
        _remake(found, inputs)
        remade = True
    credited = sum(line["credited"] for line in found.lines() if line["kind"] == "server")
    text = f"{found.day}: {head['servers']:,} servers delivered {human_size(credited)}, signed by {found.operator.text}"
    text += "" if operator else "; check that this is the operator's key (--operator)"
    text += "; made again from the receipts, it is the same" if remade else ""
    fields: dict[str, Any] = {"day": str(found.day), "operator": found.operator.hex(), "credited": credited}
    output.tell(text, **fields, servers=head["servers"], pairs=head["pairs"], inputs=head["inputs"], remade=remade)


def _remake(statement: Statement, inputs: Path) -> None:
    """Compute the statement again from the files of receipts that it names, and compare the results.

    :param inputs: directory with the files.
    :raises DmsgError: files are missing.
    :raises StatementError: the computed statement differs.
    """
    from dmsg.telemetry.credits import compute_credits
    from dmsg.telemetry.statements import StatementError, body_of

    named = {line["sha256"] for line in statement.lines() if line["kind"] == "input"}
    files = _files(inputs)
    everything = compute_credits(files, statement.day, statement.first)
    left = everything.inputs.keys() - named
    again = compute_credits(files, statement.day, statement.first, only=named) if left else everything
    if missing := sorted(named - again.inputs.keys()):
        raise DmsgError(
            f"{len(missing):,} of the statement's {len(named):,} files of receipts are not in {inputs}, such as "
            f"the one with the SHA-256 {missing[0]}"
        )
    if body_of(again) != statement.body:
        stated = {_line_name(line): line for line in statement.lines() if line["kind"] in ("server", "pair")}
        _tell_differences(stated, _lines_of(again))
        raise StatementError("a statement computed from the named files of receipts differs from this statement")
    if left:
        output.notice(
            f"{len(left):,} files in {inputs} have receipts of the statement's days, but are not in the statement, "
            f"such as {printable(str(everything.inputs[min(left)]))}"
        )
        _tell_differences(_lines_of(again), _lines_of(everything))


def _lines_of(credits: Credits) -> dict[str, Mapping[str, Any]]:
    """Return the lines of a statement of these credits, by name. The name of a line says which server or which pair
    of clients the line is about.
    """
    lines: dict[str, Mapping[str, Any]] = {}
    for server, total in credits.servers.items():
        counts = {name: getattr(total, name) for name in _COUNTS if hasattr(total, name)}
        lines[f"server {server.hex()}"] = {"kind": "server", "server": server.hex(), **counts}
    for (server, initiator, responder), pair in credits.pairs.items():
        names = {"server": server.hex(), "initiator": initiator.hex(), "responder": responder.hex()}
        counts = {name: getattr(pair, name) for name in _COUNTS if hasattr(pair, name)}
        line = {"kind": "pair", **names, **counts}
        lines[_line_name(line)] = line
    return lines


def _line_name(line: Mapping[str, Any]) -> str:
    if line["kind"] == "server":
        return f"server {line['server']}"
    return f"{line['initiator']} to {line['responder']} over {line['server']}"


def _readable_line_name(line: Mapping[str, Any]) -> str:
    """Return the name of a line with its keys in the form that people read and type."""
    from dmsg.keys import PubKey

    keys = {name: PubKey.from_hex(line[name]).text for name in ("server", "initiator", "responder") if name in line}
    return _line_name({"kind": line["kind"], **keys})


def _tell_differences(stated: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]) -> int:
    """Print in which lines a statement differs from the receipts, and return the number of these lines.

    :param stated: lines of the statement, by name.
    :param ours: lines computed from the receipts, by name.
    """
    # Lines of servers come first, because each of them sums up the lines of the pairs of one server.
    names = sorted(stated.keys() | ours.keys(), key=lambda name: (not name.startswith("server "), name))
    different = [name for name in names if stated.get(name) != ours.get(name)]
    for name in different[:MAX_LINES]:
        one, other = stated.get(name, {}), ours.get(name, {})
        counts = [key for key in _COUNTS if one.get(key, 0) != other.get(key, 0)]
        texts = (f"{key} {one.get(key, 0):,}, by the receipts {other.get(key, 0):,}" for key in counts)
        shown = _readable_line_name(one or other)
        output.notice(f"{shown}: {'; '.join(texts) or 'one of them has no such line'}")
    if len(different) > MAX_LINES:
        output.notice(f"{len(different) - MAX_LINES:,} more lines differ")
    return len(different)


def _verify_lines(statement: Statement, about: PubKey, inputs: Path | None) -> None:
    """Print the lines of one server or client.  With ``inputs``, compare the lines with receipts.

    :param about: key of the server or client.
    :param inputs: directory with the receipts of that server or client, or None.
    """
    from dmsg.telemetry.credits import compute_credits
    from dmsg.telemetry.statements import StatementError

    stated = {_line_name(line): line for line in statement.lines(about) if line["kind"] in ("server", "pair")}
    if not output.state.json:
        output.say(f"the statement of {statement.day} is signed by {statement.operator.text}")
    for line in list(stated.values())[: None if output.state.json else MAX_LINES]:
        output.tell(_line_text(line), **line)
    if len(stated) > MAX_LINES and not output.state.json:
        output.say(f"and {len(stated) - MAX_LINES:,} more lines are about this key (--json has all)")
    if not stated:
        output.notice(f"{about.text} has no line in the statement")
    if inputs is None:
        return
    own = compute_credits(_files(inputs), statement.day, statement.first, about)
    _warn(own)
    ours = {name: line for name, line in _lines_of(own).items() if about.hex() in name}
    if len([one for one in stated if one.startswith("server ")]) == 0 and stated:
        # The key is a client's. Its receipts are only a part of a server's sum, so lines of servers are not compared.
        ours = {name: line for name, line in ours.items() if line["kind"] == "pair"}
    named = {line["sha256"] for line in statement.lines() if line["kind"] == "input"}
    left = own.inputs.keys() - named
    if left:
        output.notice(
            f"{len(left):,} files in {inputs} are not in the statement, such as {printable(str(own.inputs[min(left)]))}"
        )
    if count := _tell_differences(stated, ours):
        raise StatementError(f"{count:,} lines of the statement differ from the receipts in {inputs}")
    output.notice("the receipts confirm the statement")


def _line_text(line: Mapping[str, Any]) -> str:
    if line["kind"] == "server":
        text = f"credited {line['credited']:,} bytes of {line['transports']:,} transports"
        for name, words in (
            ("one_sided", "transports lack one end's receipt"),
            ("conflict", "transports are claimed by several pairs"),
            ("difference", "bytes are said by one end only"),
        ):
            text += f"; {line[name]:,} {words}" if line[name] else ""
        return text
    from dmsg.keys import PubKey

    keys = {name: PubKey.from_hex(line[name]).short for name in ("server", "initiator", "responder")}
    return (
        f"{_line_name({'kind': 'pair', **keys})}: {line['bytes_ab']:,} bytes forward, {line['bytes_ba']:,} back, "
        f"{line['transports']:,} transports"
    )
