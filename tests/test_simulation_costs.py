"""Costs: fitted to a run, and from the table of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.bucketing import plan_epoch
from dflash_core.errors import ConfigError, DataError
from dflash_core.simulation import (
    CARDS,
    MODELS,
    DraftFigures,
    ModelFigures,
    Sequences,
    Shapes,
    Table,
    Terms,
    find_card,
    find_model,
    lengths_from_file,
    lognormal_lengths,
    read_costs,
    shapes_of,
)
from dflash_core.simulation.fit import Crowding, fit, least_squares
from dflash_core.simulation.workload import mean_labelled

TARGET = {"constant": 2e-3, "padded_tokens": 3e-6, "squares": 4e-9}
DRAFT = {"constant": 1e-3, "padded_tokens": 2e-6, "anchors": 5e-5, "anchor_reach": 1e-8, "labelled": 0.0}
LOAD = {"constant": 1e-4, "sequences": 2e-5, "padded_tokens": 1e-8}


def costed(terms: dict[str, float], coefficients: dict[str, float]) -> float:
    return sum(value * terms[name] for name, value in coefficients.items())


def write_run(folder: Path, *, steps: int = 20, noise: float = 0.0, attempt: int = 0, slow: float = 1.0) -> Path:
    """A run whose costs are known. The first steps are slower, as they are when memory is being claimed."""
    rng = np.random.default_rng(steps)
    batches, ends = [], []
    for step in range(steps):
        for _ in range(3):
            rows, longest = int(rng.integers(1, 9)), int(rng.integers(10, 400))
            anchors = int(rng.integers(1, 30)) * rows
            terms = {
                "constant": 1.0,
                "sequences": rows,
                "padded_tokens": rows * longest,
                "squares": rows * longest**2,
                "anchors": anchors,
                "anchor_reach": anchors * longest,
                "labelled": anchors * 7,
            }
            factor = slow * (10.0 if step < 4 else 1.0) * (1 + noise * rng.standard_normal())
            batches.append(
                {
                    "step": step,
                    "attempt": attempt,
                    "num_sequences": rows,
                    "num_padded_tokens": rows * longest,
                    "max_seq_len": longest,
                    "num_anchors": anchors,
                    "num_supervised": anchors * 7,
                    "load_s": costed(terms, LOAD) * factor,
                    "target_busy_s": costed(terms, TARGET) * factor,
                    "draft_busy_s": costed(terms, DRAFT) * factor,
                    "target_forward_s": 0.3,
                }
            )
        ends.append(
            {
                "step": step,
                "attempt": attempt,
                "step_s": 0.5,
                "target_wait_s": 0.1,
                "forward_s": 0.15,
                "backward_s": 0.2,
                "reduce_s": 0.004,
                "optimizer_s": 0.03,
                "optimizer_busy_s": 0.02,
                "log_s": 0.003,
            }
        )
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    for stream, rows_ in (("batches", batches), ("steps", ends)):
        with (folder / "metrics" / f"{stream}.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_)
    return folder


# fitting


def test_the_fit_recovers_what_costs_were_made_of(tmp_path: Path) -> None:
    found = read_costs(write_run(tmp_path))
    for fitted, known in ((found.load, LOAD), (found.target, TARGET)):
        assert fitted.coefficients == pytest.approx(known, rel=1e-6)
        assert fitted.explained == pytest.approx(1.0) and fitted.typical_error < 1e-6
    # Labelled slots are 7 an anchor here, so that only the cost of both together can be told.
    draft = found.draft.coefficients
    assert draft["anchors"] + 7 * draft["labelled"] == pytest.approx(DRAFT["anchors"], rel=1e-6)
    assert found.num_batches == 16 * 3


def test_the_end_of_a_step_has_all_that_the_main_thread_does_once(tmp_path: Path) -> None:
    step = read_costs(write_run(tmp_path)).step
    # 0.5 - (0.1 + 0.15 + 0.2 + 0.004 + 0.03) is neither waited nor computed: 0.016, with 0.02 and 0.003 of optimizer and log.
    assert step.optimizer_s == pytest.approx(0.039)
    assert step.reduce_s == pytest.approx(0.004)


def test_crowding_is_what_the_devices_got_of_the_cores(tmp_path: Path) -> None:
    found = read_costs(write_run(tmp_path)).crowding
    # Steps of 0.5 s, with three forward passes of 0.3 s, and a drafter at work for 0.15 + 0.2 + 0.03 s.
    assert found.devices_active == pytest.approx((3 * 0.3 + 0.38) / 0.5)
    rows = [json.loads(line) for line in (tmp_path / "metrics" / "batches.jsonl").read_text().splitlines()]
    busy = sum(row["target_busy_s"] + row["draft_busy_s"] for row in rows if row["step"] >= 4) / 16 + 0.02
    assert found.cores_used == pytest.approx(busy / 0.5)


@pytest.mark.parametrize(("active", "used", "cores", "left"), [(2.5, 1.8, 2, 0.9), (1.9, 1.8, 2, 1.0), (3.0, 2.2, 2, 1.0)])
def test_only_a_crowded_run_tells_what_crowding_costs(active: float, used: float, cores: float, left: float) -> None:
    assert Crowding(active, used).left(cores) == pytest.approx(left)


def test_noise_moves_single_batches_but_not_their_sum(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=60, noise=0.2)
    found = read_costs(folder)
    rows = [json.loads(line) for line in (folder / "metrics" / "batches.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] >= 4]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    terms = Terms(
        columns["num_sequences"], columns["num_padded_tokens"], columns["num_padded_tokens"] * columns["max_seq_len"],
        columns["num_anchors"], columns["num_anchors"] * columns["max_seq_len"], columns["num_supervised"],
    )  # fmt: skip
    assert found.target.seconds(terms).sum() == pytest.approx(columns["target_busy_s"].sum(), rel=1e-9)
    assert 0.5 < found.target.explained < 1.0
    assert 0.02 < found.target.typical_error < 0.4


def test_all_batches_together_take_what_they_took_even_where_the_terms_do_not_fit() -> None:
    tokens = np.array([100.0, 400.0, 900.0, 2500.0])
    terms = Terms(*[tokens] * 6)
    seconds = np.sqrt(tokens)
    assert fit(terms, ["padded_tokens"], seconds).seconds(terms).sum() == pytest.approx(seconds.sum())


def test_a_step_that_was_trained_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path, slow=100.0)
    found = read_costs(write_run(tmp_path, attempt=1))
    assert found.num_batches == 16 * 3
    assert found.target.coefficients == pytest.approx(TARGET, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_no_coefficient_is_below_zero_and_none_could_be_better(seed: int, terms: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no slope where a coefficient is free, none downwards where it is held at 0."""
    rng = np.random.default_rng(seed)
    table, values = rng.standard_normal((20, terms)), rng.standard_normal(20)
    found = least_squares(table, values)
    slope = table.T @ (table @ found - values)
    assert (found >= 0).all()
    assert np.allclose(slope[found > 0], 0.0, atol=1e-6)
    assert (slope[found == 0] >= -1e-6).all()


def damage(folder: Path, stream: str, change: Any) -> None:
    path = folder / "metrics" / f"{stream}.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")


def without(name: str) -> Any:
    return lambda lines: [json.dumps({k: v for k, v in json.loads(line).items() if k != name}) for line in lines]


@pytest.mark.parametrize(
    ("stream", "change", "told"),
    [
        ("batches", lambda lines: ["{", *lines[1:]], r"batches.jsonl: row 1: not a row"),
        ("batches", lambda lines: [*lines[:5], "7", *lines[5:]], r"batches.jsonl: row 6: not a row"),
        ("batches", lambda lines: [lines[0].replace('"step": 0', '"step": 1e400'), *lines[1:]], r"row 1: not a row"),
        (
            "batches",
            lambda lines: [*lines[:20], lines[20].replace('"num_sequences": ', '"num_sequences": 1' + "0" * 400), *lines[21:]],
            "no numbers under num_sequences",
        ),
        ("batches", without("target_busy_s"), "no numbers under target_busy_s"),
        ("batches", lambda lines: [line.replace('"load_s": 0', '"load_s": NaN, "x": 0') for line in lines], "not finite"),
        ("batches", lambda lines: lines[:15], "3 batches behind the first 4 steps; 8 are needed"),
        ("steps", without("optimizer_busy_s"), "steps.jsonl: no numbers under optimizer_busy_s"),
        ("steps", lambda lines: lines[:4], "steps.jsonl: no step behind the first 4"),
    ],
)
def test_a_run_that_cannot_be_used_is_named(tmp_path: Path, stream: str, change: Any, told: str) -> None:
    damage(write_run(tmp_path), stream, change)
    with pytest.raises(DataError, match=told):
        read_costs(tmp_path)


def test_the_last_row_of_a_run_that_was_killed_may_be_torn(tmp_path: Path) -> None:
    damage(write_run(tmp_path), "batches", lambda lines: [*lines, lines[0][:20]])
    assert read_costs(tmp_path).num_batches == 16 * 3


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"batches.jsonl: cannot be read"):
        read_costs(tmp_path)


# the table


def one_batch(rows: int, length: int, anchors: int, block: int, labelled: float) -> Shapes:
    ints = {name: np.array([value]) for name, value in (("step", 0), ("cell", 0), ("rows", rows), ("sequences", rows))}
    floats = {
        "squares": rows * length**2,
        "blocks": rows * anchors,
        "block_reach": rows * anchors * length,
        "anchors": rows * anchors,
        "labelled": labelled,
    }
    return Shapes(
        **ints,
        tokens=np.array([rows * length]),
        padded_tokens=np.array([rows * length]),
        num_bytes=np.array([1]),
        **{name: np.array([float(value)]) for name, value in floats.items()},
    )


QWEN3_8B = Table(MODELS["qwen3-8b"], DraftFigures(5, 16, 5, 33, 12_288), CARDS["h200"])


def test_the_table_knows_the_public_size_of_a_qwen3_8b_drafter() -> None:
    assert QWEN3_8B.trainable == pytest.approx(1.05e9, rel=0.005)
    assert QWEN3_8B.feature_bytes == 40 * 1024


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-4b", 4.0), ("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen3-32b", 32.8), ("gemma3-27b", 27.0)]
)
def test_models_have_the_parameters_that_their_names_say(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_public_rates_of_one_trainer_and_one_target_are_near() -> None:
    """About 7 samples a second for a trainer with 256 anchors, and 55 for an 8B target. At the assumed 40 % of the peak the
    trainer comes out at 9.6 to 12, for ours multiplies by the head twice and public ones three times; the target's 55 need
    samples of some 500 tokens, at 3072 it is 9."""
    for length, trainer, target in ((3072, 9.6, 9.2), (512, 11.6, 58.0)):
        sample = one_batch(1, length, 256, 16, 256 * 15)
        assert 1 / QWEN3_8B.draft_s(sample, colocated=True)[0] == pytest.approx(trainer, rel=0.1)
        assert 1 / QWEN3_8B.target_s(sample)[0] == pytest.approx(target, rel=0.1)


def test_operations_are_those_that_torch_counts() -> None:
    """The draft itself, forward and backward, and a target's layers, in tiny, under torch's own counter."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3Model

    from dflash_core.model.draft import DFlashDraft
    from dflash_core.model.loss import block_loss
    from dflash_core.model.spec import DraftSpec

    spec = DraftSpec(32, 48, 2, 4, 2, 8, 64, 1e-6, 1e4, 512, True, 5, 4, 3, (1, 2))
    model = ModelFigures("tiny", 32, 5, 4, 2, 8, 48, 64, True, "")
    table = Table(model, DraftFigures(2, 4, 2, 2, 48), CARDS["h200"])
    rows, length, anchors = 90, 20, 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = DFlashDraft(spec).initialise(0)
        features, blocks = torch.randn(rows, length, 64), torch.randn(rows, anchors, 4, 32)
        config = Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        target = Qwen3Model(config)
    places = torch.full((rows, anchors), length)  # the last ones see the whole context
    weights = torch.ones(rows, anchors, 4)
    weights[..., 0] = 0
    labelled = int((weights > 0).sum())

    with FlopCounterMode(display=False) as counter:
        final = draft(features, blocks, places)
        block_loss(final, torch.randn(64, 32), torch.zeros(rows, anchors, 4, dtype=torch.long), weights).loss_sum.backward()
    counted = {
        name: sum(v for k, v in counter.get_flop_counts()["Global"].items() if name in str(k)) for name in ("mm", "attention")
    }
    shapes = one_batch(rows, length, anchors, 4, labelled)
    without_attention = one_batch(rows, length, anchors, 4, labelled)
    object.__setattr__(without_attention, "block_reach", np.zeros(1))
    attention = table.draft_flops(shapes)[0] - table.draft_flops(without_attention)[0]
    own_blocks = 3.5 * 4 * 2 * 4 * 8 * (rows * anchors * 4) * anchors * 4
    assert counted["mm"] == pytest.approx(table.draft_flops(shapes)[0] - attention - own_blocks, rel=0.01)
    assert attention == pytest.approx(3.5 * 4 * 2 * 4 * 8 * (rows * anchors * 4) * length)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target(input_ids=torch.zeros(2, 30, dtype=torch.long))
    linear = sum(v for k, v in counter.get_flop_counts()["Global"].items() if "mm" in str(k) and "bmm" not in str(k))
    batch = one_batch(2, 30, 1, 4, 0.0)
    assert linear == pytest.approx(table.target_flops(batch)[0] - 3 * 2 * 4 * 8 * 2 * 30**2, rel=0.01)


def test_a_faster_card_and_a_larger_share_are_faster_and_a_longer_batch_is_slower() -> None:
    short, long = one_batch(1, 512, 64, 16, 900.0), one_batch(1, 4096, 64, 16, 900.0)
    slow = Table(QWEN3_8B.target, QWEN3_8B.draft, CARDS["a100-80"])
    for which in ("target_s", "load_s"):
        assert getattr(QWEN3_8B, which)(long) > getattr(QWEN3_8B, which)(short)
    assert slow.target_s(long) > QWEN3_8B.target_s(long)
    assert slow.draft_s(long, colocated=True) > QWEN3_8B.draft_s(long, colocated=True)
    assert QWEN3_8B.draft_s(long, colocated=False) > QWEN3_8B.draft_s(long, colocated=True)


def test_a_tiny_batch_takes_as_long_as_reading_the_weights() -> None:
    read = 34 * QWEN3_8B.target.layer_parameters * 2 / 4.8e12
    assert QWEN3_8B.target_s(one_batch(1, 2, 1, 16, 1.0))[0] == pytest.approx(max(read, 15 * 34 * 5e-6))


def test_joining_gradients_costs_more_between_nodes_and_nothing_alone() -> None:
    alone, near, far = (QWEN3_8B.step_work(*where).reduce_s for where in ((1, 1), (2, 1), (16, 2)))
    assert alone == 0.0 < near and far > 5 * near
    assert near == pytest.approx(4 * QWEN3_8B.trainable / (450e9 * 0.8), rel=0.4)


def test_memory_is_told_by_place_and_grows_with_what_is_in_flight() -> None:
    batch = one_batch(2, 4096, 256, 16, 1000.0)
    few, many = (QWEN3_8B.memory_gb(batch, in_flight, 1) for in_flight in (0, 10**10))
    assert few["target"] == pytest.approx(2 * 8.19, rel=0.01)
    assert few["drafter"] > 16 * 1.05
    assert few["colocated"] > few["target"] + 16 * 1.05
    assert many["target"] - few["target"] == pytest.approx(10.0) and many["drafter"] == few["drafter"]


def test_kept_activations_are_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more layer of the draft under autocast, with hooks on saved tensors; only the context is told otherwise on a GPU."""
    import torch

    from dflash_core.model import draft as module
    from dflash_core.model.spec import DraftSpec

    monkeypatch.setitem(module.ANCHORS_PER_GROUP, "cpu", 128)
    hidden, wide, anchors, length = 64, 192, 128, 2

    def kept(layers: int) -> int:
        spec = DraftSpec(hidden, wide, layers, 4, 2, 16, 64, 1e-6, 1e4, 512, True, 5, 16, 3, (1, 2))
        draft = module.DFlashDraft(spec).initialise(0)
        own = {parameter.untyped_storage().data_ptr() for parameter in draft.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage
            return tensor

        blocks = torch.ones(1, anchors, 16, hidden, dtype=torch.bfloat16)
        features = torch.ones(1, length, 2 * hidden, dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
            final = draft(features, blocks, torch.full((1, anchors), length))
        assert final.shape == blocks.shape
        return sum(storage.nbytes() for storage in seen.values())

    model = ModelFigures("tiny", hidden, 5, 4, 2, 16, wide, 64, True, "")
    shapes = one_batch(1, length, anchors, 16, 900.0)
    told = [Table(model, DraftFigures(n, 16, 2, 2, wide), CARDS["h200"]).memory_terms(shapes, 0, 1)["drafter"] for n in (2, 3)]
    layer = (told[1]["kept activations"] - told[0]["kept activations"]) * 1e9
    assert layer == pytest.approx(kept(3) - kept(2), rel=0.02)  # the copy of the weights in bf16 is kept, too


def test_names_that_are_not_in_the_table_are_told_what_is() -> None:
    with pytest.raises(ConfigError, match=r"--card H2: not in the table; there are H100, H200"):
        find_card("H2")
    with pytest.raises(ConfigError, match=r"--target-model gpt: not in the table; there are qwen3-4b"):
        find_model("gpt")
    assert find_card("rtx 4090").name == "RTX4090" and find_model("Qwen3-8B").hidden_size == 4096


# workloads


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 30), st.integers(2, 8))
def test_mean_labelled_slots_are_those_of_all_possible_anchors(supervised: int, most: int, block: int) -> None:
    places = range(max(0, supervised - 1))
    slots = [min(block - 1, supervised - 1 - place) for place in places]
    anchors, labelled = mean_labelled(np.array([supervised]), most, block)
    assert anchors[0] == min(most, len(slots))
    assert labelled[0] == pytest.approx(anchors[0] * (sum(slots) / len(slots)) if slots else 0.0)


@pytest.mark.parametrize("strategy", ["padded", "packed"])
def test_shapes_are_those_of_the_plan(strategy: Any) -> None:
    lengths = np.random.default_rng(3).integers(5, 90, 200)
    plan = plan_epoch(lengths, [30, 60, 90], token_budget=180, batches_per_step=4, strategy=strategy)
    sequences = Sequences(lengths, lengths // 2)
    shapes = shapes_of(plan, sequences, num_anchors=9, block_size=4, size_of=lambda held, _: int(held.sum()), num_steps=5)
    assert len(shapes) == 20
    for i in range(20):
        held = lengths[plan.samples(i)]
        anchors = np.minimum(held // 2 - 1, 9)
        assert shapes.num_bytes[i] == shapes.tokens[i] == held.sum()
        assert shapes.anchors[i] == anchors.sum()
        if strategy == "padded":
            assert shapes.squares[i] == len(held) * held.max() ** 2
            assert shapes.blocks[i] == len(held) * max(1, anchors.max())
        else:
            assert shapes.squares[i] == (held**2).sum() and shapes.rows[i] == 1
            assert shapes.block_reach[i] == (anchors * held).sum()


def test_drawn_lengths_have_the_mean_asked_for_and_are_cut() -> None:
    drawn = lognormal_lengths(500.0, 100_000, 0.8, 50_000, seed=0)
    assert drawn.mean() == pytest.approx(500, rel=0.03)
    assert lognormal_lengths(500.0, 600, 0.8, 1000, seed=0).max() == 600


def test_lengths_are_drawn_as_a_file_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n10,300\n\n20,100\n5000,100\n7,0\n")
    drawn = lengths_from_file(path, 1000, 10_000, seed=1)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [10, 20, 1000]
    path.write_text("\ufefflength,count\n30,1\n", encoding="utf-8")  # as spreadsheets write it
    assert lengths_from_file(path, 1000, 3, seed=1).tolist() == [30, 30, 30]
    assert counts[0] / len(drawn) == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10,3\n", "row 1: expected the columns length,count"),
        ("", "row 1: expected"),
        ("length,count\n10,x\n", "row 2: '10,x' is not a length and a count"),
        ("length,count\n10\n", "row 2"),
        ("length,count\n10,1\n0,5\n", "row 3: a length below 1"),
        ("length,count\n10,0\n", "holds no sequence"),
        ("length,count\n1" + "0" * 26 + ",1\n", "row 2: a length or a count above"),
        ("length,count\n10,1" + "0" * 400 + "\n", "row 2: a length or a count above"),
    ],
)
def test_a_bad_file_of_lengths_is_named_with_its_row(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        lengths_from_file(path, 100, 10, seed=0)
