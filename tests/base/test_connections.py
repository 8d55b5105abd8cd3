"""Connections by key, against a list."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.connections import Connections

MOST = 3


@dataclass(eq=False)
class Connection:
    """Connection for the table."""

    key: bytes
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0


class ConnectionsTests(SynchronousTestCase):
    """Connections that open and close in any order."""

    @given(
        st.lists(st.tuples(st.sampled_from(("come", "go", "end")), st.integers(0, 2), st.integers(0, 7)), max_size=60)
    )
    def test_counts_hold_over_random_connects_and_disconnects(self, steps: list[tuple[str, int, int]]) -> None:
        table: Connections[Connection] = Connections(MOST)
        there: list[Connection] = []
        frames = 0
        for act, key, which in steps:
            if act == "come":
                one = Connection(bytes([key]), frames_in=which, bytes_in=10 * which)
                there.append(one)
                frames += which
                too_many = table.add(one)
                same = [other for other in there if other.key == one.key]
                going_on = [other for other in same if not other.closing]
                self.assertIs(too_many, going_on[0] if len(same) > MOST else None)
                if too_many is not None:
                    too_many.closing = True
            elif there and act == "go":
                table.remove(there.pop(which % len(there)))
            elif there:
                there[which % len(there)].closing = True
            table.check()
            self.assertEqual(list(table.all), there)
            self.assertEqual(table.newest, {one.key: one for one in there})
            self.assertEqual((table.frames, table.frame_bytes), (frames, 10 * frames))
            for number in range(3):
                self.assertEqual(
                    list(table.of_key(bytes([number]))), [one for one in there if one.key == bytes([number])]
                )

    def test_removing_an_unknown_connection_is_an_error(self) -> None:
        table: Connections[Connection] = Connections(MOST)
        self.assertRaises(KeyError, table.remove, Connection(b"a"))
