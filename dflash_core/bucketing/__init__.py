"""Length buckets and the order of batches. numpy only; usable on its own, without the rest of the project.

`choose_boundaries` -> `plan_epoch` -> `plan_levels`: where buckets end, which batches an epoch has and in which order,
and numbers that describe the order. `order_levels` and `order_statistics` take the batches that a run has consumed.
"""

from dflash_core.bucketing.batch_cost import BATCH_OVERHEAD
from dflash_core.bucketing.boundaries import Strategy, choose_boundaries, validate_boundaries
from dflash_core.bucketing.diverse import shortest_possible_longest_run
from dflash_core.bucketing.order_levels import OrderLevels, StepStatistics, order_levels, plan_levels
from dflash_core.bucketing.order_stats import OrderStatistics, order_statistics, run_lengths
from dflash_core.bucketing.padding import BucketingEfficiency, padding_efficiency_table
from dflash_core.bucketing.plan import EpochPlan, PlanSettings, plan_epoch

__all__ = [
    "BATCH_OVERHEAD",
    "BucketingEfficiency",
    "EpochPlan",
    "OrderLevels",
    "OrderStatistics",
    "PlanSettings",
    "StepStatistics",
    "Strategy",
    "choose_boundaries",
    "order_levels",
    "order_statistics",
    "padding_efficiency_table",
    "plan_epoch",
    "plan_levels",
    "run_lengths",
    "shortest_possible_longest_run",
    "validate_boundaries",
]
