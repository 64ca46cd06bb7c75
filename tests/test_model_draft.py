"""The draft's fast path against the slow reference, and the attention rule stated as what must not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.errors import ConfigError, DataError
from dflash_core.model import draft as draft_module
from dflash_core.model.draft import DFlashDraft, embed_blocks
from dflash_core.model.loss import block_loss
from dflash_core.model.reference import reference_block, reference_loss
from dflash_core.model.spec import DraftSpec
from dflash_core.model.weights import load_draft, save_draft

SPEC = DraftSpec(
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=31,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    num_target_layers=6,
    block_size=4,
    mask_token_id=30,
    target_layer_ids=(1, 3),
)
ROWS, LENGTH = 2, 11


def make_draft(seed: int = 0) -> DFlashDraft:
    draft = DFlashDraft(SPEC).initialise(seed)
    with torch.no_grad():  # weights large enough that attention is far from uniform, norms different from 1
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12.0)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    return {
        "features": torch.randn(ROWS, LENGTH, 2 * SPEC.hidden_size, generator=generator),
        "embedding": embedding,
        "head": torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator),
        "anchors": torch.tensor([[0, 4, 7], [2, 5, 9]]),
        "tokens": torch.randint(0, 30, (ROWS, LENGTH), generator=generator),
    }


def run(draft: DFlashDraft, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    anchor_tokens = inputs["tokens"].gather(1, inputs["anchors"])
    return draft(inputs["features"], embed_blocks(inputs["embedding"], anchor_tokens, SPEC), inputs["anchors"])


def test_values_and_gradients_equal_the_reference(inputs: dict[str, torch.Tensor]) -> None:
    gamma = 3.0
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[0, 9] = False  # an answer that ends inside a block
    draft, slow = make_draft(), make_draft()
    final = run(draft, inputs)
    labels, weights = torch.zeros(ROWS, 3, 4, dtype=torch.long), torch.zeros(ROWS, 3, 4)
    total, weight_sum = torch.zeros(()), 0.0
    for r in range(ROWS):
        for a, anchor in enumerate(inputs["anchors"][r].tolist()):
            x = inputs["embedding"][torch.tensor([inputs["tokens"][r, anchor], *[SPEC.mask_token_id] * 3])]
            expected = reference_block(slow, inputs["features"][r], x, anchor)
            # fp32, two layers: sums of a few hundred products differ in order only.
            torch.testing.assert_close(final[r, a], expected, rtol=1e-5, atol=1e-5)
            tokens = inputs["tokens"][r].tolist()
            loss, weight = reference_loss(expected, inputs["head"], tokens, mask[r].tolist(), anchor, gamma)
            total, weight_sum = total + loss, weight_sum + weight
            for k in range(1, 4):
                if anchor + k < LENGTH and bool(mask[r, anchor : anchor + k + 1].all()):
                    labels[r, a, k] = tokens[anchor + k]
                    weights[r, a, k] = torch.exp(torch.tensor(-(k - 1) / gamma))
    parts = block_loss(final, inputs["head"], labels, weights)
    torch.testing.assert_close(parts.loss_sum, total, rtol=1e-5, atol=1e-5)
    assert float(parts.weight_sum) == pytest.approx(weight_sum, rel=1e-6)
    parts.loss_sum.backward()
    total.backward()
    for (name, fast), reference in zip(draft.named_parameters(), slow.parameters(), strict=True):
        assert fast.grad is not None and reference.grad is not None, name
        scale = float(reference.grad.abs().max())
        assert float((fast.grad - reference.grad).abs().max()) <= 1e-4 * scale, name


def test_context_at_and_after_the_anchor_does_not_matter(inputs: dict[str, torch.Tensor]) -> None:
    """Seeing position a itself leaks the next token: training looks perfect and serving fails."""
    draft = make_draft()
    before = run(draft, inputs)
    for a in range(3):
        changed = {**inputs, "features": inputs["features"].clone()}
        for r in range(ROWS):
            changed["features"][r, int(inputs["anchors"][r, a]) :] += 10.0
        torch.testing.assert_close(run(draft, changed)[:, a], before[:, a], rtol=0, atol=0)


def test_every_context_position_before_the_anchor_matters(inputs: dict[str, torch.Tensor]) -> None:
    draft = make_draft()
    before = run(draft, inputs)
    last = inputs["anchors"][1, 2]
    for position in range(int(last)):
        changed = {**inputs, "features": inputs["features"].clone()}
        changed["features"][1, position] += 1.0
        assert float((run(draft, changed)[1, 2] - before[1, 2]).detach().abs().max()) > 1e-6, position


def test_groups_rows_and_filled_anchors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups, the last one smaller; the first row is filled up with anchors at position 0."""
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(2, 14, 2 * SPEC.hidden_size, generator=generator)
    embedding = torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    anchors = torch.tensor([[1, 3, 9, 0, 0], [2, 4, 5, 6, 12]])
    tokens = torch.randint(0, 30, (2, 14), generator=generator).gather(1, anchors)
    draft, x = make_draft(), embed_blocks(embedding, tokens, SPEC)
    monkeypatch.setitem(draft_module.ANCHORS_PER_GROUP, "cpu", 2)
    final = draft(features, x, anchors)
    for r, count in ((0, 3), (1, 5)):
        for a in range(count):
            expected = reference_block(draft, features[r], x[r, a], int(anchors[r, a]))
            torch.testing.assert_close(final[r, a], expected, rtol=1e-5, atol=1e-5)


def test_blocks_do_not_see_each_other_and_slots_of_a_block_do(inputs: dict[str, torch.Tensor]) -> None:
    draft = make_draft()
    blocks = embed_blocks(inputs["embedding"], inputs["tokens"].gather(1, inputs["anchors"]), SPEC)
    before = draft(inputs["features"], blocks, inputs["anchors"])
    changed = blocks.clone()
    changed[:, 1, 3] += 1.0
    after = draft(inputs["features"], changed, inputs["anchors"])
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]], rtol=0, atol=0)
    assert float((after[:, 1, 0] - before[:, 1, 0]).detach().abs().max()) > 1e-6  # both directions: slot 0 sees slot 3


def test_positions_are_absolute(inputs: dict[str, torch.Tensor]) -> None:
    """Moving anchor and context together changes nothing; moving the anchor alone does."""
    draft = make_draft()
    x = torch.randn(1, 1, 4, SPEC.hidden_size, generator=torch.Generator().manual_seed(5))
    context = draft.context(inputs["features"][:1, :5])
    shifted = draft.context(inputs["features"][:1, :5], first_position=20)
    here = draft.blocks(x, context, torch.tensor([[5]]))
    far = draft.blocks(x, context, torch.tensor([[25]]))
    assert float((far - here).detach().abs().max()) > 1e-4
    # Rotary embedding is relative, so the same distance gives the same result; only visibility counts from 0.
    spec_places = draft.blocks(x, shifted, torch.tensor([[25]]))
    torch.testing.assert_close(spec_places, here, rtol=1e-4, atol=1e-5)


def test_context_in_pieces_equals_context_at_once(inputs: dict[str, torch.Tensor]) -> None:
    draft = make_draft()
    whole = draft.context(inputs["features"])
    pieces = [draft.context(inputs["features"][:, :4]), draft.context(inputs["features"][:, 4:], 4)]
    for layer, first, second in zip(whole, *pieces, strict=True):
        torch.testing.assert_close(layer.key, torch.cat([first.key, second.key], dim=2), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.value, torch.cat([first.value, second.value], dim=2), rtol=1e-5, atol=1e-6)


def test_draft_is_the_same_after_writing_and_reading(inputs: dict[str, torch.Tensor], tmp_path: Path) -> None:
    draft = make_draft()
    save_draft(tmp_path, draft.spec, draft.state_dict())
    read = load_draft(tmp_path)
    assert read.spec == draft.spec
    torch.testing.assert_close(run(read, inputs), run(draft, inputs), rtol=0, atol=0)


def test_export_has_the_published_names(tmp_path: Path) -> None:
    import json

    draft = make_draft()
    save_draft(tmp_path, draft.spec, draft.state_dict())
    names = set(draft.state_dict())
    layer = {
        f"layers.0.{part}.weight"
        for part in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip
    assert {n for n in names if not n.startswith("layers.1.")} == {"fc.weight", "hidden_norm.weight", "norm.weight", *layer}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["is_causal"] is False
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]


def test_damaged_or_foreign_drafts_are_refused(tmp_path: Path) -> None:
    draft = make_draft()
    with pytest.raises(DataError, match="not a readable draft"):
        load_draft(tmp_path)
    save_draft(tmp_path, draft.spec, {k: v for k, v in draft.state_dict().items() if k != "fc.weight"})
    with pytest.raises(DataError, match=r"fc\.weight"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="dflash_config"):
        load_draft(tmp_path)
