"""The bounds of the siege."""

from __future__ import annotations

from dataclasses import replace

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.siege.verdict import Bounds, Measured, faults_of, percentile

HELD = Measured(
    p50=(0.001, 0.001),
    p99=(0.030, 0.089),
    connects=[0.1] * 98,
    refused=2,
    memory=(100 << 20, 900 << 20, 120 << 20),
    entity_load=1.0,
    enemy_load=0.3,
)


class VerdictTests(SynchronousTestCase):
    """A row fails at its bounds, and names what failed."""

    def faults(self, anchor: Measured | None = None, bounds: Bounds = Bounds(), **changes: object) -> list[str]:
        return faults_of(replace(HELD, **changes), bounds, anchor=anchor)  # type: ignore[arg-type]

    def test_figures_just_within_their_bounds_pass(self) -> None:
        self.assertEqual(self.faults(), [])

    def test_the_innocent_may_wait_three_times_as_long(self) -> None:
        self.assertEqual(self.faults(p99=(0.030, 0.091)), ["the innocent wait"])

    def test_short_waits_may_grow_by_the_noise_of_the_machine(self) -> None:
        self.assertEqual(self.faults(p99=(0.001, 0.050)), [])
        self.assertEqual(self.faults(p99=(0.001, 0.052)), ["the innocent wait"])

    def test_a_single_cut_of_an_innocent_client_fails(self) -> None:
        self.assertEqual(self.faults(cut=1), ["the innocent are cut off"])

    def test_two_newcomers_of_a_hundred_may_be_refused(self) -> None:
        self.assertEqual(self.faults(refused=3), ["newcomers are refused"])

    def test_a_row_fails_when_all_newcomers_wait(self) -> None:
        self.assertEqual(self.faults(connects=[1.1] * 98), ["newcomers wait"])
        self.assertEqual(self.faults(connects=[1.1] * 98, bounds=Bounds(connect_within=2.0)), [])

    def test_no_newcomer_at_all_is_a_fault(self) -> None:
        self.assertEqual(self.faults(connects=[], refused=0), ["newcomers wait"])

    def test_refusals_after_the_attack_fail(self) -> None:
        self.assertEqual(self.faults(shut_out=True), ["the innocent stay shut out"])

    def test_clients_must_work_after_the_attack(self) -> None:
        self.assertEqual(self.faults(went_on=2.0), [])
        self.assertEqual(self.faults(went_on=2.25), ["goes on when its enemy has left"])

    def test_memory_that_is_not_given_back(self) -> None:
        self.assertEqual(self.faults(memory=(100 << 20, 900 << 20, 145 << 20)), ["memory stays"])
        strict = Bounds(memory_slack=0)
        self.assertEqual(self.faults(memory=(100 << 20, 900 << 20, 121 << 20), bounds=strict), ["memory stays"])

    def test_an_attack_must_cost_the_attacker(self) -> None:
        self.assertEqual(self.faults(entity_load=1.0, enemy_load=0.2), ["costs the enemy too little"])
        self.assertEqual(self.faults(entity_load=1.0, enemy_load=0.2, honest_load=0.06), [])

    def test_data_may_cost_twice_what_honest_data_costs(self) -> None:
        honest = Measured(entity_load=0.9, enemy_load=0.3)
        self.assertEqual(self.faults(anchor=honest, entity_load=1.0, enemy_load=0.2), [])
        self.assertEqual(self.faults(anchor=honest, entity_load=1.0, enemy_load=0.15), ["costs the enemy too little"])

    def test_a_percentile_of_few_is_the_largest(self) -> None:
        self.assertEqual(percentile([3.0, 1.0, 2.0], 99), 3.0)
        self.assertEqual(percentile([3.0, 1.0, 2.0], 50), 2.0)
        self.assertEqual(percentile(list(range(200)), 99), 198)
