"""How large the channels of a target's tapped states are, and an optimizer step of `fc` in which that does not matter.

The channels differ by orders of magnitude (SmolLM2: a median of 1 in its first tap and 16 in its last, single channels of
1,800). An Adam step changes every weight by about the learning rate, and so moves the context by that times the channel's
size: a rate that suits most channels is far too high for the large ones, and their noise drowns the others. The remedy is
to train the weight of the features divided by their scale s. That draft is the same function: fc = fc' / s. Here it is done
in the units of the exported weight: the gradient of fc' is that of fc divided by s, and a step of fc' is one of fc divided
by s. Checkpoints and exports are not concerned.

Shapes: F features (taps x hidden).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dflash_core.data import Dataset
from dflash_core.model.target import FrozenTarget

NUM_SEQUENCES, MOST_TOKENS = 16, 256
# Channels that are nearly always 0 are not blown up: no channel counts as smaller than this share of the median one.
SMALLEST_SHARE = 1e-2


@torch.inference_mode()
def measure_feature_scale(target: FrozenTarget, dataset: Dataset) -> Tensor:
    """Root mean square of every channel of the tapped states over some sequences of the dataset: [F], fp32, on the CPU.

    The sequences are spread evenly over the dataset and run one by one, so that the same dataset and target give the same
    numbers whenever a run is begun or resumed, and in every cell.
    """
    width = len(target.layer_ids) * target.shape.hidden_size
    squares, count = torch.zeros(width, dtype=torch.float64), 0
    places = np.unique(np.linspace(0, len(dataset.lengths) - 1, NUM_SEQUENCES).astype(int)).tolist()
    dataset.check_files(places)
    for index in places:
        tokens, _ = dataset.tokens(index)
        features = target.features(torch.from_numpy(tokens[:MOST_TOKENS].astype(np.int64)).unsqueeze(0))[0, :, :width]
        squares += features.double().square().sum(0).cpu()
        count += len(features)
    scale = (squares / max(1, count)).sqrt()
    smallest = SMALLEST_SHARE * float(scale.median())
    return torch.where(scale.isfinite(), scale.clamp(min=smallest), 1.0).float() if smallest > 0 else torch.ones(width)


def divide_gradient(weight: Tensor, scale_F: Tensor) -> None:
    """Make the gradient of `fc` that of its scaled form. Before gradients are measured and clipped."""
    if weight.grad is not None:
        weight.grad.div_(scale_F)


@contextmanager
def scaled_step(weight: Tensor, scale_F: Tensor | None, decay: float) -> Iterator[None]:
    """Divide the change that the optimizer makes to `weight` inside by the scale; without one it is left alone.

    `decay` is the share of the weight that the optimizer takes away by itself (learning rate x weight decay), which is the
    same in both forms.
    """
    if scale_F is None:
        yield
        return
    decayed = weight.detach() * (1 - decay)
    yield
    with torch.no_grad():
        weight.copy_(decayed + (weight - decayed) / scale_F)
