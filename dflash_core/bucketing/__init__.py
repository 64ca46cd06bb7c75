"""Length buckets and the order of batches. numpy only; usable on its own, without the rest of the project.

`choose_boundaries` -> `plan_epoch` -> `order_statistics`: where buckets end, which batches an epoch has and in which
order, and numbers that describe the order.
"""

from dflash_core.bucketing.boundaries import Strategy, choose_boundaries, validate_boundaries
from dflash_core.bucketing.order_stats import OrderStatistics, order_statistics, run_lengths
from dflash_core.bucketing.diverse import shortest_possible_longest_run
from dflash_core.bucketing.padding import BucketingEfficiency, padding_efficiency_table
from dflash_core.bucketing.plan import EpochPlan, PlanSettings, plan_epoch

__all__ = [
    "BucketingEfficiency",
    "EpochPlan",
    "OrderStatistics",
    "PlanSettings",
    "Strategy",
    "choose_boundaries",
    "order_statistics",
    "padding_efficiency_table",
    "plan_epoch",
    "run_lengths",
    "shortest_possible_longest_run",
    "validate_boundaries",
]
