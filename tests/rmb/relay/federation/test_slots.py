"""Choice of the next message for another relay."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.relay.federation.slots import (
    MAX_POSTS,
    MAX_POSTS_OF_ONE,
    MAX_QUICK_ANSWER,
    MAX_QUICK_OF_SENDER,
    MAX_SLOW_OF_SENDER,
    MAX_SLOW_POSTS,
    Slots,
)


def relays(name: object) -> frozenset[str]:
    return frozenset({f"relay {name}"})


class SlotsTests(SynchronousTestCase):
    """Slots called directly."""

    def setUp(self) -> None:
        self.slots: Slots[str] = Slots()

    def take_all(self) -> list[str]:
        taken = []
        while (item := self.slots.take()) is not None:
            taken.append(item)
        return taken

    def make_quick(self, name: str) -> None:
        self.slots.add(f"first to {name}", relays(name), 0)
        self.slots.finish(self.take_all()[0], MAX_QUICK_ANSWER)

    def test_silent_relays_of_a_sender_do_not_delay_other_senders(self) -> None:
        """Relays that answer have places of their own; so have other senders."""
        self.make_quick("good")
        for number in range(1000):
            self.slots.add(f"tarpit {number}", relays(number), 1)
        self.assertEqual(len(self.take_all()), MAX_SLOW_OF_SENDER)
        self.slots.add("to an unknown relay", relays("unknown"), 2)
        self.slots.add("to a good relay", relays("good"), 2)
        self.assertEqual(self.take_all(), ["to a good relay", "to an unknown relay"])

    def test_many_senders_with_silent_relays_leave_slots_free(self) -> None:
        self.make_quick("good")
        for number in range(1000):
            self.slots.add(f"tarpit {number}", relays(number), number)
        self.assertEqual(len(self.take_all()), MAX_SLOW_POSTS)
        for number in range(MAX_POSTS):
            self.slots.add(f"good {number}", relays("good"), 1)
        self.assertEqual(len(self.take_all()), MAX_POSTS_OF_ONE)
        # Other waiting messages take the places that become free.
        self.slots.finish("tarpit 0", None)
        self.assertEqual(self.take_all(), [f"tarpit {MAX_SLOW_POSTS}"])

    def test_a_sender_whose_relays_were_quick(self) -> None:
        """The relays then stop answering, under any number of names: other senders are served."""
        for number in range(300):
            self.make_quick(f"trap {number}")
        self.make_quick("good")
        for number in range(300):
            self.slots.add(f"trap {number}", relays(f"trap {number}"), 1)
        self.slots.add("good", relays("good"), 2)
        taken = self.take_all()
        self.assertEqual(len(taken), MAX_QUICK_OF_SENDER + 1)
        self.assertIn("good", taken[:2])
        # When a relay is no longer quick, its messages leave the quick queue.
        self.slots.add("again", relays("trap 0"), 3)
        self.slots.finish("trap 0", None)
        self.assertFalse(self.slots.is_quick(relays("trap 0")))
        self.assertEqual(set(self.take_all()), {"again", f"trap {MAX_QUICK_OF_SENDER}"})
        self.assertEqual(self.slots.take(), None)
        self.slots.release("again")
        self.assertIsNone(self.slots.take())

    def test_relays_that_fail_are_shared(self) -> None:
        """A sender has its turn there however much another waits with."""
        for number in range(100):
            self.slots.add(f"many {number}", relays("bad"), 1)
        taken = self.take_all()
        self.slots.add("one", relays("bad"), 2)
        self.assertEqual(self.take_all(), [])
        for item in taken:
            self.slots.finish(item, None)
        seen = self.take_all()
        while "one" not in seen:
            self.slots.finish(seen[-1], None)
            seen += self.take_all()
        self.assertLessEqual(len(seen), 3)

    def test_a_silent_relay_has_a_single_attempt(self) -> None:
        for number in range(100):
            self.slots.add(str(number), relays("away"), 1)
        taken = self.take_all()
        self.assertEqual(len(taken), MAX_POSTS_OF_ONE)
        for item in taken[:-1]:
            self.slots.finish(item, None)
            self.assertEqual(self.take_all(), [])
        self.slots.finish(taken[-1], None)
        after = self.take_all()
        self.assertEqual(len(after), 1)
        # The relay answers, though late.
        self.slots.finish(after[0], MAX_QUICK_ANSWER + 1)
        self.assertEqual(len(self.take_all()), MAX_POSTS_OF_ONE)

    def test_a_relay_that_becomes_slow_loses_slots(self) -> None:
        self.make_quick("good")
        for number in range(MAX_SLOW_OF_SENDER):
            self.slots.add(f"tarpit {number}", relays(number), 1)
        self.take_all()
        self.slots.add("quick", relays("good"), 1)
        self.assertEqual(self.take_all(), ["quick"])
        self.slots.finish("quick", MAX_QUICK_ANSWER + 1)
        self.slots.add("slow", relays("good"), 1)
        self.assertEqual(self.take_all(), [])
        self.slots.release("tarpit 0")
        self.assertEqual(self.take_all(), ["slow"])

    def test_senders_take_turns(self) -> None:
        for number in range(MAX_SLOW_POSTS):
            self.slots.add(f"many {number}", relays(number % 7), 1)
        self.slots.add("one", relays("x"), 2)
        self.assertIn("one", self.take_all()[:2])

    def test_an_item_whose_attempt_is_under_way_is_passed_over(self) -> None:
        for item in ("twice", "twice", "other"):
            self.slots.add(item, relays("a"), 1)
        self.assertEqual(self.take_all(), ["twice", "other"])

    def test_the_end_of_an_attempt_lets_one_waiting_item_be_examined(self) -> None:
        """Examining all of them each time would take a time quadratic in their number."""
        examined: list[str] = []
        add = self.slots.add

        def count(item: str, to: frozenset[str], sender: int) -> None:
            examined.append(item)
            add(item, to, sender)

        for number in range(100):
            self.slots.add(f"same relays {number}", relays("a"), number)
        for number in range(100):
            self.slots.add(f"same sender {number}", relays(number), 1000)
        self.take_all()
        self.patch(self.slots, "add", count)
        for ended, waits in (("same relays 0", "same relays"), ("same sender 0", "same sender")):
            examined.clear()
            self.slots.finish(ended, MAX_QUICK_ANSWER + 1)
            self.assertEqual(len(examined), 1)
            self.assertEqual(self.take_all(), examined)
            self.assertTrue(examined[0].startswith(waits))

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["add", "take", "quick", "late", "none", "cancel"]),
                st.integers(0, 40),
                st.integers(0, 3),
            ),
            max_size=300,
        )
    )
    def test_every_message_has_exactly_a_single_attempt(self, steps: list[tuple[str, int, int]]) -> None:
        """The limits hold in any order of events, and in the end every message has had its attempt."""
        slots: Slots[int] = Slots()
        added = 0
        running: dict[int, frozenset[str]] = {}
        to: dict[int, frozenset[str]] = {}
        taken: list[int] = []

        def take() -> bool:
            item = slots.take()
            if item is not None:
                running[item] = to[item]
                taken.append(item)
            return item is not None

        def end(what: str) -> None:
            item, _ = running.popitem()
            if what == "cancel":
                slots.release(item)
            else:
                slots.finish(item, {"quick": 0.1, "late": MAX_QUICK_ANSWER * 2, "none": None}[what])

        for what, number, sender in steps:
            if what == "add":
                to[added] = relays(number)
                slots.add(added, to[added], sender)
                added += 1
            elif what == "take":
                take()
            elif running:
                end(what)
            self.assertLessEqual(len(running), MAX_POSTS)
            for one in set(running.values()):
                self.assertLessEqual(list(running.values()).count(one), MAX_POSTS_OF_ONE)
        while take() or running:
            if not take():
                end("quick")
        self.assertEqual(sorted(taken), list(range(added)))
