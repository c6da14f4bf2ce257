"""The slowest of many ranks against brute force, and the share of useful time against a simulated run."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.plan.machine import Machine, Quantity, Variation, load_machine
from halocline.simulate import ScenarioError
from halocline.simulate.long_run import daly_interval, long_run, staging, useful_share
from halocline.simulate.variation import slowest

SUMMIT = load_machine("summit")


def machine(spread: float, host_us: float, shared: float | None) -> Machine:
    def known(value: float) -> Quantity:
        return Quantity(value=value, source="measured")

    variation = Variation(
        device_spread=known(spread), host_us=known(host_us), shared=None if shared is None else known(shared)
    )
    return SUMMIT.model_copy(update={"variation": variation})


@pytest.mark.parametrize("ranks", [1, 7, 1_000])
@pytest.mark.parametrize(
    ("spread", "host_us", "shared"), [(0.015, 500, None), (0.001, 4_000, None), (0.02, 100, 0.035)]
)
def test_the_slowest_of_many_is_that_of_brute_force(
    ranks: int, spread: float, host_us: float, shared: float | None
) -> None:
    compute = 0.2
    generator = np.random.default_rng(5)
    shape = (3_000, ranks)
    delays = generator.normal(0, spread * compute, shape) + generator.exponential(host_us * 1e-6, shape)
    if shared is not None:
        delays += generator.exponential(shared * compute, shape)
    expected = delays.max(1)
    found = slowest(machine(spread, host_us, shared), compute, ranks, steps=3_000)
    noise = 4 * expected.std() / np.sqrt(3_000)
    assert abs(found.mean - expected.mean()) < noise
    assert found.band == pytest.approx(np.percentile(expected, (5, 95)), abs=4 * noise)


def test_seeds_change_samples_and_hardly_the_mean() -> None:
    first, again, other = (slowest(SUMMIT, 0.3, 27_600, seed) for seed in (1, 1, 2))
    assert (first.samples == again.samples).all() and (first.samples != other.samples).any()
    assert first.mean == pytest.approx(other.mean, rel=0.01)


def test_cpu_ranks_without_a_variation_have_no_stragglers_and_gpus_have() -> None:
    device = SUMMIT.device.model_copy(update={"kind": "cpu"})
    assert slowest(SUMMIT.model_copy(update={"variation": None, "device": device}), 1.0, 100).mean == 0.0
    assert slowest(SUMMIT.model_copy(update={"variation": None}), 1.0, 100).mean > 0.02


def simulated_share(interval: float, checkpoint: float, mtbf: float, restart: float) -> float:
    """Useful time over all time, of a run that fails at random moments."""
    generator, now, useful = np.random.default_rng(3), 0.0, 0.0
    failure = generator.exponential(mtbf)
    while now < 6_000 * mtbf:
        if now + interval + checkpoint <= failure:
            now, useful = now + interval + checkpoint, useful + interval
            continue
        now = failure
        while True:  # a restart may fail, too
            failure = now + generator.exponential(mtbf)
            if now + restart <= failure:
                now += restart
                break
            now = failure
    return useful / now


@pytest.mark.parametrize(("interval", "checkpoint", "mtbf", "restart"), [(500, 20, 5_000, 100), (900, 200, 3_000, 400)])
def test_the_useful_share_is_that_of_a_run_that_fails(
    interval: float, checkpoint: float, mtbf: float, restart: float
) -> None:
    expected = simulated_share(interval, checkpoint, mtbf, restart)
    assert useful_share(interval, checkpoint, mtbf, restart) == pytest.approx(expected, rel=0.02)


def test_the_interval_is_the_best() -> None:
    best = daly_interval(60.0, 7_200.0)
    shares = {factor: useful_share(factor * best, 60.0, 7_200.0, 300.0) for factor in (0.5, 0.9, 1.0, 1.1, 2.0)}
    assert max(shares.values()) - shares[1.0] < 1e-4
    assert shares[1.0] > shares[0.5] and shares[1.0] > shares[2.0]


def test_more_nodes_fail_more_often() -> None:
    small, large = (long_run(SUMMIT, devices, 10**9) for devices in (600, 27_600))
    assert small.mtbf_s / large.mtbf_s == pytest.approx(46)
    assert large.useful < small.useful < 1
    with pytest.raises(ScenarioError, match="above zero"):
        long_run(SUMMIT, 6, 10**9, -1.0)


def test_staging_reads_each_byte_once_and_then_exchanges() -> None:
    dataset, wanted = 3.5e12, 84e9  # a climate dataset, and 1,500 of its samples on each of 1,024 nodes
    staged = staging(SUMMIT, 6 * 1_024, dataset, wanted)
    assert staged.naive_s == pytest.approx(1_024 * wanted / 2.5e12)
    assert staged.shared_s == pytest.approx(dataset / 2.5e12 + wanted / 23e9)
    assert staged.shared_s < staged.naive_s
    with pytest.raises(ScenarioError, match="half a petabyte"):
        staging(SUMMIT, 6, 0.0)
