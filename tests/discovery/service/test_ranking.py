"""The signed ranking: which rankings are valid, and their effect on answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.service.ranking import CHECK_INTERVAL, RankingError, RankingFile, read_ranking, sign_ranking
from dmsg.keys import SecKey

OPERATOR, OTHER = (SecKey.from_seed(bytes([number])) for number in (1, 2))
SERVERS = [SecKey.from_seed(bytes([number])).public.hex() for number in (3, 4, 5)]
NOW = 1_800_000_000
NAMES = st.sampled_from(["signature", "servers", "valid_until", "generated_at", "static"])
DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner)
).map(lambda value: json.dumps(value).encode())


def ranked(*weights: float) -> list[dict[str, Any]]:
    return [{"static": key, "weight": weight, "reasons": []} for key, weight in zip(SERVERS, weights, strict=False)]


class SignatureTests(SynchronousTestCase):
    """The file."""

    def test_a_signed_ranking_is_read(self) -> None:
        ranking = read_ranking(sign_ranking(ranked(1, 0.5), OPERATOR, NOW, NOW + 60), OPERATOR.public)
        self.assertEqual(ranking.weights, {SERVERS[0]: 1.0, SERVERS[1]: 0.5})
        self.assertEqual((ranking.generated_at, ranking.valid_until), (NOW, NOW + 60))

    def test_layout_does_not_matter(self) -> None:
        data = json.loads(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        read_ranking(json.dumps(data, indent=7).encode(), OPERATOR.public)

    def test_a_ranking_of_another_key_is_refused(self) -> None:
        data = sign_ranking(ranked(1), OTHER, NOW, NOW + 60)
        self.assertRaisesRegex(RankingError, "not signed", read_ranking, data, OPERATOR.public)

    def test_a_changed_ranking_is_refused(self) -> None:
        for name, value in (
            ("valid_until", NOW + 10**6),
            ("generated_at", NOW + 1),
            ("operator", OTHER.public.hex()),
            ("servers", ranked(2)),
            ("extra", 1),
        ):
            data = json.loads(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
            data[name] = value
            self.assertRaises(RankingError, read_ranking, json.dumps(data).encode(), OPERATOR.public)

    def test_weights_have_bounds(self) -> None:
        for weight in (0, -1, 1e9, float("nan"), float("inf")):
            data = sign_ranking(ranked(weight), OPERATOR, NOW, NOW + 60)
            self.assertRaises(RankingError, read_ranking, data, OPERATOR.public)

    @given(st.one_of(st.binary(), DOCUMENTS))
    def test_random_files_raise_only_ranking_errors(self, data: bytes) -> None:
        self.assertRaises(RankingError, read_ranking, data, OPERATOR.public)


class FileTests(SynchronousTestCase):
    """The ranking file is watched for changes."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.clock = Clock()
        self.file = RankingFile(self.path, OPERATOR.public, Random(1))
        self.file.watch(self.clock)
        self.addCleanup(self.file.stop)

    def write(self, data: bytes) -> None:
        self.path.write_bytes(data)
        os.utime(self.path, ns=(0, int(self.clock.seconds() * 10**9)))
        self.clock.advance(CHECK_INTERVAL)

    def test_a_ranking_file_is_read_when_it_changes(self) -> None:
        self.assertIsNone(self.file.current(NOW))
        self.write(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        self.assertEqual(len(self.file.current(NOW).weights), 1)  # type: ignore[union-attr]
        self.write(sign_ranking(ranked(1, 2), OPERATOR, NOW, NOW + 60))
        self.assertEqual(len(self.file.current(NOW).weights), 2)  # type: ignore[union-attr]
        self.write(sign_ranking(ranked(1, 2), OTHER, NOW, NOW + 60))
        self.assertIsNone(self.file.current(NOW))
        self.write(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        self.path.unlink()
        self.clock.advance(CHECK_INTERVAL)
        self.assertIsNone(self.file.current(NOW))

    def test_a_stale_ranking_is_ignored(self) -> None:
        self.write(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        self.assertIsNotNone(self.file.current(NOW + 59))
        self.assertIsNone(self.file.current(NOW + 60))
        self.assertIsNone(self.file.current(NOW - 3600))

    def test_servers_are_drawn_by_weight(self) -> None:
        self.write(sign_ranking(ranked(1, 0.1, 0.01), OPERATOR, NOW, NOW + 60))
        bodies = [json.dumps({"static": key}).encode() for key in SERVERS]
        first = Counter(self.file.choose(bodies, 1, NOW)[0] for _ in range(3000))
        for body, share in zip(bodies, (0.901, 0.090, 0.009), strict=True):
            self.assertLess(abs(first[body] / 3000 - share), 0.03)

    def test_unranked_servers_have_the_least_weight(self) -> None:
        """Anybody can start many unranked servers."""
        self.write(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        strangers = [json.dumps({"static": f"{number:066x}"}).encode() for number in range(500)]
        bodies = [json.dumps({"static": SERVERS[0]}).encode(), *strangers]
        first = Counter(self.file.choose(bodies, 1, NOW)[0] for _ in range(1000))
        self.assertLess(abs(first[bodies[0]] / 1000 - 1 / 1.5), 0.05)

    def test_a_part_of_the_ranking_is_drawn(self) -> None:
        self.assertEqual(self.file.draw(2, NOW), [])
        self.write(sign_ranking(ranked(1, 1, 0.001), OPERATOR, NOW, NOW + 60))
        self.assertEqual(set(self.file.draw(10, NOW)), set(SERVERS))
        drawn = Counter(key for _ in range(1000) for key in self.file.draw(2, NOW))
        self.assertLess(drawn[SERVERS[2]], 20)

    def test_ranking_neither_adds_nor_removes_servers(self) -> None:
        self.write(sign_ranking(ranked(1), OPERATOR, NOW, NOW + 60))
        bodies = [json.dumps({"static": key}).encode() for key in SERVERS[1:]]
        self.assertEqual(sorted(self.file.choose(bodies, 10, NOW)), sorted(bodies))
