"""Where a fresh draft's output begins: logits of the size that a distribution needs, whatever target it is made for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_core.model.draft import DFlashDraft


@torch.no_grad()
def calibrate_final_norm(draft: DFlashDraft, head_VD: Tensor) -> DFlashDraft:
    """Set the final norm of a fresh draft so that its logits begin with a standard deviation of about 1; returns the draft.

    A final state is w x with a root mean square of x of 1, so that its logit for row v of the head varies by w |head_v|. The
    rows of an untied head have a norm of about 1, but those of an embedding that is the head, too, have whatever the target
    was trained to: SmolLM2 begins at a loss of 38 nats with w = 1. Hence w = 1 / rms_v |head_v|. A head of zeros, or one
    that is not finite, leaves the norm as it is.
    """
    row_norms_V = torch.linalg.vector_norm(head_VD, dim=1, dtype=torch.float32)
    rms = float(row_norms_V.double().square().mean().sqrt())
    if math.isfinite(rms) and rms > 0:
        draft.norm.weight.fill_(1.0 / rms)
    return draft
