"""The pictures of docs/incident.md: `python benchmarks/incident_plots.py FAULTY_RUN CURED_RUN [FOLDER]`

Takes the two run folders of `flows/experiments/incident.yaml` and writes three small SVG files: `incident-loss.svg`,
`incident-order.svg` and `incident-queues.svg` (default folder: docs/img). Plain SVG text, without a library, a font or a link, so
that a page shows them anywhere and a difference between two versions can be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.runs import Run, load_run
from dflash_core.analysis.series import FloatArray, running_median
from dflash_core.bucketing import run_lengths, shortest_possible_longest_run
from dflash_core.errors import DFlashError

WIDTH, LEFT, RIGHT = 860, 62, 12
INK, FAINT, CHECKPOINT = "#333333", "#d9d9d9", "#b9a7d6"
LINE, MEDIAN = "#4c78a8", "#d1495b"
# From short to long sequences; of six targets, one each.
BUCKETS = ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#8c1d40")
TARGETS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#d1495b", "#72675c")
TREND_STEPS = 15
# Batches of an order that are drawn.
SHOWN = 320


class Panel:
    """One pair of axes: the place of a value, and what has been drawn.

    Args:
        top, height: of the plot's area in the picture, in pixels.
        x, y: first and last value of each axis.
        title: stands above the area.
        unit: of the vertical axis.
    """

    def __init__(self, top: int, height: int, x: tuple[float, float], y: tuple[float, float], title: str, unit: str) -> None:
        self.top, self.height, self.x, self.y = top, height, x, y
        self.parts = [text(LEFT, top - 7, title, weight="bold"), text(14, top + height / 2, unit, turned=True)]

    def px(self, value: float) -> float:
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return self.top + (self.y[1] - value) / (self.y[1] - self.y[0]) * self.height

    def axes(self, x_name: str = "") -> None:
        """Grid and numbers; the horizontal ones only where the axis has a name."""
        for value in ticks(*self.y):
            y = self.py(value)
            self.parts.insert(0, f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
            self.parts.append(text(LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        if x_name:
            for value in ticks(*self.x):
                self.parts.append(text(self.px(value), self.top + self.height + 15, f"{value:g}", anchor="middle"))
            self.parts.append(text((LEFT + WIDTH - RIGHT) / 2, self.top + self.height + 31, x_name, anchor="middle"))

    def verticals(self, values: Sequence[float], colour: str) -> None:
        path = "".join(f"M{self.px(value):.1f} {self.top}V{self.top + self.height}" for value in values)
        self.parts.insert(0, f'<path d="{path}" stroke="{colour}" stroke-dasharray="3 3"/>')

    def curve(self, x: FloatArray, y: FloatArray, colour: str, width: float = 1.0) -> None:
        finite = np.isfinite(y)
        x, y = x[finite], np.clip(y[finite], *sorted(self.y))
        level = np.diff(y) == 0  # what lies inside a level stretch adds no shape
        needed = ~(np.append(level, False) & np.insert(level, 0, False))
        points = " ".join(f"{self.px(a):.1f},{self.py(b):.1f}" for a, b in zip(x[needed], y[needed], strict=True))
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", turned: bool = False) -> str:
    """One line of text."""
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    middle = "middle" if turned else anchor
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{middle}" font-weight="{weight}"{turn}>{words}</text>'


def ticks(first: float, last: float) -> list[float]:
    """Three to seven round numbers between the two."""
    raw = (last - first) / 5
    power = 10 ** floor(log10(raw))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= raw)
    return [round(i * step, 10) for i in range(ceil(first / step), floor(last / step) + 1)]


def legend(entries: Sequence[tuple[str, str]], y: float) -> str:
    """Coloured squares with names, from the right edge to the left."""
    widths = [20 + 6.6 * len(name) for name, _ in entries]
    starts = accumulate(widths, initial=WIDTH - RIGHT - sum(widths))
    return "".join(
        f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>{text(x + 14, y, name)}'
        for x, (name, colour) in zip(starts, entries, strict=False)
    )


def picture(height: int, parts: Sequence[str], words: str) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{words}" font-family="sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def checkpoints(run: Run) -> list[float]:
    """Steps at which a checkpoint was begun."""
    return [float(row["step"]) for row in run.events.to_pylist() if row["kind"] == "checkpoint_begin"]


def loss_picture(runs: Sequence[tuple[str, Run]]) -> str:
    """Loss and expected acceptance length of every step, with the checkpoints."""
    loss = [numbers(run.steps, "loss") for _, run in runs]
    most = float(np.quantile(np.concatenate([one[len(one) // 20 :] for one in loss]), 0.995))
    accepted = [numbers(run.steps, "expected_acceptance_length") for _, run in runs]
    longest = max(float(one.max()) for one in accepted)
    parts, top = [legend([("one step", LINE), (f"median of {TREND_STEPS}", MEDIAN), ("checkpoint", CHECKPOINT)], 16)], 40
    kinds = [("loss", "nats", loss, (0.0, most)), ("expected acceptance length", "tokens", accepted, (1.0, longest))]
    for what, unit, values, reach in kinds:
        for i, (name, run) in enumerate(runs):
            step = numbers(run.steps, "step")
            panel = Panel(top, 105, (0, float(step.max())), reach, f"{name}: {what}", unit)
            last = (what, i) == (kinds[-1][0], len(runs) - 1)
            panel.axes("optimizer step" if last else "")
            panel.verticals(checkpoints(run), CHECKPOINT)
            panel.curve(step, values[i], LINE)
            panel.curve(step, running_median(values[i], TREND_STEPS), MEDIAN, 1.8)
            parts += panel.parts
            top += 140
    return picture(top + 8, parts, "Loss and expected acceptance length of both runs")


def order_picture(runs: Sequence[tuple[str, Run]]) -> str:
    """The buckets of `SHOWN` batches in the order of training, around the longest bucket run of the first."""
    edges = runs[0][1].manifest["identity"]["edges"]
    entries = [(f"to {edge} tokens", colour) for edge, colour in zip(edges, BUCKETS, strict=False)]
    _, lengths = run_lengths(runs[0][1].buckets())
    middle = int(lengths[: lengths.argmax()].sum() + lengths.max() // 2)
    begin = max(0, min(middle - SHOWN // 2, int(lengths.sum()) - SHOWN))
    parts, top = [legend(entries, 16)], 44
    for name, run in runs:
        whole = run.buckets()
        longest, bound = int(run_lengths(whole)[1].max()), shortest_possible_longest_run(np.bincount(whole))
        title = f"{name}: longest run of one bucket {longest} batches, shortest possible {bound}"
        panel = Panel(top, 46, (begin, begin + SHOWN), (0, 1), title, "")
        start = begin
        for bucket, length in zip(*(part.tolist() for part in run_lengths(whole[begin : begin + SHOWN])), strict=True):
            x, width = panel.px(start), panel.px(start + length) - panel.px(start)
            fill = BUCKETS[bucket % len(BUCKETS)]
            panel.parts.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.2f}" height="46" fill="{fill}"/>')
            if length == longest > bound + 1:
                panel.parts.append(f'<path d="M{x:.1f} {top + 50}h{width:.1f}" stroke="{MEDIAN}" stroke-width="4"/>')
            start += length
        parts += panel.parts
        top += 86
    for value in ticks(begin, begin + SHOWN):
        parts.append(text(panel.px(value), top - 20, f"{value:g}", anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, top - 4, "batch, in the order of training", anchor="middle"))
    return picture(top + 6, parts, "Buckets of the batches in the order of training")


def queue_picture(runs: Sequence[tuple[str, Run]]) -> str:
    """Batches waiting for each target, and how many each has been given in all, against the mean of all."""
    depths = [matrix(run.stats, "prefetch_depths") for _, run in runs]
    given = [matrix(run.stats, "dispatched_per_target") for _, run in runs]
    given = [one - one.mean(axis=1, keepdims=True) for one in given]
    deepest, widest = (max(float(np.abs(one).max()) for one in values) for values in (depths, given))
    kinds = [
        ("batches waiting in each target's queue", depths, (0.0, deepest)),
        ("batches given to each target, less the mean of all", given, (-widest, widest)),
    ]
    entries = [(f"target {t}", colour) for t, colour in zip(range(depths[0].shape[1]), TARGETS, strict=False)]
    parts, top = [legend(entries, 16)], 40
    for what, values, reach in kinds:
        for i, (name, run) in enumerate(runs):
            step = numbers(run.stats, "step")
            panel = Panel(top, 105, (0, float(step.max())), reach, f"{name}: {what}", "batches")
            panel.axes("optimizer step" if (values is given, i) == (True, len(runs) - 1) else "")
            for target in range(values[i].shape[1]):
                panel.curve(step, values[i][:, target], TARGETS[target % len(TARGETS)], 1.4)
            parts += panel.parts
            top += 140
    return picture(top + 8, parts, "Queue depths and dispatched batches of every target")


def main(arguments: Sequence[str]) -> None:
    if len(arguments) not in (2, 3):
        raise SystemExit(__doc__)
    folder = Path(arguments[2]) if len(arguments) == 3 else Path(__file__).parents[1] / "docs" / "img"
    try:
        runs = [(name, load_run(Path(path))) for name, path in zip(("faulty", "cured"), arguments, strict=False)]
    except DFlashError as error:
        raise SystemExit(f"error: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("loss", loss_picture), ("order", order_picture), ("queues", queue_picture)):
        path = folder / f"incident-{name}.svg"
        path.write_text(draw(runs), encoding="utf-8")
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main(sys.argv[1:])
