"""What serve_check.py compares: our draft-verify loop against vLLM's own counters, text by text and slot by slot.

Pure functions over what the two halves wrote; no engine, no torch. Acceptance length is tokens per draft, +1 included:
1 + accepted / drafts for vLLM, whose counters know no tokens of its own. Both sides count a last round whole, as vLLM does, with
what it kept behind an end token or the limit; the same as `dflash evaluate` counts is shown beside it.

Where vLLM misread the drafter's norm weights (serve_check_vllm.py, `norm_misread`) there are two results of it. What is judged
is the corrected one, which says whether drafter, export and loop are right; vLLM as it comes is shown beside it, or is judged
itself on demand (`Limits.as_shipped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Incomparable(Exception):
    """What vLLM wrote lacks something the comparison needs; the text says what."""


@dataclass(frozen=True)
class Figures:
    """What one side counted: its drafts, the draft tokens it kept, and of these those in slot 1, 2, .. B - 1."""

    num_drafts: int
    num_accepted: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_drafts

    def survival(self) -> list[float]:
        """Share of drafts in which slots 1 .. k were all kept, for k = 1 .. B - 1."""
        return [kept / self.num_drafts for kept in self.accepted_per_position]


@dataclass(frozen=True)
class Limits:
    """What must hold: largest difference of acceptance length (a share of ours), its minimum, fewest prompts.

    `as_shipped`: of vLLM as it comes, even where it misreads the drafter.
    """

    tolerance: float
    minimum: float
    prompts: int
    as_shipped: bool = False


@dataclass(frozen=True)
class Rounds:
    """Rounds that begin at the same token on both sides, and how many of them kept another number of draft tokens."""

    common: int
    different: int


@dataclass(frozen=True)
class Served:
    """One result of vLLM: figures by its counters; the rest is None where it published no rounds.

    `cut`: the last round of a request up to the end token; `inner`: without it; `equal`: prompts whose rounds are all ours.
    """

    figures: Figures
    cut: Figures | None
    inner: Figures | None
    equal: int | None
    rounds: Rounds | None


@dataclass(frozen=True)
class Comparison:
    """Both sides' figures, and everything that misses a limit.

    Attributes:
        ours_cut: as `dflash evaluate` counts; `ours_inner`: without the last round of each request.
        judged, other: vLLM's result that is judged, and its other one, None where it has but one.
        corrected: the judged one is with vLLM's norm corrected.
    """

    ours: Figures
    ours_cut: Figures
    ours_inner: Figures | None
    judged: Served
    other: Served | None
    corrected: bool
    num_prompts: int
    equal_texts: int
    failures: tuple[str, ...]

    @property
    def theirs(self) -> Figures:
        return self.judged.figures

    @property
    def difference(self) -> float:
        """vLLM's acceptance length against ours, as a share of ours."""
        return self.theirs.acceptance_length / self.ours.acceptance_length - 1


def figures_from_rounds(rounds: Sequence[Sequence[int]], block_size: int) -> Figures | None:
    """Figures of rounds that are known one by one (draft tokens kept in each); None without any."""
    flat = [kept for one in rounds for kept in one]
    if not flat:
        return None
    return Figures(len(flat), sum(flat), tuple(sum(kept >= k for kept in flat) for k in range(1, block_size)))


def figures_from_counters(counters: dict[str, Any], block_size: int) -> Figures:
    """Figures from vLLM's own counters.

    Raises:
        Incomparable: a counter is missing, nothing was drafted, or the counters contradict each other.
    """
    for key in ("num_drafts", "num_accepted_tokens", "accepted_per_position"):
        if key not in counters:
            raise Incomparable(f"vLLM published no counter {key}")
    positions = tuple(counters["accepted_per_position"])
    if not counters["num_drafts"]:
        raise Incomparable("vLLM drafted nothing: its counter num_drafts stayed 0")
    if len(positions) != block_size - 1:
        raise Incomparable(f"vLLM counted {len(positions)} positions of a draft that has {block_size - 1}")
    if sum(positions) != counters["num_accepted_tokens"]:
        raise Incomparable(
            f"vLLM's counters contradict each other: {counters['num_accepted_tokens']} tokens, {sum(positions)} by position"
        )
    return Figures(counters["num_drafts"], counters["num_accepted_tokens"], positions)


def count_rounds(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Rounds:
    """Compare rounds by the place in the text where they begin; after one that differs the two sides may not meet again."""
    common = different = 0
    for pair in zip(ours, theirs, strict=True):
        at_place: list[dict[int, int]] = []
        for rounds in pair:
            place, kept_at = 1, {}
            for kept in rounds:
                kept_at[place] = kept
                place += kept + 1
            at_place.append(kept_at)
        places = at_place[0].keys() & at_place[1].keys()
        common += len(places)
        different += sum(at_place[0][place] != at_place[1][place] for place in places)
    return Rounds(common, different)


def cut_at_end(rounds: Sequence[int], tokens: Sequence[int], end_tokens: Sequence[int]) -> list[int]:
    """A request's rounds with the last one up to the end token that the answer ends with, as our loop counts."""
    if not rounds or tokens[-1] not in end_tokens:
        return list(rounds)
    earlier = list(rounds[:-1])
    return [*earlier, min(rounds[-1], len(tokens) - 2 - sum(kept + 1 for kept in earlier))]


def _served(request: dict[str, Any], result: dict[str, Any]) -> Served:
    """Figures of one result of vLLM."""
    size, rounds = request["block_size"], result["rounds"]
    figures = figures_from_counters(result["counters"], size)
    if any(one is None for one in rounds):
        return Served(figures, None, None, None, None)
    ours = [item["accepted_whole"] for item in request["prompts"]]
    cut = [cut_at_end(kept, text, request["eos_token_ids"]) for kept, text in zip(rounds, result["tokens"], strict=True)]
    return Served(
        figures,
        figures_from_rounds(cut, size),
        figures_from_rounds([kept[:-1] for kept in rounds], size),
        sum(list(a) == list(b) for a, b in zip(ours, rounds, strict=True)),
        count_rounds(ours, rounds),
    )


def unequal(ids: Sequence[str], left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> list[str]:
    """Prompts whose two texts differ, each with the place where they part."""
    found = []
    for name, a, b in zip(ids, left, right, strict=True):
        if list(a) != list(b):
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(f"{name} (token {place} of {len(a)} and {len(b)})")
    return found


def _text_failures(request: dict[str, Any], plain: dict[str, Any], speculative: dict[str, Any]) -> tuple[list[str], int]:
    """What to say about texts that differ, and how many prompts have the same text in all of them."""
    ids = [item["id"] for item in request["prompts"]]
    texts = {
        "our plain greedy": [item["plain_tokens"] for item in request["prompts"]],
        "vLLM plain greedy": plain["tokens"],
        "vLLM with the drafter": speculative["tokens"],
    }
    if "corrected" in speculative:
        texts["vLLM with the drafter, corrected"] = speculative["corrected"]["tokens"]
    failures, bad = [], set()
    ours = [item["tokens"] for item in request["prompts"]]
    for name, others in texts.items():
        if len(others) != len(ids):
            raise Incomparable(f"{name}: {len(others)} texts for {len(ids)} prompts")
        different = unequal(ids, ours, others)
        bad |= {line.rpartition(" (token ")[0] for line in different}
        if different:
            listed = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "")
            failures.append(f"{len(different)} of {len(ids)} texts differ between our draft-verify loop and {name}: {listed}")
    return failures, len(ids) - len(bad)


def compare(request: dict[str, Any], plain: dict[str, Any], speculative: dict[str, Any], limits: Limits) -> Comparison:
    """Hold what vLLM did against what we did.

    Args:
        request: what the project's half wrote: prompts with our tokens, plain tokens and rounds.
        plain, speculative: what the serving half wrote without and with the drafter.

    Raises:
        Incomparable: something is missing, so that there is nothing to compare.
    """
    block_size, prompts = request["block_size"], request["prompts"]
    our_rounds = [item["accepted_whole"] for item in prompts]
    ours = figures_from_rounds(our_rounds, block_size)
    ours_cut = figures_from_rounds([item["accepted"] for item in prompts], block_size)
    if ours is None or ours_cut is None:
        raise Incomparable("our loop had no round: every answer was one token")
    failures, equal_texts = _text_failures(request, plain, speculative)
    results = [_served(request, speculative)]
    corrected = "corrected" in speculative
    if corrected:
        results.insert(1 if limits.as_shipped else 0, _served(request, speculative["corrected"]))
    result = Comparison(
        ours=ours,
        ours_cut=ours_cut,
        ours_inner=figures_from_rounds([rounds[:-1] for rounds in our_rounds], block_size),
        judged=results[0],
        other=results[1] if corrected else None,
        corrected=corrected and not limits.as_shipped,
        num_prompts=len(prompts),
        equal_texts=equal_texts,
        failures=(),
    )
    failures += _limit_failures(result, limits)
    return Comparison(**{**vars(result), "failures": tuple(failures)})


def _limit_failures(result: Comparison, limits: Limits) -> list[str]:
    failures = []
    ours, theirs = result.ours.acceptance_length, result.theirs.acceptance_length
    if result.num_prompts < limits.prompts:
        failures.append(f"{result.num_prompts} prompts; at least {limits.prompts} are asked for")
    if abs(result.difference) > limits.tolerance:
        failures.append(
            f"acceptance length: vLLM counts {theirs:.3f}, we {ours:.3f}, a difference of {result.difference:+.1%} "
            f"(allowed: {limits.tolerance:.1%})"
        )
    if theirs < limits.minimum:
        failures.append(f"acceptance length: vLLM counts {theirs:.3f}; at least {limits.minimum:g} is asked for")
    return failures


def table(result: Comparison) -> list[str]:
    """The figures as a Markdown table."""
    lines = ["| | our loop | vLLM | difference |", "|---|---|---|---|"]

    def row(name: str, ours: float, theirs: float, digits: int = 3) -> None:
        share = f"{theirs / ours - 1:+.1%}" if ours else "-"
        lines.append(f"| {name} | {ours:.{digits}f} | {theirs:.{digits}f} | {share} |")

    row("acceptance length, +1 included", result.ours.acceptance_length, result.theirs.acceptance_length)
    if result.other:
        name = "with vLLM as it comes" if result.corrected else "with vLLM corrected"
        row(f"the same {name}", result.ours.acceptance_length, result.other.figures.acceptance_length)
    if result.judged.cut:
        row(
            "a last round counted up to the end token (`dflash evaluate`)",
            result.ours_cut.acceptance_length,
            result.judged.cut.acceptance_length,
        )
    if result.ours_inner and result.judged.inner:
        row(
            "without each request's last round",
            result.ours_inner.acceptance_length,
            result.judged.inner.acceptance_length,
        )
    row("drafts", result.ours.num_drafts, result.theirs.num_drafts, 0)
    row("draft tokens kept", result.ours.num_accepted, result.theirs.num_accepted, 0)
    for k, (ours, theirs) in enumerate(zip(result.ours.survival(), result.theirs.survival(), strict=True), start=1):
        row(f"slots 1 to {k} kept, share of drafts" if k > 1 else "slot 1 kept, share of drafts", ours, theirs)
    return lines


def remarks(result: Comparison) -> list[str]:
    """What to read beside the table, one paragraph a line."""

    def of(served: Served) -> str:
        if served.rounds is None or served.equal is None:
            return "vLLM published no rounds"
        return (
            f"{served.rounds.different} of {served.rounds.common} rounds that begin at the same token kept another number of "
            f"draft tokens; all rounds are the same in {served.equal} of {result.num_prompts} prompts"
        )

    lines = [f"Round by round: {of(result.judged)}."]
    if result.other:
        which = ("corrected", "as it comes") if result.corrected else ("as it comes", "corrected")
        lines += [
            f"This vLLM normalises the context keys of every draft layer with the first layer's weights (benchmarks/README.md). "
            f"Judged is vLLM {which[0]}{' in that one function' if result.corrected else ''}; vLLM {which[1]} counts "
            f"{result.other.figures.acceptance_length:.3f}, {of(result.other)}."
        ]
    return lines
