"""Self-checks of the draft: drafts that see what they must not, or stand elsewhere than they say, are caught and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.config import TrainConfig
from dflash_core.errors import TrainingError
from dflash_core.model import draft as draft_module
from dflash_core.model.documents import Documents
from dflash_core.model.draft import DFlashDraft
from dflash_core.model.spec import DraftSpec
from dflash_core.training.distributed import CellGroup
from dflash_core.training.loop import DraftTrainer
from dflash_core.training.self_check_draft import DraftProbe, check_leaks, check_packed, check_reference, first_layers
from dflash_core.training.self_check_export import check_export_keys
from dflash_core.training.self_check_report import Report

SPEC = DraftSpec(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=40,
    rms_norm_eps=1e-6, rope_theta=10_000.0, max_position_embeddings=512, tie_word_embeddings=True, num_target_layers=5,
    block_size=4, mask_token_id=39, target_layer_ids=(1, 2),
)  # fmt: skip
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
CHECKS = {"leaks": check_leaks, "packed": check_packed, "reference": check_reference}


class Draft(DFlashDraft):
    """A draft whose forward pass a test spoils."""

    def real(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Documents | None, windows: Any) -> Tensor:
        return super().forward(features, x, anchors, documents, windows)


class Inclusive(Draft):
    """Sees the context at its anchor, too, and has its positions right: the classic fault."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        context = self.context(features)
        return self.blocks(x, context, anchors + 1, torch.ones_like(anchors))


class LooksAhead(Draft):
    """Where it should see the place before an anchor, it sees the place behind it."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        place = int(anchors[0, anchors.shape[1] // 2])
        features = features.clone()
        features[:, place - 1] = features[:, place + 1]
        return self.real(features, x, anchors, documents, windows)


class Blind(Draft):
    """Its context is dead, so that nothing can leak."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        return self.real(torch.ones_like(features), x, anchors, documents, windows)


class Neighbourly(Draft):
    """A block hears of the one before it."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        x = torch.cat([x[:, :1], x[:, 1:] + 1e-3 * x[:, :-1]], dim=1)
        return self.real(features, x, anchors, documents, windows)


class Causal(Draft):
    """A slot sees itself and what stands before it."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        slots = []
        for k in range(x.shape[2]):
            seen = x.clone()
            seen[:, :, k + 1 :] = 0
            slots.append(self.real(features, seen, anchors, documents, windows)[:, :, k])
        return torch.stack(slots, dim=2)


class AntiCausal(Draft):
    """A slot sees itself and what stands behind it."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        slots = []
        for k in range(x.shape[2]):
            seen = x.clone()
            seen[:, :, :k] = 0
            slots.append(self.real(features, seen, anchors, documents, windows)[:, :, k])
        return torch.stack(slots, dim=2)


class Displaced(Draft):
    """The context stands one position further on than it should: slots are off by one against it."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        return self.blocks(x, self.context(features, 1), anchors)


class Mingling(Draft):
    """A packed row is one long sequence."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        return self.real(features, x, anchors, None, None)


class Uncounted(Draft):
    """Positions of a packed row's context do not begin again with the document."""

    def forward(self, features: Tensor, x: Tensor, anchors: Tensor, documents: Any = None, windows: Any = None) -> Tensor:
        if documents is not None:
            documents = documents._replace(positions_RS=torch.arange(features.shape[1]).unsqueeze(0))
        return self.real(features, x, anchors, documents, windows)


def probe_of(kind: type[DFlashDraft] = DFlashDraft, dtype: str = "float32", spec: DraftSpec = SPEC) -> DraftProbe:
    rows = torch.randn(spec.vocab_size, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    config = TrainConfig(compute_dtype=dtype)  # type: ignore[arg-type]
    return DraftProbe(DraftTrainer(kind(spec).initialise(0), rows, rows, config, 10, 1, CellGroup()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [2, 4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKS)
def test_a_good_draft_passes(name: str, block_size: int, dtype: str) -> None:
    probe = probe_of(dtype=dtype, spec=replace(SPEC, block_size=block_size))
    report = Report()
    before = {name: tensor.clone() for name, tensor in probe.draft.state_dict().items()}
    report.run(name, CHECKS[name], probe)
    assert report.passed == [name]
    for key, limit in (("leak_rerun_difference", 0.0), ("reference_difference", 1e-5)):
        assert report.figures.get(key, 0.0) <= limit
    assert report.figures.get("packed_difference", 0.0) <= (1e-5 if dtype == "float32" else 2e-2)
    assert all(p.grad is None for p in probe.draft.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in probe.draft.state_dict().items())


@pytest.mark.parametrize("vocab_size", [2, 5])
def test_few_tokens_to_draw_blocks_from_are_enough(vocab_size: int) -> None:
    """A slot that is to get another token gets another one: with few of them it often drew the one that it had."""
    for block_size in range(2, 7):
        spec = replace(SPEC, vocab_size=vocab_size, mask_token_id=0, block_size=block_size)
        for check in CHECKS.values():
            check(probe_of(spec=spec))


def test_a_window_off_by_one_is_named_though_it_is_longer_than_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, layer_types=("sliding_attention",) * 2, sliding_window=512)
    for check in CHECKS.values():
        check(probe_of(spec=spec))
    real = draft_module.anchor_groups

    def wider(*args: Any) -> Any:
        return real(*args[:-1], None if args[-1] is None else args[-1] + 1)

    monkeypatch.setattr(draft_module, "anchor_groups", wider)
    with pytest.raises(TrainingError, match="differs from the plain reference"):
        check_reference(probe_of(spec=spec))


def test_a_trained_draft_passes() -> None:
    """Its heads are sharp: large keys and queries make most of what it may see nearly invisible."""
    probe = probe_of()
    with torch.no_grad():
        for layer in probe.draft.layers:
            layer.self_attn.q_norm.weight.mul_(6.0)  # type: ignore[union-attr,operator]
    for check in CHECKS.values():
        check(probe)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Inclusive, "leaks", "a block sees the context at its anchor, whose state tells the next token (its states move by "),
        (LooksAhead, "leaks", "a block sees the context behind its anchor (its states move by "),
        (Blind, "leaks", "a block does not see the context right before its anchor"),
        (Neighbourly, "leaks", "a block sees the slots of another block (its states move by "),
        (Causal, "leaks", "a slot does not see the slot behind it in its own block: the draft is causal"),
        (AntiCausal, "leaks", "a slot does not see the slot before it in its own block"),
        (Displaced, "reference", "the draft's fast path differs from the plain reference by "),
        (Inclusive, "reference", "the draft's fast path differs from the plain reference by "),
        (Mingling, "packed", "the documents of a packed row see each other in the draft (its states move by "),
        (Uncounted, "packed", "a document of a packed row gets other states than alone ("),
    ],
)
def test_a_bad_draft_is_named(kind: type[DFlashDraft], name: str, words: str, dtype: str) -> None:
    with pytest.raises(TrainingError) as caught:
        Report().run(name, CHECKS[name], probe_of(kind, dtype))
    message = str(caught.value)
    assert message.startswith(f"self-check {name}: {words}") and "\n" not in message
    assert "this is a fault of the draft's attention, not of the configuration" in message


def test_weights_that_are_not_finite_are_named() -> None:
    probe = probe_of()
    with torch.no_grad():
        probe.draft.fc.weight[3, 2] = torch.nan
    with pytest.raises(TrainingError, match="self-check leaks: the draft's states are not finite; the weights that training beg"):
        Report().run("leaks", check_leaks, probe)


def test_the_reference_takes_as_many_layers_as_it_has_time_for() -> None:
    small, large = probe_of(), probe_of(spec=replace(SPEC, num_heads=64, num_kv_heads=16, head_dim=32, num_layers=3))
    assert check_reference(small)["reference_layers"] == 2
    found = check_reference(large)
    assert found["reference_layers"] == 1 and found["reference_difference"] < 1e-5
    part = first_layers(large.draft, 1)
    assert len(part.layers) == part.spec.num_layers == 1 and len(large.draft.layers) == large.draft.spec.num_layers == 3
    assert part.layers[0] is large.draft.layers[0]


def renamed(draft: DFlashDraft) -> None:
    draft.context_norm = draft.hidden_norm
    del draft.hidden_norm


def without_gate(draft: DFlashDraft) -> None:
    del draft.layers[1].mlp.gate_proj  # type: ignore[union-attr]


def transposed(draft: DFlashDraft) -> None:
    draft.fc.weight = torch.nn.Parameter(draft.fc.weight.T.contiguous())


def with_bias(draft: DFlashDraft) -> None:
    draft.fc.bias = torch.nn.Parameter(torch.zeros(32))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (renamed, "hidden_norm.weight is missing; context_norm.weight is not known (tensors of the z-lab format)"),
        (without_gate, "layers.1.mlp.gate_proj.weight is missing"),
        (transposed, "fc.weight is [64, 32], not [32, 64]"),
        (with_bias, "fc.bias is not known"),
        (lambda draft: draft.layers.append(draft.layers[0]), "layers.2.input_layernorm.weight is not known; layers.2"),
    ],
)
def test_tensors_that_no_engine_looks_for_are_refused(damage: Any, words: str) -> None:
    draft = DFlashDraft(SPEC)
    assert check_export_keys(draft) == {"num_tensors": 3 + 2 * 11}
    damage(draft)
    with pytest.raises(TrainingError) as caught:
        Report().run("export", check_export_keys, draft)
    assert str(caught.value).startswith("self-check export: a checkpoint of this draft could not be served: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"is_causal": True}, "is_causal is True, not False"),
        ({"is_causal": None}, "is_causal is None, not False"),
        ({"block_size": None}, "block_size is None, not 4"),
        ({"dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 2]}}, "dflash_config.block_size is missing, not 4"),
        ({"dflash_config": {"target_layer_ids": [1, 2], "block_size": 4}}, "dflash_config.mask_token_id is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must not be there"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, "mrope_section must not be there"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is {'rope_type': 'yarn'}, not None"),
        ({"model_type": "llama"}, "model_type is 'llama', not 'qwen3'"),
        ({"layer_types": ["full_attention"]}, "layer_types has not one entry for each of 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window is no number of positions"),
    ],
)
def test_a_config_that_engines_read_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    real = DraftSpec.to_hf_config
    monkeypatch.setattr(DraftSpec, "to_hf_config", lambda self, dtype="float32": real(self, dtype) | change)
    with pytest.raises(TrainingError) as caught:
        Report().run("export", check_export_keys, DFlashDraft(SPEC))
    assert str(caught.value).startswith("self-check export: a checkpoint of this draft would be served wrongly: ")
    assert words in str(caught.value)


def test_a_key_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DraftSpec.to_hf_config
    for key in ("head_dim", "num_target_layers", "is_causal", "dflash_config"):

        def without(self: DraftSpec, dtype: str = "float32", key: str = key) -> dict[str, Any]:
            return {name: value for name, value in real(self, dtype).items() if name != key}

        monkeypatch.setattr(DraftSpec, "to_hf_config", without)
        with pytest.raises(TrainingError, match=f"{'mask_token_id' if key == 'dflash_config' else key} is .*missing"):
            check_export_keys(DFlashDraft(SPEC))
