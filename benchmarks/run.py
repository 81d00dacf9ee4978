"""Train, test and report one experiment.

    accelerate launch benchmarks/run.py [--recipe PAPER/TABLE/ROW] [--config FILE.yaml] [--any.setting value]

Without a recipe it runs the embedded default: binomial deviance on Glyphs. `--list` shows the recipes, `--help`
the settings, `--print_config` the resolved run; `--resume` continues from the last checkpoint. Exit status: 1 if
the run failed (run.json says why), 2 if it cannot start, 3 if another process is writing it, 128 + signal if it
was stopped and has saved.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started as a file
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler prints a traceback
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Packages import late: `--help` and a misspelt setting need no torch.
from benchmarks.console.arguments import say
from benchmarks.console.printing import PrintableError
from benchmarks.console.stopping import handle_signals, leave, signals_handled, workers_dismissed
from benchmarks.console.writing import InUseError
from benchmarks.reporting.recipe_list import recipe_table
from benchmarks.settings.command import Command, parse
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import dump


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    with signals_handled(leave), workers_dismissed():
        try:
            if "--list" in argv:
                say(recipe_table())
                return 0
            command = parse(argv).resolved()
            if "--print_config" in argv:
                say(dump(command.config), end="")
                return 0
            return _run(command, argv)
        except PrintableError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr)
            return 3 if isinstance(error, InUseError) else 2
        except KeyboardInterrupt as stop:
            return 128 + int(stop.args[0])


def _run(command: Command, argv: Sequence[str]) -> int:
    from benchmarks.records.run_folder import RunFolderError
    from benchmarks.records.run_writer import RunWriter
    from benchmarks.training.failures import expected_failure, note_failure
    from benchmarks.training.launcher import start
    from benchmarks.training.run import run

    accelerator = start(command.experiment)
    record: RunWriter | None = None
    try:
        record = RunWriter(command, argv, accelerator)  # finished? in use? another run's?
        run(command.experiment, record, accelerator)
        return 0
    except (ConfigError, RunFolderError, InUseError):
        raise
    except KeyboardInterrupt:
        assert record is not None  # until it has begun, a signal ends the process
        record.update(status="stopped")
        accelerator.print("\nstopped; rerun the same command with --resume to continue")
        raise
    except BaseException as error:
        line = expected_failure(error, command.experiment)
        if record is not None and record.begun:
            note_failure(record, error, line)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 1
    finally:
        handle_signals(leave)
        if record is not None:
            record.close()
        accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
