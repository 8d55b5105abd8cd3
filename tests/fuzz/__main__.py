"""Guided fuzzing: Atheris looks for bytes that reach new lines in the code that handles bytes of strangers.

``make long WHICH=fuzz-guided SECONDS=600`` shares the time among all targets.  The results stay in a directory of this
run; ``--keep`` adds the smallest set of inputs with the same coverage to the corpus, which every run of the tests
uses.

``make long WHICH=fuzz-guided SECONDS=600`` shares the time among all targets.  What it finds stays in a directory of
this run; ``--keep`` puts the smallest set that reaches as much into the corpus, which every run of the tests uses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
MAX_LENGTH = 2048
KEPT, KEPT_LENGTH = 60, 512
"""Maximum number of files in the corpus for each target, and maximum size of a file in bytes; shorter files are
preferred.
"""


def run_one(name: str, arguments: list[str]) -> None:
    """Fuzz a target in a process of its own, because libFuzzer ends its process."""
    import atheris

    with atheris.instrument_imports(include=["dmsg"]):
        for module in [module for module in sys.modules if module.startswith(("dmsg", "tests."))]:
            del sys.modules[module]
        from tests.fuzz.targets import TARGETS as instrumented

    atheris.Setup([f"fuzz {name}", *arguments], instrumented[name])
    atheris.Fuzz()


def fuzz(name: str, seconds: float, work: Path) -> tuple[int, str]:
    """Fuzz a target for some seconds; return the exit status of libFuzzer and its output."""
    found = work / name
    found.mkdir()
    for number, seed in enumerate(seeds()[name]):
        (found / f"seed-{number}").write_bytes(seed)
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    words = [f"-max_total_time={int(seconds)}", f"-max_len={MAX_LENGTH}", "-timeout=10", "-rss_limit_mb=2048"]
    words += [f"-artifact_prefix={work}/{name}-", "-print_final_stats=1", str(found), str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--one", name, *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def steps(name: str, data: bytes) -> set[tuple[str, int, int]]:
    """Return the steps of the product's code for this input: file, line, and next line."""
    found: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "/dmsg/" not in path:
            return None
        before = frame.f_lineno

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            found.add((path, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        TARGETS[name](data)
    finally:
        sys.settrace(None)
    return found


def keep(name: str, work: Path) -> int:
    """Add the smallest inputs that were found to the corpus, each with a step that smaller inputs do not take.

    :returns: number of files that the corpus then has for the target.

    :returns: how many files it has then.
    """
    there = [path for folder in (CORPUS / name, work / name) for path in folder.iterdir()]
    contents = sorted({path.read_bytes() for path in there if path.stat().st_size <= KEPT_LENGTH}, key=len)
    reached: set[tuple[str, int, int]] = set()
    kept: list[Any] = []
    for data in contents:
        new = steps(name, data) - reached
        if new and len(kept) < KEPT:
            reached |= new
            kept.append(data)
    for old in (CORPUS / name).iterdir():
        if not old.name.startswith("fault-"):
            old.unlink()
    for data in kept:
        (CORPUS / name / sha256(data).hexdigest()[:16]).write_bytes(data)
    return len(kept)


def main() -> int:
    """Run the command; return 1 if a fault was found."""
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all together")
    parser.add_argument("--keep", action="store_true", help="put what reaches something new into the corpus")
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}")
    work = Path(tempfile.mkdtemp(prefix="dmsg-fuzz-"))
    status = 0
    for name in names:
        code, said = fuzz(name, arguments.seconds / len(names), work)
        runs = [line.split()[-1] for line in said.splitlines() if line.startswith("stat::number_of_executed_units")]
        last = [line for line in said.splitlines() if "cov:" in line][-1:]
        reached = last[0].split("cov:")[1].split()[0] if last else "?"
        kept = f", {keep(name, work)} files kept" if arguments.keep and not code else ""
        sys.stdout.write(f"{name}: {runs[0] if runs else '?'} runs, {reached} edges{kept}\n")
        if code:
            status = 1
            sys.stdout.write(said[-4000:] + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"what was found: {work}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
