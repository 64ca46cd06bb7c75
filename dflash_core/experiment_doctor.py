"""What `dflash doctor` has found, in lines for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def describe_check(found: dict[str, Any]) -> list[str]:
    """Lines on what `experiment.check` returned: where each run goes, what its target passed, and what was not looked at."""
    placed = {name: _placed(cells) for name, cells in found["runs"].items()}
    lines = [f"{names}: {text}" for names, text in _together(placed)]
    if draft := found.get("draft"):
        taps = ", ".join(map(str, draft["target_layer_ids"]))
        lines.append(
            f"drafter: {draft['num_layers']} layers of width {draft['hidden_size']}, blocks of {draft['block_size']}, "
            f"reads target layers {taps} of {draft['num_target_layers']}"
        )
    targets = {name: _target(target) for name, target in found.get("target", {}).items()}
    lines += [f"target of {names}: {text}" for names, text in _together(targets)]
    initial = {name: _initial(one) for name, one in found.get("init_from", {}).items()}
    lines += [f"{names}: {text}" for names, text in _together(initial)]
    if files := found.get("files"):
        lines.append(f"data: {len(files)} file{'s' if len(files) > 1 else ''}, there")
    if left := found.get("not_checked"):
        lines.append(f"not looked at, for another machine is asked about: {', '.join(left)}")
    return [f"{found['experiment']}: nothing wrong", *(f"    {line}" for line in lines)]


def _together(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Each text once, with the names that it holds for."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return [(", ".join(those), text) for text, those in names.items()]


def _placed(cells: Sequence[dict[str, Any]]) -> str:
    each = [f"drafter on {cell['draft']}, targets on {', '.join(cell['targets'])}" for cell in cells]
    return each[0] if len(each) == 1 else "; ".join(f"cell {number}: {text}" for number, text in enumerate(each))


def _initial(initial: dict[str, Any]) -> str:
    differs = f", which differs and may: {', '.join(initial['differs'])}" if initial["differs"] else ""
    return f"starts from the drafter in {initial['path']}{differs}"


def _target(target: dict[str, Any] | str) -> str:
    if isinstance(target, str):
        return target
    skipped = target["skipped_checks"]
    return f"passed {', '.join(target['checks'])}" + (f"; left out: {', '.join(map(str, skipped))}" if skipped else "")
