"""Training in units of the features' channels: the same as training on scaled features, for a draft that takes raw ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dflash_core.model.initialise import calibrate_context
from dflash_core.training.feature_scale import SMALLEST_SHARE, divide_gradient, measure_feature_scale, scaled_step

SCALE_F = torch.tensor([1800.0, 16.0, 1.0, 0.2, 5.0])


def trained(inputs: Tensor, weight: Tensor, scale_F: Tensor | None, clip: float, decay: float = 0.0) -> Tensor:
    """A linear layer and a norm after five AdamW steps of a made-up loss."""
    layer = nn.Linear(5, 3, bias=False)
    layer.weight.data.copy_(weight)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=decay, eps=1e-12)
    for step in range(5):
        optimizer.zero_grad()
        out = layer(inputs)
        (out / out.pow(2).mean(-1, keepdim=True).sqrt()).sub(torch.arange(3.0) + step).pow(2).sum().backward()
        if scale_F is not None:
            divide_gradient(layer.weight, scale_F)
        nn.utils.clip_grad_norm_(layer.parameters(), clip)
        with scaled_step(layer.weight, scale_F, 0.05 * decay):
            optimizer.step()
    return layer.weight.detach()


@pytest.mark.parametrize("clip", [1e9, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_scaled_step_is_a_step_on_scaled_features(clip: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 5, generator=generator) * SCALE_F
    weight = torch.randn(3, 5, generator=generator)
    on_scaled = trained(features / SCALE_F, weight, None, clip, decay)
    on_raw = trained(features, weight / SCALE_F, SCALE_F, clip, decay)
    torch.testing.assert_close(on_raw * SCALE_F, on_scaled, rtol=1e-4, atol=1e-5)
    plain = trained(features, weight / SCALE_F, None, clip, decay)
    assert not torch.allclose(plain * SCALE_F, on_scaled, rtol=0.1, atol=0.1)  # else this test could not fail


class FakeTarget:
    """States that are the token's number times the channel's scale, with one column of something else behind them."""

    layer_ids = (0,)

    class shape:
        hidden_size = 5

    def __init__(self, scale_F: Tensor) -> None:
        self.scale_F = scale_F
        self.lengths: list[int] = []

    def features(self, tokens_1S: Tensor) -> Tensor:
        self.lengths.append(tokens_1S.shape[1])
        states = tokens_1S.float().unsqueeze(-1) * self.scale_F
        return torch.cat([states, torch.full_like(states[..., :1], 1e9)], dim=-1)


class FakeDataset:
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row) for row in rows])

    def check_files(self, places: list[int]) -> None:
        assert places == sorted(set(places))

    def tokens(self, index: int) -> tuple[Any, Any]:
        return np.array(self.rows[index], dtype=np.int32), None


def measure(scale_F: Tensor, rows: list[list[int]]) -> tuple[Tensor, FakeTarget]:
    target: Any = FakeTarget(scale_F)
    dataset: Any = FakeDataset(rows)
    return measure_feature_scale(target, dataset), target


def test_the_scale_is_the_root_mean_square_over_tokens_of_the_taps_alone() -> None:
    scale, target = measure(SCALE_F, [[3, 4], [0]])
    torch.testing.assert_close(scale, SCALE_F * (25 / 3) ** 0.5)
    assert target.lengths == [2, 1]


def test_few_sequences_are_spread_over_a_large_dataset_and_long_ones_are_cut() -> None:
    rows = [[i + 1] * 300 for i in range(1000)]
    scale, target = measure(torch.ones(5), rows)
    assert target.lengths == [256] * 16
    assert 500 < float(scale[0]) < 700  # the root mean square of 1 to 1000 is 578


@pytest.mark.parametrize("bad", [0.0, 1e-30])
def test_a_channel_that_is_always_nearly_zero_is_not_blown_up(bad: float) -> None:
    scale, _ = measure(torch.tensor([bad, 1.0, 1.0, 1.0, 4.0]), [[2]])
    torch.testing.assert_close(scale, torch.tensor([2 * SMALLEST_SHARE, 2.0, 2.0, 2.0, 8.0]))


def test_states_that_are_all_zero_or_not_finite_leave_the_scale_at_one() -> None:
    torch.testing.assert_close(measure(torch.zeros(5), [[2]])[0], torch.ones(5))
    scale, _ = measure(torch.tensor([float("nan"), 1.0, 1.0, 1.0, 1.0]), [[2]])
    assert scale[0] == 1.0


def test_a_calibrated_context_shows_every_channel_alike() -> None:
    class Draft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 64, bias=False)

    draft: Any = Draft()
    columns = draft.fc.weight.detach().clone()
    calibrate_context(draft, SCALE_F)
    torch.testing.assert_close(draft.fc.weight.detach() * SCALE_F, columns)


@pytest.mark.slow
def test_cells_take_what_the_first_one_has(tmp_path: Any) -> None:
    """Two cells that begin with other numbers."""
    import subprocess
    import sys

    program = tmp_path / "cell.py"
    program.write_text(
        "import sys, torch\n"
        "from dflash_core.training.distributed import CellGroup\n"
        "group = CellGroup.from_environment('cpu', 60.0)\n"
        "weight = torch.nn.Parameter(torch.full((3,), float(group.rank)))\n"
        "scale = torch.arange(2.0) + 10 * group.rank\n"
        "group.share_from_first([weight, scale])\n"
        "sys.stdout.write(f'{weight.tolist()} {scale.tolist()}\\n')\n"
        "group.close()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.0, 0.0, 0.0] [0.0, 1.0]"] * 2
