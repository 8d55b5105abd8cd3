"""The models of handshakes in ``docs/proofs``, searched by Verifpal: ``make long WHICH=proofs``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, TestCase

PROOFS = Path(__file__).parents[2] / "docs" / "proofs"
TIMEOUT = 900
"""Seconds that one search may take; on an idle machine, the longest takes half a minute."""
RESULTS: dict[tuple[str, ...], dict[int, str]] = {
    ("opening",): {1: "c1c0a0a0a0", 2: "c1c0a0a0a0"},
    ("opening", "THIEF_OF_RESPONDER"): {1: "c1c1a0a1a0"},
    ("opening", "THIEF_OF_INITIATOR"): {1: "c1c1a1a0a1"},
    ("opening", "NO_CONFIRMATION"): {1: "c1c0a0a0", 2: "c1c0a1a0"},
    ("opening", "NO_CONFIRMATION", "THIEF_OF_RESPONDER"): {1: "c1c0a1a1"},
    ("frames",): {1: "c0c0c0a0a0a0a0", 2: "c0c0c0a0a0a0a0"},
    ("frames", "NO_COUNTER"): {1: "c0c0c0a1a1a0a0"},
    ("resume",): {1: "a0a0a0", 2: "a0a0a0"},
    ("resume", "THIEF_OF_RESPONDER"): {1: "a0a1a0"},
    ("resume", "NO_CONFIRMATION"): {1: "a0a0", 2: "a1a0"},
    ("resume", "NO_CONFIRMATION", "THIEF_OF_RESPONDER"): {1: "a1a1"},
    ("codes",): {1: "c0a0a0", 2: "c0a0a0"},
    ("codes", "NO_BINDING"): {1: "c1a1a1"},
    ("codes", "NO_CONFIRMATION"): {1: "c1a1a0"},
    ("codes", "WORDS_ARE_HEARD"): {1: "c1a1a1"},
    ("successor",): {1: "c0a0a0"},
    ("successor", "NO_OLD_SIGNATURE"): {1: "c1a1"},
    ("successor", "THIEF_OF_OLD"): {1: "c1a1a1"},
}
"""For each model and the names that are given to it: Verifpal's result for each number of runs at the same time.

A result has one letter and one digit for each query of the model; the digit is 1 if Verifpal finds an attack.
"""


def choose_lines(text: str, names: tuple[str, ...]) -> str:
    """Return a model in which these names are given.

    A line that ends with ``// unless NAME`` is left out if the name is given. A line ``// if NAME: LINE`` becomes
    ``LINE`` if the name is given, and is a comment otherwise.
    """
    lines = []
    for line in text.splitlines():
        if (found := re.fullmatch(r"(.*?)\s*// unless (\w+)", line)) is not None:
            if found[2] not in names:
                lines.append(found[1])
        elif (found := re.fullmatch(r"(\s*)// if (\w+): (.*)", line)) is not None and found[2] in names:
            lines.append(found[1] + found[3])
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


class HandshakeModelTests(TestCase):
    """Verifpal searches attacks on the handshakes in ``docs/proofs``."""

    timeout = TIMEOUT

    def check(self, model: str) -> None:
        """Compare all results of one model with the expected ones."""
        if shutil.which("verifpal") is None:
            raise SkipTest("there is no verifpal here")
        for names, results in RESULTS.items():
            if names[0] != model:
                continue
            directory = Path(self.mktemp())
            directory.mkdir()
            variant = directory / f"{model}.vp"
            variant.write_text(choose_lines((PROOFS / f"{model}.vp").read_text(), names[1:]))
            for sessions, expected in results.items():
                command = ["verifpal", "verify", str(variant), "--sessions", str(sessions), "--result-code"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
                report = done.stdout + done.stderr
                self.assertEqual(done.returncode, 0, report)
                self.assertEqual(done.stdout.splitlines()[-1], expected, (names, sessions, report))

    def test_opening(self) -> None:
        self.check("opening")

    def test_frames(self) -> None:
        self.check("frames")

    def test_resume(self) -> None:
        self.check("resume")

    def test_codes(self) -> None:
        self.check("codes")

    def test_successor(self) -> None:
        self.check("successor")


class ListedTests(TestCase):
    """The models, the table of results and the page name the same things."""

    def test_every_name_of_a_model_is_given_in_a_search(self) -> None:
        for model in PROOFS.glob("*.vp"):
            names = set(re.findall(r"// (?:if|unless) (\w+)", model.read_text()))
            given = {name for searched in RESULTS if searched[0] == model.stem for name in searched[1:]}
            self.assertEqual(names, given, model.name)

    def test_the_page_lists_every_search(self) -> None:
        rows = re.findall(r"^\| `(\w+)\.vp` \| (.*?) \|", (PROOFS / "index.md").read_text(), re.MULTILINE)
        listed = {(model, *re.findall(r"`(\w+)`", names)) for model, names in rows}
        self.assertEqual(listed, set(RESULTS))
