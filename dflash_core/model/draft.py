"""The DFlash draft network (docs/field.md 1).

Queries come from the block states alone; keys and values come from the context (the target's tapped states, projected
once) and from the block, through the same projections. A query of anchor `a` sees context positions strictly before
`a` and every slot of its own block, nothing else; in a sliding layer only those near it. The rule and the ways to attend by
it are in `attention.py`; CUDA devices take `attention_flex.py` where it runs.

In a packed row a query sees its own document's context alone, and positions count from the document's start.

Shapes: R rows, S context positions, A anchors, K slots of a block, D hidden, T taps, N query heads, M key-value heads,
E head dimension. The embedding and the head are the target's and are not part of this module.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_core.model.attention import (
    ANCHORS_PER_GROUP,
    Attend,
    KeyValue,
    anchor_groups,
    group_size,
    grouped_attention,
)
from dflash_core.model.attention_flex import (
    FEWEST_QUERIES,
    UNCOMPILED_FLEX,
    compiled_flex,
    flex_attention_of_blocks,
    flex_works,
    sparse_mask,
)
from dflash_core.model.documents import Documents, Windows
from dflash_core.model.spec import DraftSpec

__all__ = [
    "ANCHORS_PER_GROUP", "AttentionPath", "DFlashDraft", "DraftAttention", "DraftLayer", "DraftMLP", "KeyValue", "RMSNorm",
    "anchor_groups", "attention_path", "embed_blocks", "group_size", "rotary_angles", "rotate",
]  # fmt: skip

AttentionPath = Literal["grouped", "flex", "flex_uncompiled"]


def attention_path(spec: DraftSpec, device: torch.device, dtype: torch.dtype, num_queries: int) -> AttentionPath:
    """How `num_queries` block positions of a row attend on a device: FlexAttention on CUDA where it runs and there are many."""
    if device.type != "cuda" or num_queries < FEWEST_QUERIES:
        return "grouped"
    return "flex" if flex_works(device, spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype) else "grouped"


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, the mean taken in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [..., head_dim], fp32, for integer positions [...]; the halves of the head are rotated as one pair."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float().unsqueeze(-1) * (theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., E] with cos and sin that broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class DraftAttention(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def key_value(self, x_RLD: Tensor, cos_RLE: Tensor, sin_RLE: Tensor) -> KeyValue:
        """Keys and values of L positions, context or block alike."""
        heads = (*x_RLD.shape[:2], self.num_kv_heads, self.head_dim)
        key = rotate(self.k_norm(self.k_proj(x_RLD).view(heads)).transpose(1, 2), cos_RLE.unsqueeze(1), sin_RLE.unsqueeze(1))
        return KeyValue(key, self.v_proj(x_RLD).view(heads).transpose(1, 2))

    def forward(self, x_RAKD: Tensor, context: KeyValue, attend: Attend, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention output [R, A, K, D]; `attend` knows what each query sees."""
        rows, anchors, slots, _ = x_RAKD.shape
        e, flat = self.head_dim, (rows, anchors * slots)
        cos, sin = cos.view(*flat, e), sin.view(*flat, e)
        x = x_RAKD.reshape(*flat, -1)
        query = self.q_norm(self.q_proj(x).view(*flat, self.num_heads, e)).transpose(1, 2)
        query = rotate(query, cos.unsqueeze(1), sin.unsqueeze(1))
        mixed = attend(query, context, self.key_value(x, cos, sin))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, anchors, slots, self.num_heads * e))
        return out


class DraftMLP(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Pre-norm attention and SwiGLU. The context enters without `input_layernorm`."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = DraftAttention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = DraftMLP(spec)

    def forward(self, x_RAKD: Tensor, context: KeyValue, attend: Attend, cos: Tensor, sin: Tensor) -> Tensor:
        x_RAKD = x_RAKD + self.self_attn(self.input_layernorm(x_RAKD), context, attend, cos, sin)
        out: Tensor = x_RAKD + self.mlp(self.post_attention_layernorm(x_RAKD))
        return out


class DFlashDraft(nn.Module):
    """The trained model. Parameter names are those of the z-lab export.

    Args:
        attention: the way to attend; None: what `attention_path` says of each call.
    """

    def __init__(self, spec: DraftSpec, attention: AttentionPath | None = None) -> None:
        super().__init__()
        self.spec, self.attention = spec, attention
        taps = len(spec.target_layer_ids)
        self.fc = nn.Linear(taps * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    @torch.no_grad()
    def initialise(self, seed: int) -> DFlashDraft:
        """Draw all matrices from N(0, 1 / fan_in) with a generator of our own; norms start at 1.

        Projections back into the residual stream are smaller by sqrt(2 * layers), so that its size does not grow with
        depth. At the width of an 8B target this is about the usual 0.02; a fixed 0.02 starves narrow drafts.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale /= (2 * self.spec.num_layers) ** 0.5
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))
        return self

    def context(self, features_RSF: Tensor, first_position: int = 0, positions_RS: Tensor | None = None) -> list[KeyValue]:
        """Keys and values of the context for every layer, from features [R, S, T * D].

        They stand at `positions_RS`, by default at consecutive positions from `first_position` on.
        """
        states = self.hidden_norm(self.fc(features_RSF))
        if positions_RS is None:
            last = first_position + states.shape[1]
            positions_RS = torch.arange(first_position, last, device=states.device).unsqueeze(0)
        cos, sin = rotary_angles(positions_RS, self.spec.head_dim, self.spec.rope_theta)
        return [layer.self_attn.key_value(states, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def _ways_to_attend(
        self, anchors_RA: Tensor, context: KeyValue, num_slots: int, starts_RA: Tensor | None, windows: Windows | None
    ) -> dict[int | None, Attend]:
        """For each sliding window that a layer has (None: a full layer), the attention that all such layers share."""
        length, dtype = context.key.shape[2], context.key.dtype
        path = self.attention or attention_path(self.spec, anchors_RA.device, dtype, anchors_RA.shape[1] * num_slots)
        ways: dict[int | None, Attend] = {}
        for window in set(self.spec.layer_windows):
            if path == "grouped":
                # Windows known beforehand are those of full layers: right for a sliding one, but wider than it needs.
                known = windows if window is None or anchors_RA.is_cuda else None
                groups = anchor_groups(anchors_RA, num_slots, length, starts_RA, known, window)
                ways[window] = partial(grouped_attention, groups=groups, num_slots=num_slots)
            else:
                mask = sparse_mask(anchors_RA, num_slots, length, starts_RA, window)
                operator = compiled_flex() if path == "flex" else UNCOMPILED_FLEX
                ways[window] = partial(flex_attention_of_blocks, mask=mask, attend=operator)
        return ways

    def blocks(
        self,
        x_RAKD: Tensor,
        context: list[KeyValue],
        anchors_RA: Tensor,
        starts_RA: Tensor | None = None,
        windows: Windows | None = None,
    ) -> Tensor:
        """Final states [R, A, K, D] of embedded blocks whose slot 0 stands at `anchors_RA`; see `anchor_groups`."""
        slots = torch.arange(x_RAKD.shape[2], device=x_RAKD.device)
        positions_RA = anchors_RA if starts_RA is None else anchors_RA - starts_RA
        cos, sin = rotary_angles(positions_RA.unsqueeze(-1) + slots, self.spec.head_dim, self.spec.rope_theta)
        ways = self._ways_to_attend(anchors_RA, context[0], x_RAKD.shape[2], starts_RA, windows)
        for layer, key_value, window in zip(self.layers, context, self.spec.layer_windows, strict=True):
            x_RAKD = layer(x_RAKD, key_value, ways[window], cos, sin)
        out: Tensor = self.norm(x_RAKD)
        return out

    def forward(
        self,
        features_RSF: Tensor,
        x_RAKD: Tensor,
        anchors_RA: Tensor,
        documents: Documents | None = None,
        windows: Windows | None = None,
    ) -> Tensor:
        """Training form: whole rows of context and all their blocks; returns final states [R, A, K, D].

        Packed rows come with their `documents`, and on a GPU with the `windows` of their groups of anchors.
        """
        if documents is None:
            return self.blocks(x_RAKD, self.context(features_RSF), anchors_RA)
        context = self.context(features_RSF, positions_RS=documents.positions_RS)
        return self.blocks(x_RAKD, context, anchors_RA, documents.starts_RA, windows)


def embed_blocks(embedding_VD: Tensor, anchor_tokens_RA: Tensor, spec: DraftSpec) -> Tensor:
    """Blocks [anchor token, mask x (K - 1)] through the target's frozen embedding: [R, A, K, D]."""
    mask = torch.full((*anchor_tokens_RA.shape, spec.block_size - 1), spec.mask_token_id, device=anchor_tokens_RA.device)
    tokens = torch.cat([anchor_tokens_RA.unsqueeze(-1), mask], dim=-1)
    return functional.embedding(tokens, embedding_VD)
