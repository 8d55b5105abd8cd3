"""Inputs that fuzzing has found, run again by every run of the tests."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS


class CorpusTests(SynchronousTestCase):
    """Each target accepts its seeds and its corpus without an error."""

    def test_every_target_runs_its_corpus(self) -> None:
        begin = seeds()
        for name, target in TARGETS.items():
            paths = sorted((CORPUS / name).iterdir())
            self.assertTrue(paths, f"{name} has no corpus")
            for data in (*begin[name], *(path.read_bytes() for path in paths)):
                target(data)

    def test_the_corpus_has_only_known_targets(self) -> None:
        self.assertEqual({path.name for path in CORPUS.iterdir()}, set(TARGETS))
