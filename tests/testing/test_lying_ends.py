"""Ends of streams that break the protocol. The other end notices each lie."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.streams.core.resumption import ResumableEnd
from dmsg.streams.core.secure import SecureEnd
from dmsg.testing.lab import Lab
from dmsg.testing.lying_ends import KINDS, LyingEnds
from dmsg.testing.promise import PromiseBroken
from tests.support import Accepting


class LyingEndsTests(SynchronousTestCase):
    """A lying end, and a client that it attacks."""

    def setUp(self) -> None:
        self.lab = Lab(7)
        self.lab.add_server("harbour")
        self.victim = self.lab.add_client("victim", min_servers=1)
        self.ends = LyingEnds(self.lab, "harbour", self.victim)
        self.lab.settle()

    def test_each_lie_is_noticed_and_ends_only_its_stream(self) -> None:
        mallory = self.lab.clients["mallory"]
        accepting = Accepting()
        self.victim.listen(accepting, 10)
        honest: Any = self.lab.result(mallory.connect(self.victim.public_key, Accepting(), 10))
        for number, kind in enumerate(KINDS):
            self.assertTrue(self.ends.tell(kind, number), kind)
        self.lab.result(honest.transport.send(b"still here"))
        self.assertEqual(accepting.built[0].data, b"still here")

    def test_a_victim_that_compares_no_hashes_is_found(self) -> None:
        def trust(end: ResumableEnd, rolling: Any, position: int) -> bytes:
            # The hash of the other end is taken as correct, whatever it is.
            return _Equal(digest(end, rolling, position))

        digest = ResumableEnd._digest
        self.patch(SecureEnd, "_digest", trust)
        for kind in ("wrong hash in an ACK", "wrong hash in a RESUME"):
            error = self.assertRaises(PromiseBroken, self.ends.tell, kind, 1)
            self.assertIn(f"an end believed the lie of the other end: {kind}", str(error))

    def test_a_victim_that_accepts_a_used_generation_is_found(self) -> None:
        find = self.victim.streams.find_offered

        def forget(resume: Any, remote: Any) -> Any:
            stream = self.victim.streams._live.get(resume.token)
            if stream is not None:
                stream.secure_end.generation = -1
            return find(resume, remote)

        self.patch(self.victim.streams, "find_offered", forget)
        error = self.assertRaises(PromiseBroken, self.ends.tell, "used generation", 1)
        self.assertIn("an end accepted a request that it must refuse: used generation", str(error))


class _Equal(bytes):
    """Bytes that are equal to all bytes, and whose parts are."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __getitem__(self, key: Any) -> Any:
        return _Equal(super().__getitem__(key))
