"""What is always blamed, in the summary: checkpoints, epoch starts, resumes, changes of the learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_core.analysis.findings.cleared import Cleared
from dflash_core.analysis.findings.reset_causes import NAMES
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.summary import FEW_RUNS, signed

MAX_NAMED = 3


def suspect_lines(runs: Sequence[RunAnalysis]) -> list[str]:
    """For the summary: one sentence on the events behind which no run's loss is measurably off, one on each of the others.

    An event that a finding names as the cause of resets is not cleared, whatever its mean effect.
    """
    not_it, lines = [], []
    for key in NAMES:
        known = [(run, one) for run in runs for one in run.cleared if one.key == key]
        guilty = [(run, one) for run, one in known if not one.is_clear]
        if known and not guilty and not any(_is_blamed(key, run) for run in runs):
            not_it.append((NAMES[key], len(known)))
        elif guilty:
            lines.append(_off(key, guilty, len(known)))
    if not not_it:
        return lines
    counts = {count for _, count in not_it}
    one_count = f", in {_of(counts.pop(), len(runs))}" if len(counts) == 1 and len(runs) > 1 else ""
    named = [name if len(runs) == 1 or one_count else f"{name} (in {_of(count, len(runs))})" for name, count in not_it]
    verb = "were looked at and are not it: behind them the loss does not measurably differ from what other steps let expect"
    text = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return [f"{text[:1].upper()}{text[1:]} {verb}{one_count}.", *lines]


def _is_blamed(key: str, run: RunAnalysis) -> bool:
    causes = [one.evidence.get("cause") for one in run.findings if one.kind == "resets"]
    return any(isinstance(cause, str) and key in cause.split(" or ") for cause in causes)


def _off(key: str, guilty: Sequence[tuple[RunAnalysis, Cleared]], num_known: int) -> str:
    told = [f"{run.name} {signed(one.difference)} nats, {signed(one.low)} to {signed(one.high)}" for run, one in guilty]
    more = f"; and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    of = f" in {len(guilty)} of {num_known} runs" if num_known > 1 else ""
    by_chance = ". One run in twenty shows that by chance" if num_known > FEW_RUNS else ""
    named = f"{'; '.join(told[:MAX_NAMED])}{more}"
    return f"Behind {NAMES[key]} the loss differs from what other steps let expect{of} ({named}){by_chance}."


def _of(count: int, num_runs: int) -> str:
    if count < num_runs:
        return f"{count} of {num_runs} runs (the others have too few of them to say)"
    return "both runs" if num_runs == 2 else f"all {num_runs} runs"


def told_suspects(runs: Sequence[RunAnalysis]) -> list[tuple[str, list[str]]]:
    """A sentence for each event of each run; of many runs the range over the runs, by event."""
    if len(runs) <= FEW_RUNS:
        return [(run.name, [one.sentence() for one in run.cleared]) for run in runs if run.cleared]
    by_key = {key: [one for run in runs for one in run.cleared if one.key == key] for key in NAMES}
    return [(_first_upper(NAMES[key]), [_range(found)]) for key, found in by_key.items() if found]


def _range(found: Sequence[Cleared]) -> str:
    low, high = min(one.difference for one in found), max(one.difference for one in found)
    clear = sum(one.is_clear for one in found)
    return (
        f"The loss behind one, less what other steps let expect: {signed(low)} to {signed(high)} nats over {len(found)} runs; in "
        f"{clear} of them the 95 % interval holds 0."
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
