"""``dmsg analytics statement|verify-statement``, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

from dmsg.keys import write_key_file
from tests.cli.test_commands import CommandCase
from tests.support import asynchronous
from tests.telemetry.receipt_files import BEFORE, DAY, OPERATOR, OTHER, SERVER, C, both, line, write


class StatementTests(CommandCase):
    """Statement of a day of two servers."""

    def setUp(self) -> None:
        super().setUp()
        self.here = self.directory
        self.spool, self.own = self.here / "spool", self.here / "spool" / "one"
        write(self.own / "receipts-1.jsonl.gz", [line(one) for n in range(5) for one in both(n, 1000, n)])
        write(self.own / "receipts-0.jsonl.gz", [line(one, BEFORE) for one in both(9, 77, 0)])
        rows = [line(one, server=OTHER) for one in both(7, 20, 0, a=C, server=OTHER)]
        write(self.spool / "two" / "receipts-1.jsonl.gz", rows)
        write_key_file(self.here / "operator.key", OPERATOR)

    async def say(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        ended, out, err = await self.run_command("analytics", *arguments)
        self.assertEqual(ended, status, (arguments, out, err))
        return out, err

    async def make(self, *arguments: str) -> Path:
        await self.say("statement", str(DAY), "--inputs", "spool", "-k", "operator.key", *arguments)
        return self.here / f"statement-{DAY}.jsonl"

    @asynchronous
    async def test_anybody_makes_the_same_bytes(self) -> None:
        made = await self.make()
        name, data = made.name, made.read_bytes()
        out, err = await self.say(
            "verify-statement", name, "--inputs", "spool", "--operator", OPERATOR.public.text, "--json"
        )
        self.assertEqual(err, "")
        said = json.loads(out)
        self.assertEqual((said["servers"], said["pairs"], said["credited"]), (2, 2, 5030))
        self.assertIs(said["remade"], True)
        # Files of other days, doubled files and other names change nothing.
        (self.own / "receipts-1.jsonl.gz").rename(self.spool / "receipts-77.jsonl.gz")
        (self.here / "spool" / "receipts-78.jsonl.gz").write_bytes((self.spool / "receipts-77.jsonl.gz").read_bytes())
        await self.make("--file", "again.jsonl")
        self.assertEqual((self.here / "again.jsonl").read_bytes(), data)

    @asynchronous
    async def test_an_operator_checks_his_own_lines_with_his_own_receipts(self) -> None:
        name = (await self.make()).name
        key = ("--key", SERVER.public.text)
        out, err = await self.say("verify-statement", name, *key, "--inputs", "spool/one")
        self.assertIn("credited 5,010 bytes of 5 transports", out)
        self.assertNotIn(OTHER.public.hex()[:8], out)
        self.assertIn("the receipts confirm the statement", err)
        out, _ = await self.say("verify-statement", name, "--key", C.public.hex())
        self.assertIn(f"{C.public.short} over", out.replace(" to ", " over "))
        out, _ = await self.say("verify-statement", name, "--key", C.public.hex(), "--inputs", "spool", "--json")
        self.assertEqual([json.loads(one)["bytes_ab"] for one in out.splitlines()], [20])
        write(self.own / "receipts-2.jsonl.gz", [line(one) for one in both(8, 50, 0)])
        _, err = await self.say("verify-statement", name, *key, "--inputs", "spool/one", status=1)
        self.assertIn("1 files in spool/one are not in the statement", err)
        self.assertIn(
            f"dmsg: server {SERVER.public.text}: transports 5, by the receipts 6; credited 5,010", " ".join(err.split())
        )
        out, err = await self.say("verify-statement", name, "--key", OPERATOR.public.text)
        self.assertIn("has no line in the statement", err)

    @asynchronous
    async def test_whoever_leaves_out_files_or_edits_is_found(self) -> None:
        data = (await self.make()).read_bytes()
        everything = ("--inputs", "spool")
        (self.here / "edited.jsonl").write_bytes(data.replace(b'"credited":5010', b'"credited":9010'))
        _, err = await self.say("verify-statement", "edited.jsonl", status=1)
        self.assertEqual(err, "dmsg: the statement was changed, or was not signed by the key that it names\n")
        # The operator signs other numbers.
        from dmsg.telemetry.statements import sign_statement

        body = b"".join(data.splitlines(keepends=True)[:-1])
        lie = body.replace(b'"credited":5010', b'"credited":9010').replace(b'"bytes_ab":5000', b'"bytes_ab":9000')
        (self.here / "lie.jsonl").write_bytes(sign_statement(lie, OPERATOR))
        await self.say("verify-statement", "lie.jsonl")
        _, err = await self.say("verify-statement", "lie.jsonl", *everything, status=1)
        self.assertIn("credited 9,010, by the receipts 5,010", err)
        self.assertIn("a statement computed from the named files of receipts differs from this statement", err)
        # Somebody else signs the same lines.
        (self.here / "other.jsonl").write_bytes(sign_statement(body, OTHER))
        await self.say("verify-statement", "other.jsonl", *everything)
        _, err = await self.say("verify-statement", "other.jsonl", "--operator", OPERATOR.public.text, status=1)
        self.assertIn(f"signed by {OTHER.public.text}, not by", err)
        # The operator has left out some files, and some files are missing here.
        write(
            self.spool / "two" / "receipts-2.jsonl.gz",
            [line(one, server=OTHER) for one in both(6, 4000, 0, server=OTHER)],
        )
        _, err = await self.say("verify-statement", f"statement-{DAY}.jsonl", *everything)
        self.assertIn("1 files in spool have receipts of the statement's days, but are not in the statement", err)
        self.assertIn("credited 20, by the receipts 4,020", err)
        (self.own / "receipts-1.jsonl.gz").unlink()
        _, err = await self.say("verify-statement", f"statement-{DAY}.jsonl", *everything, status=1)
        self.assertIn("1 of the statement's 3 files of receipts are not in spool", err)

    @asynchronous
    async def test_bad_input_is_one_line(self) -> None:
        (self.here / "empty").mkdir()
        (self.here / "file").write_text("x")
        for arguments in (
            ("statement", str(DAY), "--inputs", "nowhere", "-k", "operator.key"),
            ("statement", str(DAY), "--inputs", "empty", "-k", "operator.key"),
            ("statement", str(DAY), "--inputs", "spool", "-k", "none.key"),
            ("statement", "2999-01-01", "--inputs", "spool", "-k", "operator.key"),
            ("statement", "0001-01-01", "--inputs", "spool", "-k", "operator.key"),
            ("statement", str(DAY), "--inputs", "spool", "-k", "operator.key", "--file", "nowhere/x"),
            ("verify-statement", "file"),
            ("verify-statement", "nowhere"),
            ("verify-statement", "file", "--inputs", "nowhere"),
        ):
            ended, _, err = await self.run_command("analytics", *arguments)
            self.assertGreater(ended, 0, arguments)
            errors = [one for one in err.splitlines() if one.strip() and not one.startswith(("Usage:", "Try "))]
            self.assertEqual(len(errors), 1, (arguments, err))
        made = await self.make()
        _, err = await self.say("verify-statement", made.name, "--key", "nobody", status=1)
        self.assertEqual(len(err.splitlines()), 1)
