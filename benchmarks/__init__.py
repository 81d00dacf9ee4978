import signal
import sys

if sys.argv[:1] == ["-m"]:  # python -m benchmarks.NAME, which has imported nothing yet
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler prints a traceback
