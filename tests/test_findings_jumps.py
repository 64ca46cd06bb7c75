"""Jumps of a curve: what noise and hard batches do is none, and several moments are believed of which none would be alone."""

from __future__ import annotations

import numpy as np

from dflash_core.analysis.findings.jumps import recurrent_jumps, upward_jumps
from dflash_core.analysis.series import FloatArray


def course(num_steps: int, noise: FloatArray) -> FloatArray:
    t = np.arange(num_steps)
    return np.asarray(1.0 + 15 * np.exp(-t / 3) + 2 * np.exp(-t / (num_steps / 4)) + noise)


def clear(values: FloatArray) -> list[int]:
    return [one.at for one in upward_jumps(values) if one.is_clear]


def test_single_steps_far_up_are_no_resets() -> None:
    """A step of one hard sequence now and then, up by 3 to 8 standard deviations, two of them close to each other."""
    rng = np.random.default_rng(3)
    values = course(600, rng.normal(0, 0.2, 600))
    at = rng.choice(np.arange(100, 580), 12, replace=False)
    values[at] += rng.uniform(0.6, 1.6, 12)
    values[[400, 402]] += 1.5
    assert clear(values) == []


def test_three_decaying_jumps_are_seen_of_which_none_is_clear() -> None:
    """Of 1.5 nats in noise of 0.2, in 170 steps: mostly all of them, and nothing else."""
    places, t, seen = np.array([55, 97, 146]), np.arange(170), []
    for seed in range(12):
        values = course(170, np.random.default_rng(seed).normal(0, 0.2, 170))
        for start in places:
            values += np.where(t >= start, 1.5 * np.exp(-(t - start) / 6), 0.0)
        found = clear(values)
        assert all(np.abs(at - places).min() <= 2 for at in found)
        seen.append(len(found))
    assert sum(seen) >= 18 and seen.count(0) <= 4, seen


def test_noise_of_any_kind_has_none() -> None:
    found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        shocks, noise = rng.standard_t(4, 150) if seed % 2 else rng.normal(size=150), np.zeros(150)
        for i in range(1, 150):
            noise[i] = 0.5 * noise[i - 1] + 0.87 * shocks[i]
        found += len(clear(course(150, 0.2 * noise)))
    assert found == 0


def test_a_skipped_step_does_not_hide_what_recurs() -> None:
    events, t = np.arange(25, 200, 25), np.arange(200)
    values = course(200, np.random.default_rng(0).normal(0, 0.05, 200))
    for start in events:
        values += np.where((t >= start) & (t < start + 3), 0.4, 0.0)
    whole = [one.at for one in recurrent_jumps(values, events)]
    values[[60, 110]] = np.nan, np.inf
    assert len(whole) >= 6 and [one.at for one in recurrent_jumps(values, events)] == whole
    values[::5] = np.nan
    assert recurrent_jumps(values, events) == []
