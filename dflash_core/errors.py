"""The project's own errors. Each carries the exit code that the command line ends with.

A user's mistake is a `UserError` (2) whose text names the file, row or key; what fails later is a `TrainingError` (3).
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_TRAINING_FAILED = 3
EXIT_STOPPED_BY_SIGNAL = 4
EXIT_INTERRUPTED = 130


class DFlashError(Exception):
    """Base of all errors that are shown as one line, without a traceback."""

    exit_code = EXIT_TRAINING_FAILED


class UserError(DFlashError):
    """Something the user can mend: a file, a row, a key."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """An experiment file or an override is wrong; the text names file and key."""


class DataError(UserError):
    """An input file or dataset is wrong; the text names file and row."""


class TrainingError(DFlashError):
    """A run could not go on."""


class StageError(TrainingError):
    """A pipeline stage failed. `stage` and `batch` say where, `__cause__` says why."""

    def __init__(self, stage: str, batch: int | None, cause: BaseException | str) -> None:
        self.stage, self.batch = stage, batch
        where = f"stage {stage!r}" if batch is None else f"stage {stage!r}, batch {batch}"
        reason = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"{where}: {reason}")
        if isinstance(cause, BaseException):
            self.__cause__ = cause


class CellLostError(TrainingError):
    """Another cell of the run ended; the failure that the user must see is that cell's."""


class CheckpointError(TrainingError):
    """A checkpoint is damaged or does not fit the run; the text names the folder and the difference."""


class SchemaError(CheckpointError):
    """A whole checkpoint of another version of this program. It is no damage, so it is not passed over."""


class StoppedBySignal(DFlashError):
    """A signal asked the run to stop; its state was saved."""

    exit_code = EXIT_STOPPED_BY_SIGNAL
