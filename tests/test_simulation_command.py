"""`dflash simulate` as a user meets it, and the layouts and reasons that it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core import experiment as root
from dflash_core.data import Dataset
from dflash_core.errors import ConfigError
from dflash_core.experiment_simulation import Simulation, simulate_experiment
from dflash_core.simulation import (
    MOST_CELLS,
    BatchWork,
    CellSettings,
    Layout,
    Machine,
    SimulationRequest,
    StepWork,
    batches_per_step,
    core_layouts,
    explain,
    gpu_layouts,
    parse_gpus,
    simulate,
)
from dflash_core.training.schedule import RunPlan
from tests.test_cli import dflash, only_line
from tests.test_simulation_costs import write_run

QWEN = ("--target-model", "qwen3-8b", "--mean-length", "100")
# The micro experiment taps 2 of the layers and has room for that few; at full size the table is asked for more.
SIZED = ("--set", "prefetch.max_bytes=1000000000")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: dflash(monkeypatch, capsys, "simulate", *words)


def test_a_topology_is_predicted_from_the_table_without_a_dataset(micro_experiment: Path, home: Path, answered: Any) -> None:
    code, out, err = answered(micro_experiment, *QWEN, *SIZED, "--gpus", "1,4")
    assert code == 0, err
    found = json.loads(out)
    one, four = found["machines"]
    assert [row["topology"] for row in one["topologies"]] == ["1 cell colocated"]
    assert {row["topology"] for row in four["topologies"]} == {
        "4 cells colocated", "2 cells x (1 + 1)", "1 cell x (2 + 1)", "1 cell x (3 + 1)",
    }  # fmt: skip
    speeds = [row["anchors_per_s"] for row in four["topologies"]]
    assert speeds == sorted(speeds, reverse=True)
    for row in four["topologies"]:
        assert sum(row["drafters"].values()) == pytest.approx(1.0, abs=1e-3)
        assert row["why"].split(":")[0] in err
    assert four["topologies"][0]["topology"] in err and "at an assumed 40% of its peak" in err
    assert "for the experiment file:" in err and "topology:" in four["experiment_lines"]
    assert not (home / "datasets").exists()


def test_the_lines_for_the_experiment_file_are_accepted_by_it(micro_experiment: Path, answered: Any) -> None:
    code, out, _ = answered(micro_experiment, *QWEN, *SIZED, "--gpus", "16")
    assert code == 0
    machine = json.loads(out)["machines"][0]
    best = machine["topologies"][0]
    assert best["batches_per_step"] >= best["cells"] > 2 and "changes the optimisation" in best["notes"][0]
    import yaml

    sections = yaml.safe_load("\n".join(machine["experiment_lines"]))
    words = [f"{section}.{key}={value}" for section, keys in sections.items() for key, value in keys.items()]
    config = root.load_experiment(micro_experiment, words)
    assert config.topology.cells * best["nodes"] == best["cells"]
    assert config.bucketing.batches_per_step == best["batches_per_step"]


def test_cores_are_predicted_from_a_run_and_the_prepared_dataset(micro_experiment: Path, tmp_path: Path, answered: Any) -> None:
    root.prepare(root.load_experiment(micro_experiment))
    run_dir = run_of(root.load_experiment(micro_experiment), tmp_path / "measured")
    words = (micro_experiment, "--measured", run_dir, "--cores", "2")
    code, out, err = answered(*words)
    assert code == 0, err
    found = json.loads(out)
    rows = {row["topology"]: row for row in found["machines"][0]["topologies"]}
    assert set(rows) == {"1 cell x (1 + 1)", "1 cell x (2 + 1)", "1 cell x (3 + 1)", "2 cells x (1 + 1)"}
    assert all(0 < row["cores_busy"] <= 1 for row in rows.values())
    assert found["costs"]["target"]["explained"] == pytest.approx(1.0)
    assert answered(*words)[1] == out, "the same question has the same answer"


def test_an_epoch_that_does_not_fill_a_step_is_noted(micro_experiment: Path, tmp_path: Path) -> None:
    config = root.load_experiment(micro_experiment, ["bucketing.batches_per_step=1000"])
    root.prepare(config)
    request = SimulationRequest(measured=run_of(config, tmp_path / "measured"), cores=1, steps=2)
    notes = simulate_experiment(config, request)["machines"][0]["topologies"][0]["notes"]
    assert len(notes) == 1 and "epochs are short: a step has" in notes[0]


def test_the_plan_is_the_one_that_a_run_trains(micro_experiment: Path, tmp_path: Path) -> None:
    config = root.load_experiment(micro_experiment, ["bucketing.batches_per_step=3", "train.max_steps=9", "train.num_epochs=9"])
    root.prepare(config)
    simulation = Simulation(config, SimulationRequest(measured=run_of(config, tmp_path / "run"), cores=2))
    lengths = Dataset.open(home_dataset(config)).lengths
    plan = RunPlan(lengths, simulation.edges, config.bucketing, config.train, 2)
    shapes = simulation.shapes(2, 3, 9)
    assert len(set(np.array(simulation.shapes(2, 3, 9).step).tolist())) == 9
    for cell in (0, 1):
        ours = [(s, t) for s, t, c in zip(shapes.step, shapes.tokens, shapes.cell, strict=True) if c == cell]
        trained = [(batch.step, int(lengths[list(batch.samples)].sum())) for batch in plan.batches(cell)]
        assert ours == trained
        works = simulation.works(shapes, 2, colocated=False)[cell]
        assert [work.step for work in works] == [step for step, _ in trained]


def run_of(config: Any, folder: Path, device: str = "cpu") -> Path:
    """A run with known costs, of an experiment on a device."""
    import yaml

    write_run(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "provenance.json").write_text(json.dumps({"devices": [device, device]}))
    return folder


def home_dataset(config: Any) -> Path:
    from dflash_core.experiment_data import dataset_folder

    return dataset_folder(config)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "x"), "--gpus x: expected a number"),
        (("--gpus", "0"), "--gpus: 0 is not from 1 to 1024"),
        (("--gpus", "5000"), "--gpus: 5000 is not from 1 to 1024"),
        (("--gpus", "8,0"), "--gpus: 0 is not from 1 to 1024"),
        (("--gpus", "8,4,8"), "--gpus 8,4,8: 8 stands twice"),
        ((*QWEN[:2], "--measured", "run"), "--target-model: --measured has the costs of the experiment's own target"),
        (("--gpus", "9..2"), "--gpus 9..2: no number in this range"),
        (("--gpus", "8", "--cores", "2", "--measured", "run"), "--cores: is for a machine without GPUs"),
        (("--cores", "2"), "--cores: what a core does is in no table"),
        (("--card", "TPU"), "--card TPU: not in the table"),
        ((*QWEN[:2], "--mean-length", "-3"), "--mean-length: -3.0 is not above 0"),
        ((*QWEN, "--peak-share", "1.5"), "--peak-share: 1.5 is not above 0 and at most 1"),
        ((*QWEN, "--supervised-share", "0"), "--supervised-share: 0.0 is not above 0"),
        ((*QWEN, "--length-sigma", "0"), "--length-sigma: 0.0 is not above 0"),
        (("--target-model", "gpt-5"), "--target-model gpt-5: not in the table"),
        ((), "no prepared dataset; run dflash prepare, or describe one with --mean-length or --lengths"),
        (("--measured", "nowhere"), "nowhere/config.yaml: "),
        (("--lengths", "nowhere.csv"), "nowhere.csv: cannot be read"),
        (("--set", "target.path=/nowhere"), "name one of the table with --target-model"),
        ((*QWEN, "--steps", "0"), "--steps"),
    ],
)
def test_bad_input_is_one_line(micro_experiment: Path, answered: Any, words: tuple[str, ...], told: str) -> None:
    code, out, err = answered(micro_experiment, *words)
    assert code == 2 and out == ""
    assert told in only_line(err)


def test_what_does_not_fit_a_card_is_left_out_with_the_reason(micro_experiment: Path, answered: Any) -> None:
    code, out, err = answered(micro_experiment, *QWEN, *SIZED, "--card", "RTX4090", "--gpus", "2")
    assert code == 0
    machine = json.loads(out)["machines"][0]
    assert [row["topology"] for row in machine["topologies"]] == ["1 cell x (1 + 1)"]
    assert "target and drafter on one card need 3" in machine["left_out"][0]["reason"] and "has 24.0; 16.4 are" in err
    code, out, _ = answered(
        micro_experiment, "--target-model", "qwen3-32b", "--mean-length", "100", "--card", "L40S", "--gpus", "2"
    )
    assert code == 0 and json.loads(out)["machines"][0]["topologies"] == []


@pytest.mark.parametrize(
    ("words", "device", "where", "told"),
    [
        (["target.dtype=bfloat16"], "cpu", ("--cores", "2"), "target.dtype is bfloat16 there and float32 here"),
        (["target.dtype=bfloat16"], "cpu", ("--cores", "2"), "target.feature_dtype is bfloat16 there and float32 here"),
        (["target.path=elsewhere"], "cpu", ("--cores", "2"), "target.path is elsewhere there and"),
        (["target.attn_implementation=eager"], "cpu", ("--cores", "2"), "target.attn_implementation is eager there and sdpa"),
        (["draft.num_layers=3"], "cpu", ("--cores", "2"), "draft.num_layers is 3 there and 2 here"),
        (["train.compute_dtype=bfloat16"], "cpu", ("--cores", "2"), "train.compute_dtype is bfloat16 there and float32 here"),
        ([], "cuda:1", ("--cores", "2"), "devices is GPU there and CPU here"),
        ([], "cpu", ("--gpus", "2"), "devices is CPU there and GPU here"),
    ],
)
def test_a_run_of_other_costs_is_refused(
    micro_experiment: Path, tmp_path: Path, answered: Any, words: list[str], device: str, where: tuple[str, str], told: str
) -> None:
    run_dir = run_of(root.load_experiment(micro_experiment, words), tmp_path / "run", device)
    code, out, err = answered(micro_experiment, "--measured", run_dir, *where)
    assert code == 2 and out == "" and told in only_line(err)


def test_a_run_of_the_same_costs_may_differ_in_the_rest(micro_experiment: Path, tmp_path: Path, answered: Any) -> None:
    words = ["target.feature_dtype=float32", "train.lr=0.1", "topology.targets_per_cell=3"]
    run_dir = run_of(root.load_experiment(micro_experiment, words), tmp_path / "run")
    code, _, err = answered(micro_experiment, "--measured", run_dir, "--cores", "2", "--mean-length", "100")
    assert code == 0, err
    (run_dir / "provenance.json").write_text('{"devices": 7}')
    code, _, err = answered(micro_experiment, "--measured", run_dir, "--cores", "2", "--mean-length", "100")
    assert code == 2 and "provenance.json: does not say on which devices" in only_line(err)
    (run_dir / "provenance.json").unlink()
    assert "provenance.json: cannot be read" in only_line(answered(micro_experiment, "--measured", run_dir, "--cores", "2")[2])


def test_memory_is_checked_with_measured_costs_too(micro_experiment: Path, tmp_path: Path, answered: Any) -> None:
    run_dir = run_of(root.load_experiment(micro_experiment), tmp_path / "run", "cuda:0")
    words = (micro_experiment, "--measured", run_dir, "--mean-length", "100", "--gpus", "2", "--card", "RTX4090")
    code, out, err = answered(*words)
    assert code == 0 and len(json.loads(out)["machines"][0]["topologies"]) == 2, err
    code, out, err = answered(*words, "--set", "prefetch.max_bytes=30000000000")
    machine = json.loads(out)["machines"][0]
    assert machine["topologies"] == [] and "nothing fits" in err
    assert "30.0 are bytes in flight: lower prefetch.max_bytes" in machine["left_out"][0]["reason"]


@pytest.mark.parametrize("model", [pytest.param("qwen3-32b", marks=pytest.mark.slow), "gemma3-27b"])
def test_the_shipped_experiment_of_27b_fits_its_cards(in_repository: Path, model: str) -> None:
    config = root.load_experiment(Path("flows/experiments/qwen3_27b_6x2.yaml"))
    request = SimulationRequest(gpus=(8,), target_model=model, mean_length=1500.0)
    simulation, shipped = Simulation(config, request), Layout(8, 1, 2, 3)
    assert simulation.does_not_fit(shipped, simulation._sample()) is None
    many = config.model_copy(update={"bucketing": config.bucketing.model_copy(update={"max_sequences": None})})
    simulation = Simulation(many, request)
    told = simulation.does_not_fit(shipped, simulation._sample())
    assert told is not None and "are kept activations: lower train.num_anchors" in told


@pytest.mark.slow
def test_more_of_the_run_before_and_behind_changes_nothing(in_repository: Path) -> None:
    """Windows that are filled with all that is in flight are in balance, and nobody runs dry."""
    config = root.load_experiment(Path("flows/experiments/qwen3_27b_6x2.yaml"), ["prefetch.max_bytes=6000000000"])
    simulation = Simulation(config, SimulationRequest(gpus=(64,), target_model="qwen3-8b", mean_length=1500.0, steps=16))
    for layout in (Layout(64, 8, 8, 1, colocated=True), Layout(64, 8, 4, 1)):
        first, last, steps = simulation.window(layout)
        assert first >= 2 * simulation.held(layout) * layout.num_cells / batches_per_step(24, layout.num_cells)
        known, _ = simulation.run(layout)
        longer, _ = simulation.run(layout, (first, last, steps + 24))
        assert known.duration_s == pytest.approx(longer.duration_s, rel=1e-3)
        assert known.target_busy == pytest.approx(longer.target_busy, abs=2e-3)


def test_bytes_in_flight_are_bounded_where_cells_are_many_and_only_there(in_repository: Path) -> None:
    config = root.load_experiment(Path("flows/experiments/qwen3_27b_6x2.yaml"))
    simulation = Simulation(config, SimulationRequest(gpus=(1024,), target_model="qwen3-8b", mean_length=1500.0))
    few, many = Layout(8, 1, 2, 3), Layout(1024, 128, 4, 1)
    assert simulation.settings(few).max_bytes == config.prefetch.max_bytes
    assert simulation.held(many) == 8 and simulation.settings(many).max_bytes < config.prefetch.max_bytes / 4
    assert simulation.window(many)[2] < 60


def test_the_table_is_read_last_and_explains_its_columns(
    micro_experiment: Path, home: Path, monkeypatch: pytest.MonkeyPatch, answered: Any
) -> None:
    import typer

    order: list[bool] = []
    echo = typer.echo
    monkeypatch.setattr(typer, "echo", lambda text, err=False: (order.append(err), echo(text, err=err)))
    code, _, err = answered(micro_experiment, *QWEN, *SIZED, "--gpus", "2")
    assert code == 0 and order[0] is False and all(order[1:])
    assert "tokens/s: with padding" in err and "barr.: for other cells" in err
    assert "target.dtype is float32 and train.compute_dtype is float32: that is several times slower" in err
    formats = ("--set", "target.dtype=bfloat16", "--set", "train.compute_dtype=bfloat16")
    assert "float32" not in answered(micro_experiment, *QWEN, *SIZED, "--gpus", "2", *formats)[2]


def test_a_poor_fit_is_warned_of(micro_experiment: Path, tmp_path: Path, answered: Any) -> None:
    run_dir = run_of(root.load_experiment(micro_experiment), tmp_path / "run")
    path = run_dir / "metrics" / "batches.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rng = np.random.default_rng(0)
    path.write_text("".join(json.dumps({**row, "target_busy_s": float(rng.exponential())}) + "\n" for row in rows))
    err = answered(micro_experiment, "--measured", run_dir, "--cores", "1", "--mean-length", "100")[2]
    warnings = [line for line in err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and warnings[0].startswith("warning: the fit of target explains")


def test_sequences_without_room_for_an_anchor_are_told(micro_experiment: Path, tmp_path: Path, answered: Any) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n1,9\n")
    code, out, err = answered(micro_experiment, *QWEN[:2], "--lengths", path, "--gpus", "2")
    assert code == 2 and out == "" and "no sequence has two supervised tokens" in only_line(err)


def test_more_cells_than_a_plan_holds_are_left_out() -> None:
    from dflash_core.bucketing.cells import MOST_CELLS as PLANNED

    assert MOST_CELLS == PLANNED
    layouts = gpu_layouts(1024)
    assert max(layout.num_cells for layout in layouts if layout.num_cells <= MOST_CELLS) == 1016


# layouts


@pytest.mark.parametrize("gpus", [*range(1, 26), 64, 1000, 1024])
def test_layouts_use_nodes_that_are_alike_and_no_more_gpus_than_there_are(gpus: int) -> None:
    layouts = gpu_layouts(gpus)
    assert len(set(layouts)) == len(layouts) and layouts[0].colocated
    for layout in layouts:
        assert layout.num_idle >= 0
        assert layout.cells_per_node * (1 if layout.colocated else layout.targets_per_cell + 1) <= 8
        assert layout.num_cells >= 1


def test_eight_gpus_have_the_layouts_that_one_thinks_of() -> None:
    found = {(layout.num_cells, layout.targets_per_cell, layout.num_idle) for layout in gpu_layouts(8) if not layout.colocated}
    assert found == {(4, 1, 0), (2, 2, 2), (2, 3, 0), (1, 4, 3), (1, 5, 2), (1, 6, 1), (1, 7, 0)}
    assert [layout.describe() for layout in gpu_layouts(1)] == ["1 cell colocated"]
    assert gpu_layouts(12)[0] == Layout(12, 2, 6, 1, colocated=True)


def test_cores_have_layouts_with_at_most_two_threads_a_core() -> None:
    assert [(x.num_cells, x.targets_per_cell) for x in core_layouts(2)] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [(x.num_cells, x.targets_per_cell) for x in core_layouts(1)] == [(1, 1)]


@pytest.mark.parametrize(("configured", "cells", "expected"), [(8, 1, 8), (8, 8, 8), (8, 9, 16), (3, 7, 9)])
def test_steps_grow_only_when_cells_would_have_no_batch(configured: int, cells: int, expected: int) -> None:
    assert batches_per_step(configured, cells) == expected


def test_ranges_and_lists_of_gpus() -> None:
    assert parse_gpus("1..1024")[:8] == (1, 2, 3, 4, 6, 8, 12, 16) and parse_gpus("1..1024")[-1] == 1024
    assert parse_gpus("5") == (5,) and parse_gpus("8,16") == (8, 16)
    with pytest.raises(ConfigError):
        parse_gpus("")


# reasons


def why(target: float, draft: float, targets: int = 1, load: float = 0.0, spread: float = 0.0, **sizes: Any) -> str:
    cells = [[BatchWork(step, 1, 1, load, target, draft * slow) for step in range(60)] for slow in (1.0, 1.0 + spread)]
    settings = CellSettings(targets, **{"max_bytes": 12, **sizes})
    run = simulate(cells, settings, StepWork(), Machine(), first_step=20, last_step=49)
    return explain(run, batches_in_budget=settings.max_bytes, batches_per_cell=1.0, cost_spread=spread)


def test_the_reason_names_what_bounds_a_topology() -> None:
    assert why(1.0, 3.0).startswith("draft-bound: drafters 100% busy, targets 3") and "enough" not in why(1.0, 3.0)
    assert why(1.0, 3.0, targets=3).endswith("targets 11%; 1 target per cell would be enough")
    assert why(3.0, 1.0).startswith("target-bound: drafters 33% busy, targets 100%; 3 targets per cell would")
    assert "the byte budget holds 1.0 batches" in why(1.0, 1.0, max_bytes=1)
    assert "prefetch.max_bytes is the bottleneck" in why(1.0, 1.0, max_bytes=1)
    assert why(0.1, 0.1, load=4.0, num_workers=1).startswith("loader-bound")
    uneven = why(0.1, 1.0, spread=0.5)
    assert uneven.startswith("step-bound: cells wait 17% of the time") and "padded tokens" in uneven
    assert uneven.endswith("raise bucketing.batches_per_step")


@pytest.mark.parametrize(("target", "draft"), [(3.0, 1.0), (1.0, 3.0), (1.0, 1.0)])
def test_a_shared_card_is_what_bounds_a_colocated_cell(target: float, draft: float) -> None:
    from dflash_core.simulation import shares

    cells = [[BatchWork(step, 1, 1, 0.0, target, draft) for step in range(80)]]
    step_work, machine = StepWork(0.0, 0.5), Machine(colocated=True)
    run = simulate(cells, CellSettings(1, max_bytes=12), step_work, machine, first_step=20, last_step=49)
    told = explain(run, batches_in_budget=12.0, batches_per_cell=1.0, cost_spread=0.0)
    whole = target + draft + 0.5
    assert told.startswith(f"card-bound: the shared card is 100% busy, {target / whole:.0%} with the target, {draft / whole:.0%}")
    found = shares(run)
    assert sum(found["drafters"].values()) == pytest.approx(1.0, abs=1e-3)
    busy = found["targets_busy"] + found["drafters"]["busy"] + found["drafters"]["optimizer_and_logging"]
    assert busy == pytest.approx(found["card_busy"], abs=1e-3) and found["card_busy"] == pytest.approx(1.0, abs=1e-3)


def test_a_colocated_cell_that_waits_for_files_is_not_bound_by_its_card() -> None:
    cells = [[BatchWork(step, 1, 1, 4.0, 0.1, 0.1) for step in range(60)]]
    settings = CellSettings(1, num_workers=1, max_bytes=12)
    run = simulate(cells, settings, StepWork(), Machine(colocated=True), first_step=20, last_step=49)
    assert explain(run, batches_in_budget=12.0, batches_per_cell=1.0, cost_spread=0.0).startswith("loader-bound")
    assert run.target_busy == pytest.approx(0.025)


def test_a_slow_join_and_busy_cores_are_reasons(micro_experiment: Path) -> None:
    cells = [[BatchWork(step, 1, 1, 0.0, 0.1, 1.0) for step in range(30)] for _ in range(2)]
    run = simulate(cells, CellSettings(1), StepWork(reduce_s=1.0), Machine())
    told = explain(run, batches_in_budget=9.0, batches_per_cell=1.0, cost_spread=0.0)
    assert told.startswith("join-bound: joining gradients takes 5")
    run = simulate(cells, CellSettings(1), StepWork(), Machine(cores=1))
    assert explain(run, batches_in_budget=9.0, batches_per_cell=1.0, cost_spread=0.0).startswith("core-bound: the cores are 100%")


def test_more_bandwidth_between_nodes_and_a_faster_card_are_never_slower(micro_experiment: Path) -> None:
    config = root.load_experiment(micro_experiment, ["prefetch.max_bytes=1000000000"])

    def best(card: str, share: float) -> float:
        from dflash_core.simulation import Assumptions

        request = SimulationRequest(
            gpus=(8,), card=card, target_model="qwen3-8b", mean_length=100.0, assumptions=Assumptions(peak_share=share), steps=4
        )
        return float(simulate_experiment(config, request)["machines"][0]["topologies"][0]["anchors_per_s"])

    assert best("A100-80", 0.4) < best("H200", 0.4) < best("H200", 0.6)
