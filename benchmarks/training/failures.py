"""Expected failures of a run, in one line each."""

import traceback
from contextlib import suppress

from benchmarks.console.failures import machine_failure
from benchmarks.console.printing import printable, reason
from benchmarks.datasets.listing import DatasetError
from benchmarks.datasets.remarks import verify_command
from benchmarks.records.results import NonFiniteError
from benchmarks.records.run_writer import RunWriter
from benchmarks.settings.experiment import Experiment
from benchmarks.training.loop import StepError


def note_failure(record: RunWriter, error: BaseException, line: str | None) -> None:
    """Write into run.json why the run failed."""
    cause = error.__cause__ if isinstance(error, StepError) else None
    with suppress(OSError):
        record.update(
            status="failed",
            error=line or f"{type(error).__name__}: {reason(error)}",
            diverged=isinstance(error, NonFiniteError),
            traceback=cause and "".join(traceback.format_exception(cause)),
        )


def expected_failure(error: BaseException, experiment: Experiment) -> str | None:
    """One line about an expected failure; None for a fault of the program."""
    if isinstance(error, (NonFiniteError, DatasetError)):
        # A data-loader worker's error carries the worker's traceback before its own line.
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        said = printable(str(error.args[0]).strip().rpartition(f"\n{name}: ")[2])
        if isinstance(error, DatasetError) and experiment.data.dataset != "glyphs":
            said += f"; {verify_command(vars(experiment.data))} finds all files of this kind"
        return said
    places = experiment.output, experiment.data.cache
    line = next(filter(None, (machine_failure(error, place) for place in places)), None)
    if line is None and isinstance(error, StepError):
        place = experiment.output
        line = f"{error}; {place}/run.json has the traceback; once that is mended, --resume goes on"
    return line
