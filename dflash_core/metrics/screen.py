"""What a terminal shows of a run: the lines of the live console, and the whole view of `dflash watch`.

Functions from `RunView` to what `rich` draws; nothing here reads or keeps anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_core.metrics.console import duration
from dflash_core.metrics.run_view import RunView

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_COLUMNS = 40
MOST_TARGETS = 12
NEGLIGIBLE_SHARE = 0.005
STATE_STYLES = {"running": "green", "completed": "cyan", "failed": "red", "stopped": "yellow"}


def live_lines(view: RunView, name: str) -> RenderableType:
    """The console of a running training, five lines."""
    skipped = f"{view.num_skipped:,} skipped" if view.num_skipped else "none skipped"
    lines = [
        f"loss {number(view.newest('loss'), '.4f')} {sparkline(view.loss.columns(SPARKLINE_COLUMNS))}"
        f" · gradient norm {number(view.newest('grad_norm'), '.3g')} · {skipped}",
        f"acceptance length (+1 included): {_acceptance(view)}",
        _throughput(view),
        f"waiting for: {_time(view)}",
    ]
    return Group(_progress(view, name), *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


def whole_view(view: RunView, run: Mapping[str, Any], warnings: Sequence[str], now: float) -> RenderableType:
    """The view of `dflash watch`.

    Args:
        run: `name`, `run_id`, `state`, `error` of the manifest; `settings`, a few words on the configuration; `edges`, the
            buckets' upper ends in tokens.
        warnings: one line each.
        now: seconds since 1970.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(view, run, now):
        grid.add_row(label, Text(text))
    parts: list[RenderableType] = [_head(view, run), _progress(view, ""), grid]
    parts += [Text(f"! {line}", style="bold yellow") for line in warnings]
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value. The highest twentieth is cut off, so that the first steps do not flatten all others."""
    if not values:
        return ""
    low, high = min(values), sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]
    if high <= low:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((value - low) / (high - low) * len(BLOCKS)))] for value in values)


def number(value: Any, form: str) -> str:
    """A number in a format, or a dash for none."""
    return "–" if value is None else format(value, form)


def _head(view: RunView, run: Mapping[str, Any]) -> Text:
    state = str(run.get("state"))
    head = Text.assemble((str(run.get("name")), "bold"), " · ", str(run.get("run_id")), " · ")
    head.append(state, style=STATE_STYLES.get(state, ""))
    head.append(f" · attempt {view.attempt + 1}" if view.attempt else "")
    head.append(f" · {run['settings']}" if run.get("settings") else "")
    if run.get("error"):
        head.append(f"\n{run['error']}", style="red")
    return head


def _progress(view: RunView, name: str) -> Table:
    done, total, left = view.num_done, view.total_steps, view.seconds_left()
    of = f" of {total:,} · {done / total:.0%}" if total else ""
    grid = Table.grid(padding=(0, 1))
    row: list[RenderableType] = [escape(name)] if name else []
    row.append(ProgressBar(total=total, completed=min(done, total), width=30) if total else "")
    row.append(f"step {done:,}{of}" + (f" · {duration(left)} left" if left else ""))
    grid.add_row(*row)
    return grid


def _acceptance(view: RunView) -> str:
    measured = f"measured {view.measured[1]:.2f} after {view.measured[0]:,} steps" if view.measured else "not measured yet"
    return f"expected {number(view.newest('expected_acceptance_length'), '.2f')} · {measured}"


def _throughput(view: RunView) -> str:
    return (
        f"{number(view.per_second('num_tokens'), ',.0f')} tokens/s · {number(view.per_second('num_anchors'), ',.0f')} anchors/s"
        f" · {number(view.seconds_per_step(), '.2f')} s per step"
    )


def _time(view: RunView) -> str:
    shares = sorted(view.time_shares().items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {share:.0%}" for name, share in shares if share >= NEGLIGIBLE_SHARE) or "–"


def _rows(view: RunView, run: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    recent = f"last {len(view.recent)} steps"
    rows = [
        ("loss", f"{number(view.newest('loss'), '.4f')}  {sparkline(view.loss.columns(SPARKLINE_COLUMNS))}"),
        ("gradient norm", _norms(view, recent)),
        ("acceptance length", f"{_acceptance(view)} (+1 included)"),
        ("accuracy by slot", _slots(view)),
        ("throughput", _throughput(view)),
        ("waiting for", f"{_time(view)} ({recent})"),
        ("batches by bucket", _buckets(view, run.get("edges") or (), recent)),
    ]
    for cell in sorted(view.stats):
        rows += _cell_rows(view, cell)
    if not view.stats:
        rows.append(("queues", "no snapshot yet"))
    rows += [("" if i else "events", _event(row, now)) for i, row in enumerate(reversed(view.events))]
    return rows


def _norms(view: RunView, recent: str) -> str:
    norms = view.recent_values("grad_norm")
    if not norms:
        return "–"
    clipped = sum(bool(row.get("clipped")) for row in view.recent) / len(view.recent)
    skipped = sum(bool(row.get("skipped")) for row in view.recent)
    return (
        f"{number(view.newest('grad_norm'), '.3g')}  {sparkline(norms[-SPARKLINE_COLUMNS:])}  "
        f"median {statistics.median(norms):.3g}, highest {max(norms):.3g}, clipped {clipped:.0%}, "
        f"{skipped or 'none'} skipped ({recent})"
    )


def _slots(view: RunView) -> str:
    values = view.newest("accuracy_by_position") or []
    return " ".join(f"{slot}:{value:.2f}" for slot, value in enumerate(values, start=1)) or "–"


def _buckets(view: RunView, edges: Sequence[int], recent: str) -> str:
    shares = view.bucket_shares()
    labels = [f"≤{edge}" for edge in edges] if len(edges) == len(shares) else [str(i) for i in range(len(shares))]
    return "  ".join(f"{label}: {share:.0%}" for label, share in zip(labels, shares, strict=True)) + f" ({recent}, tokens long)"


def _cell_rows(view: RunView, cell: int) -> list[tuple[str, str]]:
    newest = view.stats[cell][-1]
    of = f" of cell {cell}" if len(view.stats) > 1 else ""
    runs = " · ".join(
        f"{label} {number(newest.get(name), form)}"
        for label, name, form in (("current", "current_run", "d"), ("longest", "longest_run", "d"), ("mean", "mean_run", ".2f"))
    )
    rows = [(f"bucket runs{of}", f"{runs} batches")]
    depths, dispatched = newest.get("prefetch_depths") or [], newest.get("dispatched_per_target") or []
    means, empty, full = (
        view.mean_depths(cell),
        view.queue_shares(cell, "queue_get_wait_s"),
        view.queue_shares(cell, "queue_put_wait_s"),
    )
    for target, depth in enumerate(depths[:MOST_TARGETS]):
        parts = [f"depth {depth} (mean {means[target]:.1f})"]
        parts += [f"waited for batches {share:.0%}" for share in empty[target : target + 1] if share is not None]
        parts += [f"loaders waited for room {share:.0%}" for share in full[target : target + 1] if share is not None]
        parts += [f"{count:,} batches dispatched" for count in dispatched[target : target + 1]]
        rows.append((f"target {target}{of}", " · ".join(parts)))
    if len(depths) > MOST_TARGETS:
        rows.append(("", f"and {len(depths) - MOST_TARGETS} more targets"))
    rows.append((f"ready{of}", f"{number(newest.get('ready_depth'), 'd')} batches wait for the drafter · {_budget(newest)}"))
    return rows


def _budget(stats: Mapping[str, Any]) -> str:
    return f"loading waited {number(stats.get('budget_wait_s'), ',.1f')} s so far for the byte budget"


def _event(row: Mapping[str, Any], now: float) -> str:
    age = duration(max(0.0, now - row["time"])) + " ago" if row.get("time") is not None else ""
    kind, step = str(row.get("kind")), row.get("step")
    words = {
        "checkpoint_end": lambda: f"checkpoint {row.get('folder')} written in {number(row.get('write_s'), '.1f')} s",
        "validation": lambda: f"acceptance length {number(row.get('acceptance_length'), '.2f')} measured on held-out prompts",
        "resume": lambda: "resumed" + (f", passed over {row['passed_over']}" if row.get("passed_over") else ""),
        "skip": lambda: (
            f"step skipped: loss {number(row.get('loss'), '.3g')}, gradient norm {number(row.get('grad_norm'), '.3g')}"
        ),
        "signal": lambda: f"stopping, asked by {row.get('name')}",
        "out_of_memory": lambda: f"target {row.get('target')} ran out of memory and split a batch",
    }
    return f"{age}, step {number(step, ',d')}: {words[kind]() if kind in words else kind}"
