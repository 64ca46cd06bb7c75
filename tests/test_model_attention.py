"""The attention rule, and every way to attend against the plain reference: grouped and FlexAttention, full and sliding."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex_module

from dflash_core.model import attention as attention_module
from dflash_core.model import attention_flex
from dflash_core.model import draft as draft_module
from dflash_core.model.attention import KeyValue, anchor_groups, grouped_attention
from dflash_core.model.attention_flex import TILE, flex_attention_of_blocks, flex_works, sparse_mask
from dflash_core.model.documents import Documents, context_windows
from dflash_core.model.draft import AttentionPath, DFlashDraft, attention_path
from dflash_core.model.reference import reference_block
from dflash_core.model.spec import DraftSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def sees(anchor: int, slot: int, start: int, window: int | None, key: int | None, other: tuple[int, int] | None = None) -> bool:
    """The rule for one pair: `key` is a place in the row, `other` is (anchor's number relative to ours, slot)."""
    if key is not None:
        return start <= key < anchor and (window is None or anchor + slot - key < window)
    assert other is not None
    return other[0] == 0 and (window is None or abs(slot - other[1]) < window)


class Places(NamedTuple):
    """Anchors of some rows, the starts of their documents, and the lengths that go with them."""

    anchors: list[list[int]]
    starts: list[list[int]]
    slots: int
    length: int
    window: int | None


@st.composite
def places(draw: st.DrawFn, longest: int = 40) -> Places:
    length, count = draw(st.integers(1, longest)), draw(st.integers(1, 7))
    anchors, starts = [], []
    for _ in range(draw(st.integers(1, 2))):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, length - 1), max_size=3)))]
        own = sorted(draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=count)))
        own += [0] * (count - len(own))  # fillers
        anchors.append(own)
        starts.append([max(cut for cut in cuts if cut <= anchor) for anchor in own])
    return Places(anchors, starts, draw(st.integers(1, 9)), length, draw(st.none() | st.integers(1, longest)))


def expected_pairs(case: Places) -> torch.Tensor:
    """[R, Q, S + Q] by the rule, pair by pair."""
    rows = []
    for anchors, starts in zip(case.anchors, case.starts, strict=True):
        row = []
        for a, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
            for slot in range(case.slots):
                seen = [sees(anchor, slot, start, case.window, key) for key in range(case.length)]
                for b in range(len(anchors)):
                    seen += [sees(anchor, slot, start, case.window, None, (b - a, k)) for k in range(case.slots)]
                row.append(seen)
        rows.append(row)
    return torch.tensor(rows)


def tensors(case: Places) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(case.anchors), torch.tensor(case.starts)


@settings(max_examples=40, deadline=None)
@given(case=places(), size=st.integers(1, 8))
def test_groups_hold_all_that_is_seen_and_nothing_else(case: Places, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention_module.ANCHORS_PER_GROUP, "cpu", size)
        groups = anchor_groups(tensors(case)[0], case.slots, case.length, tensors(case)[1], None, case.window)
    expected = expected_pairs(case)
    found = torch.zeros_like(expected)
    for group in groups:
        own = slice(group.first * case.slots, group.last * case.slots)
        found[:, own, group.begin : group.end] = group.seen[:, 0, :, : group.end - group.begin]
        found[:, own, case.length + own.start : case.length + own.stop] = group.seen[:, 0, :, group.end - group.begin :]
    assert torch.equal(found, expected)


def dense(mask: Any, queries: int, case: Places) -> torch.Tensor:
    """[R, Q, S + Q] of a sparse mask as its kernels read it: whole tiles unasked, partial ones through the function."""
    rows, total_q, total_k = len(case.anchors), *mask.seq_lengths
    index = [torch.arange(n) for n in (rows, total_q, total_k)]
    by_function = mask.mask_mod(index[0].view(-1, 1, 1), torch.tensor(0), index[1].view(1, -1, 1), index[2].view(1, 1, -1))
    found = torch.zeros(rows, total_q, total_k, dtype=torch.bool)
    for num, indices, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):  # fmt: skip
        for r in range(rows):
            for i in range(total_q // TILE):
                for j in indices[r, 0, i, : num[r, 0, i]].tolist():
                    tile = (r, slice(i * TILE, (i + 1) * TILE), slice(j * TILE, (j + 1) * TILE))
                    assert not found[tile].any(), "a tile is listed twice"
                    found[tile] = True if whole else by_function[tile]
    assert torch.equal(found, by_function), "the tiles say something else than the function"
    assert bool(found.any(-1).all()), "a query without a key"
    assert not found[:, :queries, case.length : -total_q].any(), "context that fills up is seen"
    assert not found[:, :queries, total_k - total_q + queries :].any(), "slots that fill up are seen"
    blocks = found[:, :queries, total_k - total_q : total_k - total_q + queries]
    return torch.cat([found[:, :queries, : case.length], blocks], dim=-1)


@settings(max_examples=12, deadline=None)
@given(case=places(300))
def test_the_sparse_mask_is_the_rule_at_every_pair(case: Places) -> None:
    mask = sparse_mask(tensors(case)[0], case.slots, case.length, tensors(case)[1], case.window)
    assert torch.equal(dense(mask, len(case.anchors[0]) * case.slots, case), expected_pairs(case))


@pytest.mark.parametrize(("slots", "window", "count"), [(16, None, 12), (10, 150, 12), (200, 90, 2)])
def test_the_sparse_mask_over_many_tiles(slots: int, window: int | None, count: int) -> None:
    """Tiles that are seen whole exist only here; blocks that straddle tiles, and blocks longer than one."""
    anchors = [130, 190, 300, 300, 400, 512, 640, 640, 641, 645, 0, 0][-count:]
    starts = ([0] * 8 + [290] * 2 + [0] * 2)[-count:]
    case = Places([anchors], [starts], slots, 650, window)
    mask = sparse_mask(tensors(case)[0], case.slots, case.length, tensors(case)[1], case.window)
    assert torch.equal(dense(mask, count * slots, case), expected_pairs(case))
    if window is None:
        assert int(mask.full_kv_num_blocks.sum()) > 0 and mask.sparsity() > 30


def test_a_context_window_of_a_sliding_layer_begins_where_the_first_anchor_reaches() -> None:
    anchors, starts = torch.tensor([[3, 20, 40, 60, 90]]), torch.tensor([[0, 0, 38, 38, 38]])
    assert context_windows(anchors, starts, 2) == [(0, 20), (38, 60), (38, 90)]
    assert context_windows(anchors, starts, 2, 8) == [(0, 20), (38, 60), (83, 90)]


class Case(NamedTuple):
    """A draft of two layers over two rows, the second filled up; packed or not."""

    draft: DFlashDraft
    features: torch.Tensor
    x: torch.Tensor
    anchors: torch.Tensor
    real: list[int]
    documents: Documents | None

    def run(self) -> torch.Tensor:
        out: torch.Tensor = self.draft(self.features, self.x, self.anchors, self.documents)
        return out


def reference(case: Case) -> dict[tuple[int, int], torch.Tensor]:
    """Final states of every anchor that is no filler."""
    out = {}
    for r, count in enumerate(case.real):
        for a in range(count):
            anchor = int(case.anchors[r, a])
            start = 0 if case.documents is None else int(case.documents.starts_RA[r, a])
            out[r, a] = reference_block(case.draft, case.features[r, start:], case.x[r, a], anchor - start)
    return out


HEADS = {"grouped": (4, 2), "all_own": (3, 3), "one": (2, 1)}


def make_case(kinds: tuple[str, ...], window: int | None, packed: bool, heads: str = "grouped") -> Case:
    num_heads, num_kv_heads = HEADS[heads]
    spec = DraftSpec(
        24, 40, len(kinds), num_heads, num_kv_heads, 8, 31, 1e-6, 1e4, 128, True, 6, 5, 30, (1, 3), kinds, window
    )  # fmt: skip
    draft = DFlashDraft(spec).initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # weights large enough that attention is far from uniform, norms different from 1
        for parameter in draft.parameters():
            parameter.copy_(
                parameter * 12.0 if parameter.ndim == 2 else parameter + 0.3 * torch.randn(parameter.shape, generator=generator)
            )
    # An anchor at place 0, one at the last place, neighbours, and in the second row fillers.
    anchors = torch.tensor([[0, 4, 7, 8, 16], [2, 5, 9, 0, 0]])
    documents = None
    if packed:
        ids = torch.tensor([[0] * 4 + [1] * 4 + [2] * 9, [0] * 7 + [1] * 10])
        positions = torch.tensor([[*range(4), *range(4), *range(9)], [*range(7), *range(10)]])
        documents = Documents(ids, positions, torch.tensor([[0, 4, 4, 8, 8], [0, 0, 7, 0, 0]]))
    features = torch.randn(2, 17, 48, generator=generator).requires_grad_()
    x = torch.randn(2, 5, spec.block_size, 24, generator=generator).requires_grad_()
    return Case(draft, features, x, anchors, [5, 3], documents)


Blocks = dict[tuple[int, int], torch.Tensor]
Gradients = dict[str, torch.Tensor]


def gradients(case: Case, blocks: Blocks) -> Gradients:
    """Of a weighted sum of the final states, by all parameters and inputs."""
    leaves = {**dict(case.draft.named_parameters()), "features": case.features, "x": case.x}
    generator = torch.Generator().manual_seed(7)
    weighted = [(block * torch.randn(block.shape, generator=generator)).sum() for block in blocks.values()]
    found = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@cache
def expected(layers: str, packed: bool, heads: str) -> tuple[Blocks, Gradients]:
    case = make_case(*LAYERS[layers], packed, heads)
    blocks = reference(case)
    return {place: block.detach() for place, block in blocks.items()}, gradients(case, blocks)


def assert_equals_the_reference(
    layers: str, packed: bool, heads: str = "grouped", attention: AttentionPath | None = None
) -> None:
    """fp32, values within 1e-5, gradients within 1e-4 of the largest: sums of a few hundred products differ in order only."""
    blocks, wanted = expected(layers, packed, heads)
    case = make_case(*LAYERS[layers], packed, heads)
    case.draft.attention = attention
    final = case.run()
    for (r, a), block in blocks.items():
        torch.testing.assert_close(final[r, a], block, rtol=1e-5, atol=1e-5)
    for name, found in gradients(case, {(r, a): final[r, a] for r, a in blocks}).items():
        scale = float(wanted[name].abs().max())
        assert scale > 0, name
        assert float((found - wanted[name]).abs().max()) <= 1e-4 * scale, name


LAYERS = {
    "full": ((FULL, FULL), None),
    "sliding": ((SLIDING, SLIDING), 6),
    "mixed": ((SLIDING, FULL), 5),
    "shorter_than_a_block": ((FULL, SLIDING), 3),
}


@pytest.fixture
def flex_may_learn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses gradients on a CPU because it has no kernel for them; its uncompiled form needs none."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)


@pytest.mark.parametrize(
    ("layers", "packed"), [("full", False), ("sliding", True), ("mixed", True), ("shorter_than_a_block", False)]
)
@pytest.mark.parametrize("size", [1, 2, 128])
def test_groups_equal_the_reference(layers: str, packed: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_module.ANCHORS_PER_GROUP, "cpu", size)
    assert_equals_the_reference(layers, packed)


UNCOMPILED = "ignore:flex_attention called without torch.compile"


@pytest.mark.filterwarnings(UNCOMPILED)
@pytest.mark.usefixtures("flex_may_learn_on_a_cpu")
@pytest.mark.parametrize(
    ("layers", "packed"),
    [
        ("mixed", True),
        # The uncompiled operator is traced anew for every mask, which takes seconds.
        pytest.param("full", False, marks=pytest.mark.slow),
        pytest.param("shorter_than_a_block", False, marks=pytest.mark.slow),
    ],
)
def test_uncompiled_flex_equals_the_reference(layers: str, packed: bool) -> None:
    assert_equals_the_reference(layers, packed, attention="flex_uncompiled")


@pytest.mark.filterwarnings(UNCOMPILED)
@pytest.mark.usefixtures("flex_may_learn_on_a_cpu")
@pytest.mark.parametrize("attention", ["grouped", pytest.param("flex_uncompiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", ["all_own", "one"])
def test_heads_of_their_own_and_shared_ones_equal_the_reference(heads: str, attention: AttentionPath) -> None:
    assert_equals_the_reference("mixed", False, heads, attention)


def run_both(case: Places, shape: tuple[int, int, int] = (4, 2, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped and uncompiled FlexAttention of random queries and keys of this case."""
    heads, kv_heads, size = shape
    anchors, starts = tensors(case)
    generator = torch.Generator().manual_seed(case.length)
    rows, queries = len(anchors), anchors.shape[1] * case.slots

    def random(count: int, length: int) -> torch.Tensor:
        return torch.randn(rows, count, length, size, generator=generator)

    query = random(heads, queries)
    context = KeyValue(random(kv_heads, case.length), random(kv_heads, case.length))
    block = KeyValue(random(kv_heads, queries), random(kv_heads, queries))
    groups = anchor_groups(anchors, case.slots, case.length, starts, None, case.window)
    mask = sparse_mask(anchors, case.slots, case.length, starts, case.window)
    return (
        grouped_attention(query, context, block, groups, case.slots),
        flex_attention_of_blocks(query, context, block, mask),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(UNCOMPILED)
@settings(max_examples=8, deadline=None)
@given(case=places(150))
def test_groups_and_flex_agree_at_any_place(case: Places) -> None:
    grouped, flexed = run_both(case)
    torch.testing.assert_close(grouped, flexed, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(UNCOMPILED)
@pytest.mark.parametrize("attention", ["grouped", pytest.param("flex_uncompiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers", ["mixed"])
def test_under_autocast_results_are_finite_and_near(layers: str, attention: AttentionPath, flex_may_learn_on_a_cpu: None) -> None:
    case = make_case(*LAYERS[layers], packed=True)
    case.draft.attention = attention
    with torch.no_grad():  # the weights of `make_case` are for telling mistakes; bf16 is judged with weights as they begin
        case.draft.initialise(0)
    exact = case.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        final = case.run()
    # bf16 has 8 bits: a few roundings of 2^-8 in each of two layers.
    assert float((final - exact).detach().abs().max()) < 0.05 * float(exact.detach().abs().max())
    found = gradients(case, {(0, 0): final.float()})
    assert all(bool(torch.isfinite(gradient).all()) for gradient in found.values())


@pytest.mark.parametrize("layers", LAYERS)
def test_a_context_that_grows_gives_what_the_whole_row_gives(layers: str) -> None:
    """As decoding does: keys of the context are kept and appended to, and one block is asked for."""
    case = make_case(*LAYERS[layers], packed=False)
    whole = case.run()
    for a in range(1, 5):
        anchor = int(case.anchors[0, a])
        cut = anchor // 2
        pieces = [case.draft.context(case.features[:1, :cut]), case.draft.context(case.features[:1, cut:anchor], cut)]
        joined = [
            KeyValue(torch.cat([one.key, two.key], 2), torch.cat([one.value, two.value], 2))
            for one, two in zip(*pieces, strict=True)
        ]
        alone = case.draft.blocks(case.x[:1, a : a + 1], joined, case.anchors[:1, a : a + 1])
        torch.testing.assert_close(alone[0, 0], whole[0, a], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(UNCOMPILED)
def test_masks_are_made_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []
    real = draft_module.sparse_mask

    def counting(*args: Any) -> Any:
        made.append(args[-1])
        return real(*args)

    monkeypatch.setattr(draft_module, "sparse_mask", counting)
    case = make_case((FULL, SLIDING, FULL, SLIDING), 6, packed=False)
    case.draft.attention = "flex_uncompiled"
    with torch.no_grad():
        case.run()
    assert sorted(made, key=str) == [6, None]


def test_the_path_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_case((FULL,), None, packed=False).draft.spec
    asked: list[tuple[Any, ...]] = []

    def works(*args: Any) -> bool:
        asked.append(args)
        return args[-1] is torch.bfloat16

    monkeypatch.setattr(draft_module, "flex_works", works)
    cuda = torch.device("cuda", 1)
    assert attention_path(spec, torch.device("cpu"), torch.float32, 10_000) == "grouped"
    assert attention_path(spec, cuda, torch.bfloat16, TILE - 1) == "grouped" and asked == []
    assert attention_path(spec, cuda, torch.bfloat16, TILE) == "flex"
    assert attention_path(spec, cuda, torch.float16, TILE) == "grouped"
    assert asked[0] == (cuda, 4, 2, 8, torch.bfloat16)


def test_a_device_without_flex_is_told_once_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU trying fails for want of a backward pass; a broken compiler fails as any error."""

    def broken(*_: Any, **__: Any) -> Any:
        raise ImportError("no module named triton\nwhere it looked")

    monkeypatch.setattr(attention_flex, "compiled_flex", lambda: broken)
    flex_works.cache_clear()
    with caplog.at_level(logging.WARNING, "dflash_core"):
        tried = [flex_works(torch.device("cpu"), 4, 2, 16, torch.float32) for _ in range(3)]
    flex_works.cache_clear()
    assert tried == [False] * 3 and len(caplog.records) == 1
    assert caplog.messages[0].endswith("no FlexAttention (ImportError: no module named triton)")


@pytest.mark.slow
@pytest.mark.filterwarnings(UNCOMPILED)
@pytest.mark.usefixtures("flex_may_learn_on_a_cpu")
def test_trying_a_device_runs_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flex, "compiled_flex", lambda: flex_module.flex_attention)
    flex_works.cache_clear()
    with torch.inference_mode():  # evaluation asks from here
        assert flex_works(torch.device("cpu"), 4, 2, 16, torch.float32)
    flex_works.cache_clear()


@pytest.mark.slow
def test_sizes_that_change_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, anchors, documents and windows differ; only rows of one and tiles of one are graphs of their own."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(
        attention_flex, "compiled_flex", lambda: torch.compile(flex_module.flex_attention, backend=counter, dynamic=True)
    )
    seen = []
    for n in range(6):
        slots, length, count, rows = 16, 150 + 130 * n, 20 + 11 * n, 2 + n % 2
        anchors = torch.randint(0, length, (rows, count), generator=torch.Generator().manual_seed(n)).sort().values
        mask = sparse_mask(anchors, slots, length, None, [None, 60, 70][n % 3])
        query = torch.randn(rows, 4, count * slots, 16)
        context, block = (KeyValue(*torch.randn(2, rows, 2, size, 16)) for size in (length, count * slots))
        flex_attention_of_blocks(query, context, block, mask, attention_flex.compiled_flex())
        seen.append(counter.frame_count)
    assert seen[2] == seen[-1] <= 3, seen
