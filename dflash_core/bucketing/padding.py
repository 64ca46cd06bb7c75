"""How many tokens padding costs: the expectation that the planner's random batches have, without making a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from numpy.typing import ArrayLike

from dflash_core.bucketing.batch_cost import CostModel
from dflash_core.bucketing.boundaries import Strategy, boundaries_up_to, check_num_buckets
from dflash_core.bucketing.lengths import check_lengths, count_lengths
from dflash_core.bucketing.limits import Limits


@dataclass(frozen=True, slots=True)
class BucketingEfficiency:
    """One row of `padding_efficiency_table`.

    Attributes:
        num_buckets: number of buckets asked for.
        edges: upper edges in tokens; fewer than `num_buckets` where that many do not occur or do not pay.
        padding_efficiency: expected real tokens per padded token, from 0 to 1.
        num_batches: batches per epoch.
        budget_fill: real tokens as a share of what the batches might hold, from 0 to 1.
        modelled_cost: the objective of `min_padding`, in budgets of tokens: expected modelled cost of all batches, and
            `BATCH_OVERHEAD` for each.
    """

    num_buckets: int
    edges: tuple[int, ...]
    padding_efficiency: float
    num_batches: int
    budget_fill: float
    modelled_cost: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def padding_efficiency_table(
    lengths: ArrayLike,
    token_budget: int,
    strategy: Strategy = "min_padding",
    max_buckets: int = 16,
    *,
    max_sequences: int | None = None,
    quadratic_length: int | None = None,
) -> tuple[BucketingEfficiency, ...]:
    """What 1, 2, ... `max_buckets` buckets cost, to choose their number by. The rows are about random batches: batches
    that are sorted in windows pad less, and packed rows not at all.

    Read the cost, which never rises with the number of `min_padding` buckets. The padding efficiency alone misleads: the
    longest sequence of a bucket limits its batches, so a single wide bucket pads little only because its batches are
    small and many, and that shows in `num_batches` and `budget_fill`.

    Raises:
        ConfigError: a limit or `max_buckets` is out of range, or the strategy is not known.
        DataError: there are no sequences, one is empty, or one is longer than the budget.
    """
    check_num_buckets(max_buckets)
    checked = check_lengths(lengths)
    limits = Limits(token_budget, max_sequences, quadratic_length)
    limits.check(checked)
    histogram = count_lengths(checked)
    choices = boundaries_up_to(histogram, max_buckets, strategy, limits)
    cost, padding = CostModel(histogram, limits), CostModel(histogram, limits, histogram.length)
    rows = []
    for k in range(1, max_buckets + 1):
        edges = choices[min(k, len(choices)) - 1]
        padded = padding.of(edges)
        num_batches = int(padded.num_batches.sum())
        rows.append(
            BucketingEfficiency(
                num_buckets=k,
                edges=edges,
                padding_efficiency=histogram.num_tokens / float(padded.cost.sum()),
                num_batches=num_batches,
                budget_fill=histogram.num_tokens / (num_batches * token_budget),
                modelled_cost=cost.total(edges) / token_budget,
            )
        )
    return tuple(rows)
