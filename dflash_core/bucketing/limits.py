"""What a batch may hold: a token budget, a number of sequences, and what long sequences count for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_core.bucketing.lengths import LARGEST, IntArray
from dflash_core.errors import ConfigError, DataError

# Most that all batches of an epoch may cost: sums of costs stay exact, also as floats and with a cell's number below them.
MOST_COST = 2**52


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one batch.

    A padded batch obeys count * longest <= token_budget, count * cost_of(longest) <= token_budget and
    count <= max_sequences; a packed row obeys the same of the sums. Only the second rule has an exception: a sequence
    that is too dear for any batch stands alone.

    Attributes:
        token_budget: most padded tokens of a batch.
        max_sequences: most sequences of a batch; None for no bound.
        quadratic_length: length in tokens at which attention costs as much as all else; None leaves attention out.
    """

    token_budget: int
    max_sequences: int | None = None
    quadratic_length: int | None = None

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError(f"bucketing.token_budget: {self.token_budget} is not a positive number of tokens")
        for key, value in (("max_sequences", self.max_sequences), ("quadratic_length", self.quadratic_length)):
            if value is not None and value < 1:
                raise ConfigError(f"bucketing.{key}: {value} is below 1")
        for key in ("token_budget", "max_sequences", "quadratic_length"):
            if (getattr(self, key) or 0) > LARGEST:
                raise ConfigError(f"bucketing.{key}: {getattr(self, key)} is above {LARGEST}")

    def check(self, lengths: IntArray) -> None:
        """Raise `DataError`, naming the longest sequence, unless every sequence fits a batch of its own.

        Costs that cannot be counted in 64 bits are refused, too: enormous lengths, or a tiny `quadratic_length`.
        """
        longest = int(lengths.argmax())
        if lengths[longest] > self.token_budget:
            raise DataError(
                f"sequence {longest} has {lengths[longest]} tokens, more than bucketing.token_budget = {self.token_budget}"
            )
        length = int(lengths[longest])
        dearest = length if self.quadratic_length is None else length - (-length * length) // self.quadratic_length
        if len(lengths) * dearest > MOST_COST:
            because = "" if self.quadratic_length is None else f" with bucketing.quadratic_length = {self.quadratic_length}"
            raise DataError(f"{len(lengths)} sequences of up to {length} tokens cost more{because} than can be counted")

    def cost_of(self, lengths: IntArray) -> IntArray:
        """Modelled cost of one sequence, in tokens: L + L^2 / quadratic_length, rounded up.

        Whole numbers, so that sums do not depend on their order and plans are equal on every machine; rounded up, so that
        what is within the budget here is within it exactly.
        """
        if self.quadratic_length is None:
            return lengths
        return np.asarray(lengths - (-lengths * lengths) // self.quadratic_length)

    def share_of(self, lengths: IntArray) -> IntArray:
        """What one sequence takes of the budget: its cost, or all of it where the cost is more than a budget."""
        return np.minimum(self.cost_of(lengths), self.token_budget)

    def most_sequences(self, longest: IntArray) -> IntArray:
        """Most sequences of a padded batch, for each longest length (none above the budget)."""
        most = self.token_budget // self.share_of(longest)
        return most if self.max_sequences is None else np.minimum(most, self.max_sequences)

    def fewest_batches(self, shares: IntArray) -> int:
        """How many batches these shares fill when no room is left over."""
        filled = -(-int(shares.sum()) // self.token_budget)
        return filled if self.max_sequences is None else max(filled, -(-len(shares) // self.max_sequences))
