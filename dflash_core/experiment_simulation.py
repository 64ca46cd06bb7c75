"""The simulation of an experiment: its plan and its sizes, costs from a run or from a table, and all topologies compared.

Nothing here trains or reads tokens. The plan is the experiment's own, of its prepared dataset where there is one, else of
lengths that are drawn from a distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.bucketing import EpochPlan
from dflash_core.config import check_draft_fits
from dflash_core.errors import ConfigError, DataError
from dflash_core.experiment_data import dataset_folder, edges, target_folder
from dflash_core.experiment_file import ExperimentConfig, load_experiment
from dflash_core.simulation import (
    MOST_CELLS,
    BatchWork,
    CardFigures,
    CellSettings,
    DraftFigures,
    Layout,
    Machine,
    MeasuredCosts,
    ModelFigures,
    Sequences,
    Shapes,
    Simulated,
    SimulationRequest,
    StepWork,
    Table,
    Terms,
    batches_per_step,
    check_same,
    core_layouts,
    explain,
    find_card,
    find_model,
    format_notes,
    gpu_layouts,
    join_epochs,
    lengths_from_file,
    lognormal_lengths,
    read_costs,
    shapes_of,
    shares,
    simulate,
    too_much,
)

# Join of gradients between processes of one machine without GPUs, 10^9 bytes a second: gloo over the loopback device, measured.
CORES_LINK_GB_S = 0.5
# Batches by which sizes are judged before a layout is chosen; and batches in flight in all cells together, and in a cell for
# each of its devices, that are simulated at least, where there is room for them (see `Simulation.held`).
SAMPLE, HELD_IN_ALL, HELD_BY_DEVICE = 128, 1000, 4


class Simulation:
    """One experiment, ready to be simulated in any topology.

    Raises:
        ConfigError, DataError: from the constructor; one line that says what is missing.
    """

    def __init__(self, config: ExperimentConfig, request: SimulationRequest) -> None:
        request.check()
        self.config, self.request = config, request
        self.model = self._model()
        self.draft = self._draft()
        self.card: CardFigures = find_card(request.card)
        self.table = Table(self.model, self.draft, self.card, request.assumptions)
        self.measured: MeasuredCosts | None = None if request.measured is None else self._measured(request.measured)
        self.sequences, self.source = self._sequences()
        if int(self.sequences.supervised.max()) < 2:
            raise DataError(f"{self.source}: no sequence has two supervised tokens, as an anchor and its label need")
        self.edges = edges(config, self.sequences.length)
        self._shapes: dict[tuple[int, int, int], Shapes] = {}  # those planned last
        self._sampled: Shapes | None = None

    def _measured(self, run_dir: Path) -> MeasuredCosts:
        run, kind = load_experiment(run_dir / "config.yaml"), "CPU" if self.request.cores is not None else "GPU"
        check_same(run_dir, run.model_dump(mode="json"), self.config.model_dump(mode="json"), kind)
        return read_costs(run_dir)

    def _model(self) -> ModelFigures:
        if self.request.target_model is not None:
            return find_model(self.request.target_model)
        from dflash_core.model.target import read_target_shape

        try:
            shape = read_target_shape(target_folder(self.config))
        except ConfigError as error:
            hint = "" if self.request.measured else " (for a target that is not here, name one of the table with --target-model)"
            raise ConfigError(f"{error}{hint}") from None
        return ModelFigures(
            name=self.config.target.path,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            tied=shape.tie_word_embeddings,
            source="config.json of the experiment's target",
        )

    def _draft(self) -> DraftFigures:
        draft = self.config.draft
        try:
            ids = check_draft_fits(draft, self.model.num_layers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        width = draft.intermediate_size or self.model.intermediate_size
        return DraftFigures(draft.num_layers, draft.block_size, len(ids), ids[-1], width)

    def _sequences(self) -> tuple[Sequences, str]:
        request, config = self.request, self.config
        made_up = request.mean_length is not None or request.lengths_file is not None
        if not made_up:
            return self._dataset()
        longest, seed = config.data.max_length, config.train.seed
        most = max([*request.gpus, request.cores or 1])
        mean = request.mean_length or longest / 2
        per_batch = max(1.0, config.bucketing.token_budget / max(1.0, min(mean, longest)))
        count = int(2 * per_batch * batches_per_step(config.bucketing.batches_per_step, most) * (request.steps + 24))
        if request.lengths_file is not None:
            length, source = lengths_from_file(request.lengths_file, longest, count, seed), str(request.lengths_file)
        else:
            length = lognormal_lengths(mean, longest, request.length_sigma, count, seed)
            source = f"lognormal, mean {mean:g}, sigma {request.length_sigma:g}, cut at {longest}"
        supervised = np.rint(length * request.supervised_share).astype(np.int64)
        return Sequences(length, supervised), f"{source}; {request.supervised_share:.0%} supervised"

    def _dataset(self) -> tuple[Sequences, str]:
        from dflash_core.data import Dataset

        folder = dataset_folder(self.config)
        if not folder.is_dir():
            raise DataError(f"{folder}: no prepared dataset; run dflash prepare, or describe one with --mean-length or --lengths")
        dataset = Dataset.open(folder)
        if len(dataset) == 0:
            raise DataError(f"{folder}: the dataset is empty")
        return Sequences(dataset.lengths.astype(np.int64), dataset.num_supervised.astype(np.int64)), str(folder)

    @property
    def feature_bytes(self) -> int:
        """Captured states of one position, as configured: the taps, and for soft labels the last state."""
        from dflash_core.model.loss import SOFT_LOSSES

        return (
            (self.draft.num_taps + (self.config.train.loss in SOFT_LOSSES))
            * self.model.hidden_size
            * self.config.target.state_bytes
        )

    def shapes(self, num_cells: int, per_step: int, num_steps: int) -> Shapes:
        """The batches of the first steps, planned for a number of cells."""
        key = (num_cells, per_step, num_steps)
        if key not in self._shapes:
            self._shapes = {key: join_epochs(self._plans(num_cells, per_step), self._make_shapes(), num_steps)}
        return self._shapes[key]

    def _plans(self, num_cells: int, per_step: int) -> Iterator[EpochPlan]:
        from dflash_core.training.schedule import plan_configured

        bucketing = self.config.bucketing.model_copy(update={"batches_per_step": per_step})
        for epoch in itertools.count():
            yield plan_configured(
                self.sequences.length, self.edges, bucketing, num_cells=num_cells, seed=self.config.train.seed, epoch=epoch
            )

    def _make_shapes(self) -> Callable[[EpochPlan, int], Shapes]:
        from dflash_core.training.collate import batch_bytes

        anchors, block, feature = self.config.train.num_anchors, self.draft.block_size, self.feature_bytes

        def make(plan: EpochPlan, num_steps: int) -> Shapes:
            return shapes_of(
                plan,
                self.sequences,
                num_anchors=anchors,
                block_size=block,
                size_of=lambda lengths, packed: batch_bytes(lengths, packed, anchors, block, feature),
                num_steps=num_steps,
            )

        return make

    def works(self, shapes: Shapes, num_cells: int, colocated: bool) -> list[list[BatchWork]]:
        """The batches of every cell, with their costs."""
        if self.measured is not None:
            terms = Terms.of(shapes)
            load, target, draft = (
                cost.seconds(terms) for cost in (self.measured.load, self.measured.target, self.measured.draft)
            )
        else:
            load, target = self.table.load_s(shapes), self.table.target_s(shapes)
            draft = self.table.draft_s(shapes, colocated=colocated)
        columns = (shapes.step, shapes.num_bytes, shapes.padded_tokens, load, target, draft)
        cells: list[list[BatchWork]] = [[] for _ in range(num_cells)]
        for cell, *values in zip(shapes.cell.tolist(), *(column.tolist() for column in columns), strict=True):
            cells[cell].append(BatchWork(*values))
        return cells

    def step_work(self, layout: Layout) -> StepWork:
        """The end of a step in a layout."""
        joined = self.table.step_work(layout.num_cells, layout.num_nodes)
        if self.measured is None:
            return joined
        own = self.measured.step
        if layout.num_cells == 1:
            return own
        if layout.num_gpus:
            return StepWork(own.reduce_s + joined.reduce_s, own.optimizer_s)
        ring = 2.0 * (layout.num_cells - 1) / layout.num_cells * 4.0 * self.table.trainable / (CORES_LINK_GB_S * 1e9)
        return StepWork(own.reduce_s + ring, own.optimizer_s)

    def settings(self, layout: Layout) -> CellSettings:
        """Sizes and policy of a cell; bytes in flight are bounded to what `window` fills."""
        prefetch = self.config.prefetch
        most = min(prefetch.max_bytes, math.ceil(self.held(layout) * float(self._sample().num_bytes.mean())))
        return CellSettings(layout.targets_per_cell, prefetch.num_workers, prefetch.queue_batches, most, prefetch.dispatch)

    def machine(self, layout: Layout) -> Machine:
        if layout.num_gpus:
            return Machine(colocated=layout.colocated)
        cores = float(self.request.cores or 1)
        return Machine(cores=cores, crowded=1.0 if self.measured is None else self.measured.crowding.left(cores))

    def does_not_fit(self, layout: Layout, shapes: Shapes) -> str | None:
        """Why the layout cannot be, in words; None where it can."""
        if not layout.num_gpus:
            return None
        return too_much(self.table, shapes, self.config.prefetch.max_bytes, layout.num_cells, colocated=layout.colocated)

    def held(self, layout: Layout) -> float:
        """Mean batches in flight in a cell: what the byte budget holds, and in sweeps of many cells no more than a few for each
        device of the cell. More would only even out longer stretches of dear and cheap batches."""
        budget = self.config.prefetch.max_bytes / float(self._sample().num_bytes.mean())
        return min(budget, max(HELD_BY_DEVICE * (layout.targets_per_cell + 1), HELD_IN_ALL / layout.num_cells))

    def window(self, layout: Layout) -> tuple[int, int, int]:
        """First and last step that are counted, and the number of steps in all.

        Before them as many batches as are in flight (`held`) go through the pipeline at least twice, and behind them there
        are as many once more, so that the targets are busy to the end.
        """
        per_step = batches_per_step(self.config.bucketing.batches_per_step, layout.num_cells)
        fill = 2 + math.ceil(self.held(layout) * layout.num_cells / per_step)
        return 2 * fill, 2 * fill + self.request.steps - 1, 3 * fill + self.request.steps

    def run(self, layout: Layout, window: tuple[int, int, int] | None = None) -> tuple[Simulated, Shapes]:
        """Simulate a layout: the run, and the batches of its counted steps; see `window`."""
        first_step, last_step, num_steps = window or self.window(layout)
        per_step = batches_per_step(self.config.bucketing.batches_per_step, layout.num_cells)
        shapes = self.shapes(layout.num_cells, per_step, num_steps)
        run = simulate(
            self.works(shapes, layout.num_cells, layout.colocated),
            self.settings(layout),
            self.step_work(layout),
            self.machine(layout),
            first_step=first_step,
            last_step=last_step,
        )
        return run, shapes.only((shapes.step >= first_step) & (shapes.step <= last_step))

    def _sample(self) -> Shapes:
        """Some batches of the experiment, planned for one cell."""
        if self._sampled is None:
            per_step = self.config.bucketing.batches_per_step
            self._sampled = join_epochs(self._plans(1, per_step), self._make_shapes(), math.ceil(SAMPLE / per_step))
        return self._sampled

    def row(self, layout: Layout) -> dict[str, Any]:
        """What is told of a layout."""
        run, shapes = self.run(layout)
        per_step = batches_per_step(self.config.bucketing.batches_per_step, layout.num_cells)
        prefetch = self.config.prefetch
        held = prefetch.max_bytes / float(shapes.num_bytes.mean())
        notes = []
        if per_step != self.config.bucketing.batches_per_step:
            notes.append(
                f"bucketing.batches_per_step is {per_step} instead of {self.config.bucketing.batches_per_step}, so that every"
                " cell has a batch: that changes the optimisation"
            )
        mean_step = len(shapes) / run.num_steps
        if mean_step < 0.9 * per_step:
            notes.append(f"epochs are short: a step has {mean_step:.1f} batches on average instead of {per_step}")
        found = {
            name: float(getattr(shapes, column).sum()) / run.duration_s
            for name, column in (
                ("tokens_per_s", "tokens"),
                ("padded_tokens_per_s", "padded_tokens"),
                ("sequences_per_s", "sequences"),
                ("anchors_per_s", "anchors"),
                ("supervised_slots_per_s", "labelled"),
            )
        }
        return {
            "topology": layout.describe(),
            "gpus": layout.num_gpus,
            "nodes": layout.num_nodes,
            "cells": layout.num_cells,
            "targets_per_cell": layout.targets_per_cell,
            "colocated": layout.colocated,
            "idle_gpus": max(0, layout.num_idle),
            "batches_per_step": per_step,
            "steps_per_s": run.num_steps / run.duration_s,
            **found,
            **shares(run),
            "batches_in_byte_budget": round(held, 2),
            "why": explain(
                run,
                batches_in_budget=held,
                batches_per_cell=per_step / layout.num_cells,
                cost_spread=self._cost_spread(shapes, layout.colocated),
            ),
            "notes": notes,
        }

    def _cost_spread(self, shapes: Shapes, colocated: bool) -> float:
        """How far the drafter's cost of a batch is from its padded tokens, by which cells are balanced: a share."""
        works = self.works(shapes, int(shapes.cell.max()) + 1, colocated)
        ratio = np.array([work.draft_s / work.num_padded_tokens for cell in works for work in cell])
        return float(ratio.std() / ratio.mean()) if ratio.mean() > 0 else 0.0

    def compare(self, layouts: Sequence[Layout]) -> dict[str, Any]:
        """Rows of all layouts that can be, by anchors a second, best first, and why others are left out."""
        rows, left_out = [], []
        for layout in sorted(layouts, key=lambda one: one.num_cells):  # layouts with as many cells share their plan
            if layout.num_cells > MOST_CELLS:
                reason: str | None = f"a plan holds at most {MOST_CELLS} cells"
            else:
                reason = self.does_not_fit(layout, self._sample())
            if reason is None:
                rows.append((layout, self.row(layout)))
            else:
                left_out.append({"topology": layout.describe(), "reason": reason})
        rows.sort(key=lambda pair: (-pair[1]["anchors_per_s"], pair[0].num_cells))
        lines = self.experiment_lines(rows[0][0], rows[0][1]) if rows else []
        return {"topologies": [row for _, row in rows], "left_out": left_out, "experiment_lines": lines}

    def experiment_lines(self, layout: Layout, row: dict[str, Any]) -> list[str]:
        """What to put into the experiment file for a layout."""
        lines = [] if layout.num_nodes == 1 else [f"# torchrun on {layout.num_nodes} nodes; cells are those of one node"]
        lines += ["topology:", f"  cells: {layout.cells_per_node}", f"  targets_per_cell: {layout.targets_per_cell}"]
        if layout.num_gpus:
            lines.append(f"  colocated: {str(layout.colocated).lower()}")
        if row["batches_per_step"] != self.config.bucketing.batches_per_step:
            lines += ["bucketing:", f"  batches_per_step: {row['batches_per_step']}"]
        return lines


def simulate_experiment(config: ExperimentConfig, request: SimulationRequest) -> dict[str, Any]:
    """Compare all topologies of each number of GPUs, or of the cores of one machine.

    Returns:
        `costs` (where they are from), `lengths`, and `machines`: for each number of GPUs, or the cores, `topologies` (best
        first), `left_out` with reasons, and `experiment_lines` of the best.

    Raises:
        ConfigError, DataError: something asked for is not there, or does not fit.
    """
    if not request.gpus and request.cores is None:
        raise ConfigError("--gpus or --cores: one of them is needed")
    simulation = Simulation(config, request)
    machines = []
    if request.cores is not None:
        machines.append({"cores": request.cores, **simulation.compare(core_layouts(request.cores))})
    for gpus in request.gpus:
        machines.append({"gpus": gpus, **simulation.compare(gpu_layouts(gpus))})
    measured, draft = simulation.measured, simulation.table
    return {
        "experiment": config.name,
        "lengths": simulation.source,
        "num_sequences": len(simulation.sequences.length),
        "target": simulation.model.name,
        "trainable_parameters": draft.trainable,
        "feature_bytes_per_token": simulation.feature_bytes,
        "costs": {"measured": str(request.measured), **measured.as_dict()} if measured else _table_costs(simulation),
        "notes": [] if measured else format_notes(config.target.dtype, config.train.compute_dtype),
        "machines": machines,
    }


def _table_costs(simulation: Simulation) -> dict[str, Any]:
    return {
        "table": simulation.card.name,
        "card_source": simulation.card.source,
        "target_source": simulation.model.source,
        "assumptions": asdict(simulation.request.assumptions),
    }
