"""Whether an export is what it should be: its written files are read again and compared with the checkpoint.

Nothing of the writer is used. Keys are compared one by one with what engines need (docs/field.md 1, 'Export') and with the
checkpoint's, tensors with the checkpoint's numbers, and both drafts, the second one made of the written files alone, compute
the same random blocks. Features, anchors and, where the target's rows are not at hand, token embeddings come from a seed; the
embedding of a token depends on its id, so that a wrong mask token shows in the output, too.

In fp32 everything is equal to the last bit. In bf16 it is equal to the checkpoint with its weights rounded to bf16, and
near the checkpoint itself: rounding moves each weight by at most 2^-9 of itself, which in a fresh draft of five layers moves
final states by 0.2 % of their norm. `BF16_TOLERANCE` leaves trained ones room; beyond it, serve fp32.

Shapes: S context positions, A anchors, K slots, D hidden, T taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from dflash_core.errors import DataError
from dflash_core.export.target_rows import TargetRows
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weight_files import WEIGHTS_FILE
from dflash_core.model.weights import CONFIG_FILE, expected_shapes, load_draft, read_config, read_spec

CONTEXT, ANCHORS, SEED = 48, (3, 20, 21, 47), 20_260
BF16_TOLERANCE = 0.05
# Keys that engines take from the config, whose values the checkpoint knows.
SAME_AS_CHECKPOINT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "attention_bias", "rms_norm_eps", "rope_theta", "max_position_embeddings", "layer_types", "sliding_window",
    "vocab_size", "tie_word_embeddings", "num_target_layers", "block_size",
)  # fmt: skip
SAME_INSIDE = ("mask_token_id", "target_layer_ids", "block_size")
CONSTANT = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False}
# What would turn positions otherwise than they were trained.
NEVER = ("partial_rotary_factor", "rotary_pct", "mrope_section", "rope_interleave")


def verify_zlab(folder: Path, checkpoint: Path, shown_as: Path | None = None) -> DFlashDraft:
    """Compare the files of an export in the z-lab format with the checkpoint; returns the draft made of them alone.

    Args:
        shown_as: what the folder is called in errors, where it does not have its name yet.

    Raises:
        DataError: one line that names file, key or tensor and the difference.
    """
    shown = shown_as or folder
    try:
        _compare_configs(read_config(folder), read_config(checkpoint), shown / CONFIG_FILE)
        spec = read_spec(folder)
    except DataError as error:
        raise DataError(str(error).replace(str(folder), str(shown))) from None
    tensors = _read_raw(folder / WEIGHTS_FILE, shown / WEIGHTS_FILE)
    _compare_tensors(tensors, _read_raw(checkpoint / WEIGHTS_FILE, checkpoint / WEIGHTS_FILE), spec, shown / WEIGHTS_FILE)
    draft = DFlashDraft(spec)
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return draft.eval()


def _compare_configs(written: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
    inner, saved_inner = written.get("dflash_config"), saved.get("dflash_config")
    if not isinstance(inner, dict) or not isinstance(saved_inner, dict):
        raise DataError(f"{where}: key dflash_config is missing")
    expected = {key: saved.get(key) for key in SAME_AS_CHECKPOINT} | CONSTANT
    pairs = [(key, written, value) for key, value in expected.items()]
    pairs += [(f"dflash_config.{key}", inner, saved_inner.get(key)) for key in SAME_INSIDE]
    for name, place, value in pairs:
        key = name.removeprefix("dflash_config.")
        if key not in place:
            raise DataError(f"{where}: key {name} is missing; engines would take a default of their own")
        if place[key] != value or type(place[key]) is not type(value):
            raise DataError(f"{where}: {name} is {place[key]!r}, expected {value!r}")
    rope = written.get("rope_parameters") or {}
    if written.get("rope_scaling") is not None or any(key in written or key in rope for key in NEVER):
        raise DataError(f"{where}: names another rotation than the plain one that was trained")
    if rope and (rope.get("rope_type") != "default" or rope.get("rope_theta") != saved.get("rope_theta")):
        raise DataError(f"{where}: rope_parameters is {rope!r}, expected rope_theta {saved.get('rope_theta')!r} and no scaling")


def _read_raw(path: Path, shown: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, SafetensorError) as error:
        text = str(error).replace(str(path), path.name)
        raise DataError(f"{shown}: cannot be read ({text})") from None


def _compare_tensors(written: dict[str, Tensor], saved: dict[str, Tensor], spec: DraftSpec, where: Path) -> None:
    expected = expected_shapes(spec)
    for name in sorted(expected.keys() ^ written.keys()):
        raise DataError(f"{where}: tensor {name} is {'missing' if name in expected else 'not one of a draft'}")
    dtypes = {tensor.dtype for tensor in written.values()}
    if len(dtypes) != 1:
        raise DataError(f"{where}: tensors of several number formats: {', '.join(sorted(map(str, dtypes)))}")
    for name, shape in expected.items():
        tensor, reference = written[name], saved.get(name)
        if tuple(tensor.shape) != shape:
            raise DataError(f"{where}: tensor {name} is {list(tensor.shape)}, the config says {list(shape)}")
        if reference is None or reference.shape != tensor.shape:
            raise DataError(f"{where}: tensor {name} has another shape than the checkpoint's")
        different = int((tensor != reference.to(tensor.dtype)).sum())
        if different:
            raise DataError(f"{where}: tensor {name} differs from the checkpoint's in {different} of {tensor.numel()} numbers")


def compare_weights(written: DFlashDraft, checkpoint: Path, dtype: torch.dtype, where: Path) -> None:
    """Compare a reloaded draft's weights with the checkpoint's, rounded to `dtype`; raises DataError, which names a tensor."""
    ours = written.state_dict()
    for name, tensor in load_draft(checkpoint).state_dict().items():
        different = int((ours[name] != tensor.to(dtype).float()).sum())
        if different:
            raise DataError(f"{where}: tensor {name} differs from the checkpoint's in {different} of {tensor.numel()} numbers")


def compare_rows(written: TargetRows, rows: TargetRows | None, dtype: torch.dtype, where: Path) -> None:
    """Compare the copies of the target's rows in an export with the target's own, rounded to `dtype`; raises DataError."""
    if rows is None:
        raise DataError(f"{where}: the target's embedding and head were not found to compare with")
    for name, ours, theirs in (
        ("embedding", written.embedding_VD, rows.embedding_VD),
        ("head", written.head_VD, rows.head_VD),
    ):
        if ours.dtype != dtype or not torch.equal(ours, theirs.to(dtype)):
            raise DataError(f"{where}: the copy of the target's {name} differs from the target's own")


@torch.inference_mode()
def compare_outputs(
    written: DFlashDraft,
    checkpoint: Path,
    dtype: torch.dtype,
    rows: TargetRows | None,
    where: Path,
    own: TargetRows | None = None,
) -> Any:
    """Run the draft that was made of the written files and that of the checkpoint on the same random blocks.

    Args:
        written: the reloaded draft, in fp32.
        dtype: number format of the written tensors.
        rows: the target's embedding and head; None: final states are compared and not logits.
        own: the copies of them in the export, compared already; the reloaded draft works with these.

    Returns:
        Figures, as JSON can hold them.

    Raises:
        DataError: outputs differ by more than the format explains.
    """
    original = load_draft(checkpoint)
    rounded = DFlashDraft(original.spec)
    rounded.load_state_dict({name: tensor.to(dtype).float() for name, tensor in original.state_dict().items()})
    run = _runner(original.spec, own or rows)
    ours, exact, full = run(written), run(rounded.eval()), _runner(original.spec, rows)(original)
    difference = float((ours - exact).abs().max())
    relative = float((ours - full).norm() / full.norm())
    tolerance = 0.0 if dtype == torch.float32 else BF16_TOLERANCE
    if not torch.equal(ours, exact):  # a NaN is not equal either
        raise DataError(f"{where}: outputs differ from the checkpoint's by up to {difference:.3g}")
    if not relative <= tolerance:
        raise DataError(f"{where}: outputs differ from the fp32 checkpoint's by {relative:.2%} of their norm")
    figures = {
        "compared": "final states" if rows is None else "logits",
        "num_compared": ours.numel(),
        "max_difference": difference,
        "relative_difference_to_fp32": relative,
        "tolerance_to_fp32": tolerance,
    }
    if rows is not None:
        figures["same_best_token_share"] = float((ours.argmax(-1) == full.argmax(-1)).float().mean())
    return figures


def _runner(spec: DraftSpec, rows: TargetRows | None) -> Callable[[DFlashDraft], Tensor]:
    """What computes a draft's logits (or final states) on blocks that are the same for every draft."""
    generator = torch.Generator().manual_seed(SEED)
    features_RSF = torch.randn(1, CONTEXT, len(spec.target_layer_ids) * spec.hidden_size, generator=generator)
    tokens_A = torch.randint(0, spec.vocab_size, (len(ANCHORS),), generator=generator).tolist()
    anchors_RA = torch.tensor([ANCHORS])

    def row(token: int) -> Tensor:
        if rows is not None:
            return rows.embedding_VD[token].float()
        return torch.randn(spec.hidden_size, generator=torch.Generator().manual_seed(SEED + 1 + token))

    def run(draft: DFlashDraft) -> Tensor:
        mask = [row(draft.spec.mask_token_id)] * (draft.spec.block_size - 1)
        blocks_RAKD = torch.stack([torch.stack([row(token), *mask]) for token in tokens_A]).unsqueeze(0)
        final_RAKD = draft(features_RSF, blocks_RAKD, anchors_RA)
        if rows is None:
            return torch.as_tensor(final_RAKD)
        return functional.linear(final_RAKD, rows.head_VD.float())

    return run
