"""Bootstrap intervals: pooled values, seeds, and a known law."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3_lab.evaluation.bootstrap import (
    Interval,
    holm,
    mean_over_seeds,
    mean_ratio_interval,
    mean_speedup_interval,
    paired_difference,
    ratio_interval,
    ratio_intervals,
    speedup_interval,
)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_value_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    tau = ratio_interval([2, 30], [1, 10], seeded())
    assert tau.value == 32 / 11
    assert (tau.low, tau.high) == (2.0, 3.0)  # one prompt drawn twice, either way
    assert str(tau) == "2.91 [2.00, 3.00]"


def test_equal_token_counts_make_the_speed_up_a_ratio_of_total_times() -> None:
    speed = speedup_interval([50, 70], [1.0, 2.0], [50, 70], [3.0, 3.0], seeded())
    assert speed.value == pytest.approx(6.0 / 3.0)
    assert speed.low == pytest.approx(1.5) and speed.high == pytest.approx(3.0)


def test_unequal_token_counts_make_it_a_ratio_of_tokens_a_second() -> None:
    speed = speedup_interval([100], [2.0], [30], [3.0], seeded())
    assert speed.value == speed.low == speed.high == pytest.approx(50 / 10)


def test_the_same_seed_gives_the_same_interval() -> None:
    emitted, rounds = [5.0, 9.0, 4.0, 7.0], [2.0, 3.0, 2.0, 4.0]
    assert ratio_interval(emitted, rounds, seeded()) == ratio_interval(emitted, rounds, seeded())


def test_no_prompts_or_no_rounds_read_as_nan() -> None:
    assert math.isnan(ratio_interval([], [], seeded()).value)
    assert math.isnan(ratio_interval([0.0], [0.0], seeded()).value)


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same prompts in every column, got \[1, 1, 2, 1\]"):
        speedup_interval([1], [1.0], [1, 2], [1.0], seeded())


def test_the_interval_has_the_width_of_the_normal_law() -> None:
    """A mean of n unit-variance prompts has 95 % bounds at about 1.96 / sqrt(n)."""
    n = 400
    x = torch.randn(n, generator=seeded(), dtype=torch.float64) + 10
    interval = ratio_interval(x.tolist(), [1.0] * n, seeded())
    half = 1.96 * x.std().item() / math.sqrt(n)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.05)


def test_several_ratios_of_the_same_prompts_are_those_of_each_alone() -> None:
    columns = ([3.0, 1.0, 2.0], [1.0, 1.0, 4.0])
    both = ratio_intervals(columns, ([4.0, 2.0, 2.0], [5.0, 5.0, 5.0]), seeded())
    assert both == [
        ratio_interval(columns[0], [4.0, 2.0, 2.0], seeded()),
        ratio_interval(columns[1], [5.0, 5.0, 5.0], seeded()),
    ]
    assert ratio_intervals([], [], seeded()) == []
    with pytest.raises(ValueError, match="as many denominators as numerators"):
        ratio_intervals([[1.0]], [], seeded())


def test_a_mean_over_tasks_weighs_each_task_the_same_whatever_its_prompts() -> None:
    large, small = ([2] * 9, [1] * 9), ([4], [1])
    mean = mean_ratio_interval([large, small], seeded())
    assert (mean.value, mean.low, mean.high) == (3.0, 3.0, 3.0)  # pooled it would be 22 / 10
    fast, slow = ([8], [1.0], [8], [4.0]), ([8], [2.0], [8], [2.0])
    assert mean_speedup_interval([fast, slow], seeded()).value == pytest.approx((4 + 1) / 2)


def test_a_means_prompts_are_resampled_within_their_task() -> None:
    """Two tasks whose prompts agree among themselves have a mean without width, though the tasks differ."""
    mean = mean_ratio_interval([([1, 1, 1], [1, 1, 1]), ([5, 5, 5], [1, 1, 1])], seeded())
    assert (mean.low, mean.value, mean.high) == (3.0, 3.0, 3.0)
    spread = mean_ratio_interval([([1, 1, 1], [1, 1, 1]), ([4, 5, 6], [1, 1, 1])], seeded())
    assert (spread.low, spread.value, spread.high) == (2.5, 3.0, 3.5)


def test_the_mean_of_two_equal_tasks_is_narrower_than_either() -> None:
    x = (torch.rand(30, generator=seeded(), dtype=torch.float64) + 1).tolist()
    alone, mean = ratio_interval(x, [1.0] * 30, seeded()), mean_ratio_interval([(x, [1.0] * 30)] * 2, seeded())
    assert mean.value == pytest.approx(alone.value)
    assert (mean.high - mean.low) / (alone.high - alone.low) == pytest.approx(2**-0.5, rel=0.05)


def test_a_task_without_a_ratio_leaves_no_mean() -> None:
    assert math.isnan(mean_ratio_interval([([1.0], [1.0]), ([0.0], [0.0])], seeded()).value)
    with pytest.raises(ValueError, match="at least one task"):
        mean_ratio_interval([], seeded())


def test_a_paired_difference_is_that_of_a_hand_example() -> None:
    """Two prompts, two seeds: with prompt 1, 2 or both drawn the difference of means is known."""
    ours = [([4, 2], [2, 2]), ([6, 2], [2, 2])]  # ratios of sums over both: 6/4 and 8/4; mean 1.75
    base = [([2, 2], [2, 2])]  # 1 whatever is drawn
    found = paired_difference(ours, base, torch.Generator().manual_seed(0))
    assert found.interval.value == pytest.approx(0.75)
    assert (found.interval.low, found.interval.high) == (0.0, 1.5)  # prompt 2 twice: 1 - 1; prompt 1 twice: 2.5 - 1
    assert 0.45 < found.p < 0.55  # a quarter of the resamples is 0, on neither side: twice a quarter
    same = paired_difference(base, base, torch.Generator().manual_seed(0))
    assert (same.interval, same.p) == (Interval(0.0, 0.0, 0.0), 1.0)


def test_pairing_removes_what_is_hard_for_both() -> None:
    hard = [10, 40, 20, 80, 15, 60]
    ours, base = [([h + 1 for h in hard], [10] * 6)], [(hard, [10] * 6)]
    paired = paired_difference(ours, base, torch.Generator().manual_seed(0)).interval
    alone = mean_over_seeds(ours, torch.Generator().manual_seed(0))
    assert paired.low == pytest.approx(0.1) and paired.high == pytest.approx(0.1)
    assert alone.high - alone.low > 2


def test_holms_correction_is_that_of_a_hand_example() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
