"""A discrete-event model of cells: throughput, waits and the best topology, before anything runs. numpy only.

`simulate` runs cells in simulated time; costs of batches come from a run (`read_costs`) or from a table (`Table`).
"""

from dflash_core.simulation.cell import BatchWork, CellSettings, StepWork
from dflash_core.simulation.figures import CARDS, MODELS, CardFigures, ModelFigures, find_card, find_model
from dflash_core.simulation.fit import MeasuredCosts, Terms, read_costs
from dflash_core.simulation.flops import Assumptions, DraftFigures, Table, too_much
from dflash_core.simulation.measured_run import check_same
from dflash_core.simulation.report import describe_simulation, explain, format_notes, shares
from dflash_core.simulation.request import SimulationRequest, parse_gpus
from dflash_core.simulation.simulate import CellTimes, Machine, Simulated, simulate
from dflash_core.simulation.topologies import MOST_CELLS, Layout, batches_per_step, core_layouts, gpu_layouts
from dflash_core.simulation.workload import (
    Sequences,
    Shapes,
    join_epochs,
    lengths_from_file,
    lognormal_lengths,
    shapes_of,
)

__all__ = [
    "CARDS",
    "MODELS",
    "MOST_CELLS",
    "Assumptions",
    "BatchWork",
    "CardFigures",
    "CellSettings",
    "CellTimes",
    "DraftFigures",
    "Layout",
    "Machine",
    "MeasuredCosts",
    "ModelFigures",
    "Sequences",
    "Shapes",
    "Simulated",
    "SimulationRequest",
    "StepWork",
    "Table",
    "Terms",
    "batches_per_step",
    "check_same",
    "core_layouts",
    "describe_simulation",
    "explain",
    "find_card",
    "find_model",
    "format_notes",
    "gpu_layouts",
    "join_epochs",
    "lengths_from_file",
    "lognormal_lengths",
    "parse_gpus",
    "read_costs",
    "shapes_of",
    "shares",
    "simulate",
    "too_much",
]
