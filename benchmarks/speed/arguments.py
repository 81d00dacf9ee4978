"""Arguments that the commands of all measured pages share."""

import argparse
from pathlib import Path

from benchmarks.console import HelpFormatter


def page_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="use tiny sizes, only to show that it runs"
    )
    parser.add_argument("--output", type=Path, metavar="PAGE", help="default: print only")
    return parser
