"""Whether tests notice: seeded mutants of a file, each against the tests that belong to it.

Cosmic Ray makes the mutants and runs the tests, in a copy of the working tree.  Not
asked for are mutants that no test can notice, or none should: in annotations, which nothing
evaluates, of a module's constants, which are decisions (docs/limits.md), in what decorators
are called with, as the size of a cache, and the star of a signature.

``make long WHICH=mutate FILES="dmsg/rmb/envelope/wire.py" SAMPLE=60``
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 120.0
"""Seconds for the tests of one mutant: one that never ends is noticed."""
TESTS = {
    "dmsg/discovery/entries/entry.py": (
        "tests.test_signed tests.discovery.entries.test_entry tests.discovery.service.test_api"
    ),
    "dmsg/discovery/entries/rules.py": "tests.discovery.entries tests.discovery.store",
    "dmsg/discovery/store/sqlite.py": "tests.discovery.store",
    "dmsg/messaging/core/table.py": "tests.messaging",
    "dmsg/messaging/core/relay.py": "tests.messaging",
    "dmsg/net/streams/stream.py": "tests.net.test_stream tests.v2019.test_secure tests.v2019.test_manners",
    "dmsg/noise/records.py": "tests.noise",
    "dmsg/base/ranked.py": "tests.discovery.store tests.rmb.test_enemies.UsedTokenTests",
    "dmsg/rmb/relay/delivery.py": "tests.rmb.test_delivery",
    "dmsg/rmb/relay/federation/slots.py": "tests.rmb.test_slots",
    "dmsg/rmb/twins/token.py": "tests.rmb.test_wire tests.rmb.test_enemies.UsedTokenTests",
    "dmsg/rmb/envelope/wire.py": "tests.rmb.test_wire tests.test_signed",
    "dmsg/telemetry/spool.py": "tests.telemetry.test_spool",
    "dmsg/streams/core/agreement.py": "tests.v2019.test_secure",
    "dmsg/v2019/core/table.py": "tests.v2019.test_table tests.v2019.test_table_vectors "
    "tests.v2019.test_secure tests.v2019.test_protocol tests.v2019.test_streams "
    "tests.telemetry.test_receipts tests.v2019.test_telemetry",
    "dmsg/telemetry/owed.py": "tests.telemetry.test_owed",
    "dmsg/v2019/core/relay.py": "tests.v2019.test_relay tests.v2019.test_relay_corners "
    "tests.v2019.test_vectors "
    "tests.v2019.test_protocol tests.v2019.test_policing tests.v2019.test_telemetry",
    "dmsg/streams/core/secure.py": "tests.v2019.test_secure tests.streams.test_windows tests.v2019.test_streams",
    "dmsg/streams/core/resumption.py": "tests.streams.test_resumption tests.streams.test_windows "
    "tests.v2019.test_streams",
    "dmsg/v2019/core/handshakes.py": "tests.streams.test_resumption tests.v2019.test_secure tests.v2019.test_streams",
    "dmsg/streams/streams.py": "tests.streams.test_streams_table tests.v2019.test_streams tests.v2019.test_secure",
}
"""By file; others need ``--tests``."""


def copy_tree(target: Path) -> None:
    """What git knows, as it is now, and what was compiled."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [*listed.decode().split("\0"), "dmsg/rmb/envelope/envelope_pb2.py", "dmsg/rmb/envelope_pb2.pyi"]
    for name in names:
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


Place = tuple[int, int]
"""Line and column."""
ALL, VALUES, STARS = "", ("Number", "Operator"), ("BinaryOperator",)


def left_out(source: str) -> list[tuple[Place, Place, str | tuple[str, ...]]]:
    """From where to where mutants are not asked for whose operator's name has one of these words; ``ALL``: none are."""
    places: list[tuple[Place, Place, str | tuple[str, ...]]] = []

    def add(node: ast.expr | None, words: str | tuple[str, ...]) -> None:
        if node is not None:
            end = node.end_lineno or node.lineno, node.end_col_offset or 0
            places.append(((node.lineno, node.col_offset), end, words))

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            add(node.returns, ALL)
            places.append(((node.lineno, node.col_offset), (node.body[0].lineno, 0), STARS))
        elif isinstance(node, ast.arg | ast.AnnAssign):
            add(node.annotation, ALL)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    places.append(((decorator.lineno, 0), (decorator.end_lineno or 0, 999), ALL))
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(
            isinstance(name, ast.Name | ast.Tuple) and ast.unparse(name).isupper() for name in node.targets
        ):
            add(node.value, VALUES)
    return places


def sample(session: Path, source: str, number: int, seed: int) -> None:
    """Leave ``number`` random mutants of a session; the others are marked as skipped."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    places = left_out(source)
    with use_db(str(session)) as db:
        every: list[str] = []
        places_of: dict[tuple[int, int], list[str]] = {}
        for item in db.work_items:
            every.append(item.job_id)
            (mutation,) = item.mutations
            within = [words for start, end, words in places if start <= mutation.start_pos < end]
            wanted = not any(words == ALL or any(word in mutation.operator_name for word in words) for words in within)
            # "is" in place of "==" is the same for what is compared here
            of_identity = mutation.operator_name.endswith(("_Is", "_IsNot"))
            if wanted and not of_identity:
                places_of.setdefault(mutation.start_pos, []).append(item.job_id)
        # one of each place, so that an operator, of which a dozen mutants are made, counts no more than a number
        chance = random.Random(seed)
        chosen = [chance.choice(sorted(jobs)) for _, jobs in sorted(places_of.items())]
        chance.shuffle(chosen)
        for job in set(every) - set(chosen[:number]):
            db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def results(session: Path) -> list[tuple[bool, str]]:
    """Whether each mutant was noticed, and what it was."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    found = []
    with use_db(str(session)) as db:
        items: dict[str, Any] = {item.job_id: item for item in db.work_items}
        for job, result in db.results:
            if result.worker_outcome is WorkerOutcome.SKIPPED:
                continue
            (mutation,) = items[job].mutations
            where = f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name.removeprefix('core/')}"
            found.append((result.test_outcome is not TestOutcome.SURVIVED, f"{where}\n{result.diff or ''}"))
    return found


def mutate(name: str, tests: str, number: int, seed: int) -> list[tuple[bool, str]]:
    """Mutants of one file.  :raises RuntimeError: its tests fail without any."""
    with tempfile.TemporaryDirectory(prefix="dmsg-mutants-") as directory:
        copy = Path(directory) / "copy"
        copy_tree(copy)
        command = f"{sys.executable} -m twisted.trial --exitfirst --temp-directory=_trial_temp {tests}"
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}

        def run(*words: str) -> subprocess.CompletedProcess[bytes]:
            return subprocess.run(words, cwd=copy, env=environment, capture_output=True, check=False)

        whole = run(*command.split())
        if whole.returncode:
            raise RuntimeError(f"{name}: {tests} fails as it is:\n{whole.stdout.decode()[-2000:]}")
        settings, session = copy / "mutants.toml", copy / "mutants.sqlite"
        settings.write_text(
            f'[cosmic-ray]\nmodule-path = "{name}"\ntimeout = {TIMEOUT}\nexcluded-modules = []\n'
            f'test-command = "{command}"\n[cosmic-ray.distributor]\nname = "local"\n'
        )
        tool = str(Path(sys.executable).with_name("cosmic-ray"))
        for words in (("init", str(settings), str(session)), ("exec", str(settings), str(session))):
            done = run(tool, *words)
            if done.returncode:
                raise RuntimeError(f"{name}: cosmic-ray {words[0]}: {done.stderr.decode()[-2000:]}")
            if words[0] == "init":
                sample(session, (copy / name).read_text(), number, seed)
        return results(session)


def main() -> int:
    """The command.  Status 1: a file has a smaller part noticed than ``--least``."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="as in dmsg/rmb/envelope/wire.py")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", help="trial's names of the tests, if the file is not known")
    parser.add_argument("--least", type=float, default=0.0, help="percent that have to be noticed")
    arguments = parser.parse_args()
    for name in arguments.files:
        if not arguments.tests and name not in TESTS:
            parser.error(f"which tests belong to {name}? (--tests)")

    def one(name: str) -> list[tuple[bool, str]]:
        return mutate(name, arguments.tests or TESTS[name], arguments.sample, arguments.seed)

    worst = 100.0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(arguments.files, pool.map(one, arguments.files), strict=True):
            survivors = [text for noticed, text in found if not noticed]
            for text in survivors:
                sys.stdout.write(text + "\n")
            part = 100.0 * (len(found) - len(survivors)) / max(1, len(found))
            worst = min(worst, part)
            sys.stdout.write(f"{name}: {len(found) - len(survivors)} of {len(found)} noticed, {part:.0f} %\n")
            sys.stdout.flush()
    return 0 if worst >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
