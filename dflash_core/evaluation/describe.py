"""An evaluation's result as lines for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BAR_WIDTH = 40


def describe_evaluation(result: Mapping[str, Any]) -> list[str]:
    """Acceptance with its interval, by source and by position, the histogram, losslessness, forwards, and time per token."""
    tau = result["acceptance_length"]
    lines = [
        "",
        f"acceptance length {_number(tau)}{_interval(result['acceptance_interval'])} on {result['num_prompts']} prompts,"
        f" {result['num_tokens']} tokens (+1 included; untrained draft: {_number(result['acceptance_length_untrained'])})",
    ]
    if training := result.get("training"):
        lines.append(
            f"trained for {training['steps']} steps, {training['num_anchors']:,} anchors, {training['hours']:.2f} hours"
            if training["num_anchors"] is not None
            else f"trained for {training['steps']} steps"
        )
    for source, value in result["by_source"].items():
        if source != "all" and len(result["by_source"]) > 2:
            lines.append(f"  {source}: {_number(value)}{_interval(result['interval_by_source'][source])}")
    return [*lines, *_positions(result), *_histogram(result["histogram"]), *_lossless(result), *_speed(result["speed"])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" (95 % of the prompts' resamplings: {ends[0]:.3f} to {ends[1]:.3f})"


def _positions(result: Mapping[str, Any]) -> list[str]:
    pairs = zip(result["conditional_by_position"], result["prefix_survival_by_position"], strict=True)
    lines = [f"{k:8}  {_number(kept):>18}  {survived:15.3f}" for k, (kept, survived) in enumerate(pairs, start=1)]
    return ["position  kept, when reached  reached and kept", *lines] if lines else []


def _histogram(counts: Sequence[int]) -> list[str]:
    most, total = max(counts), sum(counts)
    if not total:
        return ["no rounds: every answer was a single token"]
    lines = [
        f"{n:4}  {count:7,}  {count / total:6.1%}  {'█' * round(BAR_WIDTH * count / most)}" for n, count in enumerate(counts)
    ]
    return ["kept   rounds   share", *lines]


def _lossless(result: Mapping[str, Any]) -> list[str]:
    if result["lossless"] is None:
        return ["not compared with plain greedy decoding (evaluate.check_lossless)"]
    if result["lossless"]:
        return ["lossless: all texts equal plain greedy decoding"]
    lines = [f"NOT lossless: {len(result['mismatches'])} texts differ from plain greedy decoding"]
    for found in result["differences"]:
        if found["gap"] is None:
            lines.append(f"  {found['id']}: at new token {found['position']} one of the texts has ended")
            continue
        verdict = "near tie: rounding explains it" if found["near_tie"] else "rounding does NOT explain it"
        lines.append(
            f"  {found['id']}: at new token {found['position']}, {found['plain']} by plain decoding and {found['drafted']} by"
            f" the draft; logits differ by {found['gap']:.2g}, rounding reaches {found['tolerance']:.2g}: {verdict}"
        )
    return lines


def _speed(speed: Mapping[str, Any]) -> list[str]:
    saved = speed["target_forwards_saved"]
    lines = [
        f"target forwards: {speed['num_speculative_forwards']:,} instead of {speed['num_plain_forwards']:,}"
        + ("" if saved is None else f" ({saved:.2f} times fewer)")
    ]
    for name, found in (("one prompt at a time", speed["single"]), ("together", speed["batched"])):
        if found is not None:
            number = "" if found["batch_prompts"] == 1 else f"{found['batch_prompts']} prompts "
            lines.append(
                f"{number}{name}: {1000 * found['plain_s_per_token']:.1f} ms per token plain,"
                f" {1000 * found['speculative_s_per_token']:.1f} ms with the draft ({found['speedup']:.2f} times as fast;"
                f" draft {found['draft_share']:.0%}, verifying {found['verify_share']:.0%} of a round)"
            )
    return [*lines, f"({speed['device']}, {speed['dtype']}, {speed['threads']} threads: {speed['note']})"]
