"""Compare runs: tidy Parquet tables, plain words, and a self-contained report. Reads run folders; knows no trainer."""

from dflash_core.analysis.analyze import analyze_runs
from dflash_core.analysis.reader import read_rows
from dflash_core.analysis.tables import SCHEMA_VERSION

__all__ = ["SCHEMA_VERSION", "analyze_runs", "read_rows"]
