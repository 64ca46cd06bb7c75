"""The rows that describe one run on its own: `runs`, `bucket_stats`, `grad_norms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.random import Generator

from dflash_core.analysis.checkpoints import checkpoint_summary
from dflash_core.analysis.order import order_summary
from dflash_core.analysis.reader import matrix, numbers
from dflash_core.analysis.runs import Run
from dflash_core.analysis.series import BoolArray, FloatArray, detrended, spikes

LAST_FRACTION = 0.1
SETTLED_AFTER_FRACTION = 0.1
SUMMED_BATCH_FIELDS = ("num_sequences", "num_tokens", "num_padded_tokens", "num_anchors")


def settled(values: FloatArray) -> FloatArray:
    """The finite values behind the first tenth of the steps: what warm-up does is not what is compared."""
    behind = values[round(len(values) * SETTLED_AFTER_FRACTION) :]
    return behind[np.isfinite(behind)]


def last_part(values: FloatArray) -> FloatArray:
    """The finite values of the last tenth of the steps, at least of one step."""
    behind = values[-max(1, round(len(values) * LAST_FRACTION)) :]
    return behind[np.isfinite(behind)]


def run_row(run: Run, rng: Generator, checkpoints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run's row of `runs`.

    Losses are in nats: `final_loss` is the mean over the last tenth of the steps, `loss_sd_detrended` the standard deviation
    around the running median behind the first tenth ("fluffiness"). Acceptance lengths are in tokens, +1 included. The
    shares are of the time of all steps: `data_wait_share` targets waited for batches, `target_wait_share` the drafter
    waited for target states, `draft_share` it computed. `train_s` is the time of all steps.

    Args:
        checkpoints: the columns about checkpoints, where they are known already.
    """
    manifest, steps = run.manifest, run.steps
    loss, norm = numbers(steps, "loss"), numbers(steps, "grad_norm")
    finite_norm = norm[np.isfinite(norm)]
    total = {name: _total(steps, name) for name in ("num_sequences", "num_tokens", "num_anchors")}
    seconds = {name: _total(steps, f"{name}_s") for name in ("data_wait", "target_wait", "forward", "backward", "step")}
    draft_s = None if seconds["forward"] is None or seconds["backward"] is None else seconds["forward"] + seconds["backward"]
    calm = settled(loss)
    final = last_part(loss)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": manifest.get("state"),
        "order": run.setting("bucketing.order"),
        "seed": run.setting("train.seed"),
        "num_steps": len(steps),
        "num_epochs": int(numbers(steps, "epoch", missing=0).max()) + 1,
        "num_attempts": run.num_attempts,
        "num_skipped": int(numbers(steps, "skipped", missing=0).sum()),
        "num_batches": len(run.batches),
        **{name: None if value is None else int(value) for name, value in total.items()},
        "final_loss": float(final.mean()) if len(final) else float("nan"),
        "loss_sd_detrended": float(detrended(calm).std()) if len(calm) else float("nan"),
        "acceptance_length": acceptance(run, "trained"),
        "acceptance_length_untrained": acceptance(run, "untrained"),
        "lossless": manifest.get("lossless"),
        **order_summary(run, rng),
        **(checkpoint_summary(run, rng.spawn(1)[0]) if checkpoints is None else checkpoints),
        "grad_norm_median": float(np.median(finite_norm)) if len(finite_norm) else None,
        "grad_norm_p95": float(np.quantile(finite_norm, 0.95)) if len(finite_norm) else None,
        "tokens_per_s": _ratio(total["num_tokens"], seconds["step"]),
        "anchors_per_s": _ratio(total["num_anchors"], seconds["step"]),
        "data_wait_share": _ratio(seconds["data_wait"], seconds["step"]),
        "target_wait_share": _ratio(seconds["target_wait"], seconds["step"]),
        "draft_share": _ratio(draft_s, seconds["step"]),
        "train_s": seconds["step"],
        "created": timestamp(manifest.get("created")),
        "finished": timestamp(manifest.get("finished")),
        "dataset": _text(manifest.get("dataset")),
        "dataset_fingerprint": _text(manifest.get("dataset_fingerprint")),
        "target": _text(manifest.get("target")),
        "git_commit": _text((run.provenance.get("git") or {}).get("commit")),
        "checkpoint": _text(manifest.get("checkpoint")),
    }


def acceptance(run: Run, kind: str) -> float | None:
    """Acceptance length over all sources, +1 included: the manifest's, or the last one among the evaluations."""
    stated = run.manifest.get("acceptance_length" if kind == "trained" else "acceptance_length_untrained")
    if stated is not None:
        return float(stated)
    rows = evals(run.evals, kind, "acceptance_length")
    rows = rows[(rows["source"] == "all") & rows["position"].isna()]
    return float(rows["value"].iloc[-1]) if len(rows) else None


def evals(table: pa.Table, kind: str, metric: str) -> pd.DataFrame:
    """Rows of the stream `evals` of a kind and metric, by step and position; of one that was made again, the last."""
    wanted = pc.and_(pc.equal(table["kind"], kind), pc.equal(table["metric"], metric))
    found: pd.DataFrame = table.filter(wanted).to_pandas()
    found = found.drop_duplicates(["step", "source", "position"], keep="last")
    return found.sort_values(["step", "position"], kind="stable")


def bucket_rows(run: Run) -> list[dict[str, Any]]:
    """The run's rows of `bucket_stats`, one per bucket that has batches.

    `batch_share` and `token_share` are shares of the run. `mean_loss` is the sum of weighted losses over the sum of weights,
    in nats, over the batches where both are finite.
    """
    columns = {name: numbers(run.batches, name, missing=0) for name in (*SUMMED_BATCH_FIELDS, "max_seq_len")}
    loss, weight = numbers(run.batches, "loss_sum"), numbers(run.batches, "weight_sum")
    usable = np.isfinite(loss) & np.isfinite(weight)
    loss, weight = np.where(usable, loss, 0.0), np.where(usable, weight, 0.0)
    bucket = run.buckets()
    rows = []
    for one in np.flatnonzero(np.bincount(bucket)).tolist():
        part = np.flatnonzero(bucket == one)
        sums = {name: int(columns[name][part].sum()) for name in SUMMED_BATCH_FIELDS}
        rows.append(
            {
                "run_id": run.run_id,
                "bucket": one,
                "num_batches": len(part),
                **sums,
                "batch_share": len(part) / len(bucket),
                "token_share": _ratio(sums["num_tokens"], columns["num_tokens"].sum()),
                "padding_efficiency": _ratio(sums["num_tokens"], sums["num_padded_tokens"]),
                "mean_seq_len": _ratio(sums["num_tokens"], sums["num_sequences"]),
                "max_seq_len": int(columns["max_seq_len"][part].max()),
                "mean_loss": _ratio(loss[part].sum(), weight[part].sum()),
            }
        )
    return rows


def grad_norm_rows(run: Run, num_mads: float) -> list[dict[str, Any]]:
    """The run's rows of `grad_norms`: of all steps, and of its thirds by share of the longest bucket.

    `group` is `all`, or `long_share_low`, `_mid`, `_high`: steps whose share of batches from the last bucket is at most the
    first tercile, between, or above the second; a third without steps (an even order has only two different shares) has
    no row. Norms are those before clipping. `mad` is the median absolute deviation from the running median and a spike
    lies more than `num_mads` of it above (`series.spikes`), both over all steps. Non-finite norms are counted apart.
    """
    norm = numbers(run.steps, "grad_norm")
    clipped = numbers(run.steps, "clipped")
    is_spike, mad = spikes(norm, num_mads)
    counts = matrix(run.steps, "bucket_counts")
    groups = {"all": np.ones(len(norm), dtype=bool)}
    share = np.full(len(norm), np.nan)
    if counts.shape[1]:
        sizes = np.nansum(counts, axis=1)
        long = np.nan_to_num(counts[:, -1])
        share = np.divide(long, sizes, out=share, where=sizes > 0)
    if np.isfinite(share).any():
        low, high = np.nanquantile(share, [1 / 3, 2 / 3])
        groups |= {"long_share_low": share <= low, "long_share_high": share > high}
        groups["long_share_mid"] = (share > low) & (share <= high)
    return [
        {"run_id": run.run_id, "group": name, **_norm_columns(norm[rows], clipped[rows], is_spike[rows], share[rows], mad)}
        for name, rows in groups.items()
        if rows.any()
    ]


def _norm_columns(norm: FloatArray, clipped: FloatArray, is_spike: BoolArray, share: FloatArray, mad: float) -> dict[str, Any]:
    finite = norm[np.isfinite(norm)]
    known = share[np.isfinite(share)]
    columns: dict[str, Any] = dict.fromkeys(("mean", "sd", "p05", "p25", "p50", "p75", "p95", "p99", "max"))
    if len(finite):
        quantiles = np.quantile(finite, [0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0])
        columns |= dict(zip(("p05", "p25", "p50", "p75", "p95", "p99", "max"), quantiles.tolist(), strict=True))
        columns |= {"mean": float(finite.mean()), "sd": float(finite.std())}
    return columns | {
        "long_share_low": float(known.min()) if len(known) else None,
        "long_share_high": float(known.max()) if len(known) else None,
        "num_steps": len(norm),
        "num_nonfinite": len(norm) - len(finite),
        "mad": mad,
        "num_spikes": int(is_spike.sum()),
        "clip_share": float(np.nanmean(clipped)) if np.isfinite(clipped).any() else None,
    }


def timestamp(value: Any) -> Any:
    """A UTC time from an ISO text or seconds since 1970; None for anything else."""
    if value is None or isinstance(value, bool):
        return None
    moment = pd.to_datetime(value, utc=True, errors="coerce", unit="s" if isinstance(value, (int, float)) else None)
    return None if pd.isna(moment) else moment.to_pydatetime()


def _text(value: Any) -> str | None:
    return (
        None if value is None else value if isinstance(value, str) else str(dict(value) if isinstance(value, Mapping) else value)
    )


def _total(table: pa.Table, column: str) -> float | None:
    values = numbers(table, column)
    return float(np.nansum(values)) if np.isfinite(values).any() else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return float(above / below) if above is not None and below else None
