"""Findings of many runs, told together: a kind has one sentence, the runs and the range of its figures, not a text per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.analysis.findings.finding import KINDS, STRENGTHS, Finding
from dflash_core.analysis.one_run import RunAnalysis
from dflash_core.analysis.summary import number

# What is said of a kind by how strong its findings are: strong, moderate, weak. A weak finding is real but small, and the words
# must not make more of it.
SAID: dict[str, tuple[str, str, str]] = {
    "batch_order": (
        "buckets come in much longer runs than they need to",
        "buckets come in longer runs than they need to",
        "buckets come in longer runs than they need to, which the steps hardly feel",
    ),
    "loss_composition": (
        "the loss is rough for the most part because of which buckets a step holds",
        "the loss is rough in good part because of which buckets a step holds",
        "the loss is rough in part because of which buckets a step holds, for the larger part because of something else",
    ),
    "spikes_in_bucket_runs": (
        "gradient spikes fall into runs of one bucket",
        "many gradient spikes fall into runs of one bucket",
        "some of the gradient spikes fall into runs of one bucket",
    ),
    "resets": (
        "the loss or the accuracy falls back at certain moments",
        "the loss or the accuracy falls back somewhat at certain moments",
        "the loss or the accuracy falls back a little at certain moments",
    ),
    "divergence": (
        "the loss or the gradient norm grows without bound or stops being finite",
        "the loss or the gradient norm grows or stops being finite for a while",
        "there are weak signs of a loss or a gradient norm that grows or stops being finite",
    ),
    "dead_positions": (
        "slots of the block learn nothing",
        "slots of the block learn next to nothing",
        "slots of the block learn little",
    ),
    "train_serve_gap": (
        "decoding measures another acceptance length than training promises",
        "decoding measures a somewhat different acceptance length than training promises",
        "decoding measures a slightly different acceptance length than training promises",
    ),
    "starved_by_loader": (
        "targets wait for batches, which holds training up",
        "targets wait for batches, which holds training up somewhat",
        "targets wait for batches, which holds training up a little",
    ),
    "starved_by_target": (
        "the drafter waits for target states, which holds training up",
        "the drafter waits for target states, which holds training up somewhat",
        "the drafter waits for target states, which holds training up a little",
    ),
    "starved_by_drafter": (
        "targets wait for the drafter, which holds training up",
        "targets wait for the drafter, which holds training up somewhat",
        "targets wait for the drafter, which holds training up a little",
    ),
    "unequal_dispatch": (
        "targets got very unequal numbers of batches, or their queues stood at very unequal depths",
        "targets got unequal numbers of batches, or their queues stood at unequal depths",
        "targets got somewhat unequal numbers of batches, or their queues stood at somewhat unequal depths",
    ),
    "padding": (
        "other bucket boundaries would save much padding",
        "other bucket boundaries would save padding",
        "other bucket boundaries would save a little padding",
    ),
}
MAX_RUNS_NAMED = 8
MAX_ADVICE = 3


@dataclass(frozen=True)
class ToldTogether:
    """The findings of one kind and measure in several runs.

    Args:
        strength: the middle one of the runs' (of two the weaker), which the title's words follow.
        title: what they say, in how many runs.
        figure: the range of what they rest on, and how strong they are.
        runs: those that have one.
        text: the evidence, in the words of the finding that is furthest beyond its threshold.
        advice: each advice once, with the runs where there are several.
    """

    strength: str
    title: str
    figure: str
    runs: str
    text: str
    advice: Sequence[str]


@dataclass(frozen=True)
class _Together:
    found: Sequence[tuple[str, Finding]]
    num_runs: int

    @property
    def findings(self) -> list[Finding]:
        return [one for _, one in self.found]

    @property
    def strongest(self) -> str:
        return min((one.strength for one in self.findings), key=STRENGTHS.index)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.found))

    @property
    def typical(self) -> str:
        """The middle one, of two the weaker: one strong finding among many weak ones makes no strong words."""
        places = sorted(STRENGTHS.index(one.strength) for one in self.findings)
        return STRENGTHS[places[len(places) // 2]]

    def title(self) -> str:
        said = SAID[self.findings[0].kind][STRENGTHS.index(self.typical)]
        return f"In {len(self.names)} of {self.num_runs} runs {said}"

    def figure(self) -> str:
        one, values = self.findings[0], [finding.value for finding in self.findings]
        unit = "" if one.unit in ("", "1", "share", "%") else f" {one.unit}"
        ends = list(dict.fromkeys(_shown(value, one.unit) for value in (min(values), max(values))))
        return f"{one.measure}: {' to '.join(ends)}{unit}; {self._strengths()}"

    def _strengths(self) -> str:
        counts = [(sum(one.strength == strength for one in self.findings), strength) for strength in STRENGTHS]
        counts = [(count, strength) for count, strength in counts if count]
        if len(counts) == 1:
            return counts[0][1] if counts[0][0] == 1 else f"all {counts[0][1]}"
        return ", ".join(f"{count} {strength}" for count, strength in counts)

    def told(self) -> ToldTogether:
        name, worst = max(self.found, key=lambda one: (-STRENGTHS.index(one[1].strength), one[1].value))
        which = f"{name}: " if len(self.found) > 1 else ""
        return ToldTogether(
            strength=self.typical,
            title=self.title(),
            figure=f"{_first_upper(self.figure())}.",
            runs=some_of(self.names),
            text=f"{which}{worst.text}",
            advice=self._advice(),
        )

    def _advice(self) -> list[str]:
        runs: dict[str, list[str]] = {}
        for name, one in self.found:
            runs.setdefault(one.advice, []).append(name)
        if len(runs) == 1:
            return list(runs)
        told = [f"{advice} ({some_of(list(dict.fromkeys(names)))})" for advice, names in runs.items()]
        more = len(told) - MAX_ADVICE
        return told if more <= 0 else [*told[:MAX_ADVICE], f"{more} more in report.html."]


def _shown(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "share" else number(value) + ("%" if unit == "%" else "")


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def some_of(names: Sequence[str]) -> str:
    """Names, of very many the first few."""
    more = f" and {len(names) - MAX_RUNS_NAMED} more" if len(names) > MAX_RUNS_NAMED else ""
    return ", ".join(names[:MAX_RUNS_NAMED]) + more


def _together(runs: Sequence[RunAnalysis]) -> list[_Together]:
    """Findings by kind and measure (what a kind rests on can differ), the strongest first."""
    found: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    for run in runs:
        for one in run.findings:
            found.setdefault((one.kind, one.measure, one.unit), []).append((run.name, one))
    kinds = list(KINDS)
    groups = [_Together(one, len(runs)) for one in found.values()]
    return sorted(groups, key=lambda one: (STRENGTHS.index(one.strongest), kinds.index(one.findings[0].kind)))


def told_together(runs: Sequence[RunAnalysis]) -> list[ToldTogether]:
    """A block for each kind of finding and what it rests on, the strongest first."""
    return [one.told() for one in _together(runs)]


def lines_of_many(runs: Sequence[RunAnalysis]) -> list[str]:
    """For the summary: a line for each block."""
    return [f"{one.title()}: {some_of(one.names)} ({one.figure()})." for one in _together(runs)]
