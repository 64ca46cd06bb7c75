"""The Parquet tables of this project: columns, version, and how they are written.

Every file carries its schema's name and version in its metadata (`dflash.schema`, `dflash.schema_version`), is compressed
with zstd, and appears whole or not at all. NaN means "measured, and not a number" (a diverged loss); null means "not
measured". Times are UTC. Columns are documented where they are computed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.provenance import write_atomically

SCHEMA_VERSION = 1
NAME_KEY, VERSION_KEY = b"dflash.schema", b"dflash.schema_version"
ROW_GROUP_ROWS = 64 * 1024

_text, _int, _float, _flag, _time = pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us", tz="UTC")


def _schema(**fields: pa.DataType) -> pa.Schema:
    return pa.schema(list(fields.items()))


# The streams of a run's metrics (docs/design.md 4). A field that is not named here keeps the type that its values show.
STREAMS: dict[str, pa.Schema] = {
    "steps": _schema(
        run_id=_text, attempt=_int, step=_int, epoch=_int, time=_time, loss=_float, grad_norm=_float, clipped=_flag, lr=_float,
        num_batches=_int, num_sequences=_int, num_tokens=_int, num_padded_tokens=_int, num_anchors=_int, num_supervised=_int,
        accuracy_by_position=pa.list_(_float), expected_acceptance_length=_float, bucket_counts=pa.list_(_int),
        mean_seq_len=_float, max_seq_len=_int, data_wait_s=_float, target_wait_s=_float, forward_s=_float, backward_s=_float,
        optimizer_s=_float, step_s=_float, prefetch_depths=pa.list_(_int), ready_depth=_int, skipped=_flag,
    ),
    "batches": _schema(
        run_id=_text, attempt=_int, seq_no=_int, step=_int, epoch=_int, time=_time, cell=_int, target=_int, bucket=_int,
        num_sequences=_int, mean_seq_len=_float, max_seq_len=_int, num_tokens=_int, num_padded_tokens=_int, cost=_int,
        num_anchors=_int, num_supervised=_int, loss_sum=_float, weight_sum=_float, load_s=_float, queued_s=_float,
        target_forward_s=_float,
    ),
    "evals": _schema(
        run_id=_text, attempt=_int, step=_int, time=_time, kind=_text, source=_text, position=_int, metric=_text, value=_float,
    ),
    "events": _schema(run_id=_text, attempt=_int, step=_int, time=_time),
    "stats": _schema(
        run_id=_text, attempt=_int, step=_int, time=_time, prefetch_depths=pa.list_(_int), ready_depth=_int,
    ),
}  # fmt: skip

# The tables of a report.
TABLES: dict[str, pa.Schema] = {
    "runs": _schema(
        run_id=_text, name=_text, state=_text, order=_text, seed=_int, num_steps=_int, num_epochs=_int, num_attempts=_int,
        num_skipped=_int, num_batches=_int, num_sequences=_int, num_tokens=_int, num_anchors=_int, final_loss=_float,
        loss_sd_detrended=_float, acceptance_length=_float, acceptance_length_untrained=_float, lossless=_flag,
        longest_run=_int, longest_run_in_epoch=_int, shortest_possible_longest_run=_int, shuffled_longest_run_median=_float,
        shuffled_longest_run_p05=_float, shuffled_longest_run_p95=_float, mean_run=_float, runs_z=_float,
        lag1_correlation=_float, prefix_deviation=_float, step_share_sd=_float, padding_efficiency=_float,
        step_quota_deviation=_float, mean_buckets_per_step=_float, cell_cost_spread=_float, step_efficiency=_float,
        grad_norm_median=_float, grad_norm_p95=_float, tokens_per_s=_float, anchors_per_s=_float, data_wait_share=_float,
        target_wait_share=_float, draft_share=_float, train_s=_float, created=_time, finished=_time, dataset=_text,
        dataset_fingerprint=_text, target=_text, git_commit=_text, checkpoint=_text, num_checkpoints=_int,
        checkpoint_steps=_int, checkpoint_slowdown=_float, checkpoint_slowdown_low=_float, checkpoint_slowdown_high=_float,
        checkpoint_slowdown_max=_float, other_slowdown_max=_float,
    ),
    "run_lengths": _schema(run_id=_text, level=_text, bucket=_int, run_length=_int, count=_int),
    "bucket_stats": _schema(
        run_id=_text, bucket=_int, num_batches=_int, num_sequences=_int, num_tokens=_int, num_padded_tokens=_int,
        num_anchors=_int, batch_share=_float, token_share=_float, padding_efficiency=_float, mean_seq_len=_float,
        max_seq_len=_int, mean_loss=_float,
    ),
    "grad_norms": _schema(
        run_id=_text, group=_text, long_share_low=_float, long_share_high=_float, num_steps=_int, num_nonfinite=_int,
        mean=_float, sd=_float, p05=_float, p25=_float, p50=_float, p75=_float, p95=_float, p99=_float, max=_float, mad=_float,
        num_spikes=_int, clip_share=_float,
    ),
    "checkpoints": _schema(
        run_id=_text, attempt=_int, step=_int, snapshot_s=_float, wait_s=_float, write_s=_float, num_bytes=_int, num_steps=_int,
        slowdown=_float,
    ),
    "curves": _schema(
        run_id=_text, step=_int, num_anchors_seen=_int, loss=_float, loss_adjusted=_float, grad_norm=_float,
        expected_acceptance_length=_float,
    ),
    "findings": _schema(
        run_id=_text, kind=_text, strength=_text, title=_text, text=_text, advice=_text, measure=_text, value=_float, unit=_text,
        low=_float, high=_float, threshold=_float, table=_text, rows=_text, evidence=_text, at_steps=pa.list_(_int),
    ),
    "loss_parts": _schema(run_id=_text, part=_text, share=_float, low=_float, high=_float, sd=_float),
    "run_positions": _schema(
        run_id=_text, level=_text, position=_int, num_steps=_int, grad_norm_mean=_float, grad_norm_low=_float,
        grad_norm_high=_float, loss_mean=_float, loss_low=_float, loss_high=_float,
    ),
    "waits": _schema(run_id=_text, cell=_int, stage=_text, seconds=_float, share_of_time=_float, per_batch_s=_float),
    "progress": _schema(
        run_id=_text, num_anchors_seen=_int, step=_int, loss=_float, loss_low=_float, loss_high=_float, loss_adjusted=_float,
        expected_acceptance_length=_float, acceptance_length=_float,
    ),
    "groups": _schema(group=_text, metric=_text, num_runs=_int, mean=_float, sd=_float, low=_float, high=_float, unit=_text),
    "group_comparisons": _schema(
        metric=_text, group_a=_text, group_b=_text, num_a=_int, num_b=_int, paired=_flag, value_a=_float, value_b=_float,
        difference=_float, ci_low=_float, ci_high=_float, effect_size=_float, effect_kind=_text, unit=_text,
    ),
    "comparisons": _schema(
        metric=_text, run_a=_text, run_b=_text, value_a=_float, value_b=_float, difference=_float, ci_low=_float, ci_high=_float,
        effect_size=_float, effect_kind=_text, unit=_text,
    ),
}  # fmt: skip


def table_of(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The report table `name`; a row must have exactly its columns.

    Raises:
        ValueError: a row has a column too many or too few (a mistake of ours).
    """
    schema = TABLES[name]
    for row in rows:
        if set(row) != set(schema.names):
            raise ValueError(f"{name}: columns differ: {sorted(set(row) ^ set(schema.names))}")
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def write_table(path: Path, name: str, table: pa.Table, extra: Mapping[str, str] | None = None) -> None:
    """Write `table` under the schema name `name`, with `extra` metadata. Encodings follow the column's type."""
    metadata = {NAME_KEY: name.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()}
    metadata.update({key.encode(): value.encode() for key, value in (extra or {}).items()})
    encodings, dictionaries = {}, []
    for field in table.schema:
        if pa.types.is_floating(field.type):
            encodings[field.name] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type):
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_string(field.type):
            dictionaries.append(field.name)
    buffer = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata(metadata),
        buffer,
        compression="zstd",
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=dictionaries,
        column_encoding=encodings,
    )
    write_atomically(path, buffer.getvalue())
