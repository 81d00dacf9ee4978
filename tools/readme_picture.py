"""Draws README's picture: test queries with their neighbours, as two runs of `make demo` found them.

    python -m tools.readme_picture RUN_WITHOUT RUN_WITH --output docs/assets/neighbours.png

The queries are those that every run saves, spread evenly over the test set: nobody chose them.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from benchmarks import records
from benchmarks.reporting import pictures

QUERIES = NEIGHBOURS = 8
SCALE = 2  # pixels of the picture for one of an image
TITLE, GAP = 48, 32  # height of the titles, and room between the columns
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def draw(runs: list[records.Run]) -> Image.Image:
    """A column for each run, below its label, with the same queries in the same rows.

    Raises:
        ValueError: if a run saved no neighbours, or the runs saved different queries.
    """
    found = [pictures.saved(run.file("retrieval.npz")) for run in runs]
    names = {tuple(one["query_names"][:QUERIES]) if one else () for one in found}
    if len(names) != 1 or () in names:
        raise ValueError(
            "retrieval.npz: expected the same queries in all runs; give runs of one test set"
        )
    columns = [
        pictures.retrieval_rows(one, QUERIES, NEIGHBOURS).repeat(SCALE, 0).repeat(SCALE, 1)
        for one in found
    ]
    height, width, _ = columns[0].shape
    picture = Image.new("RGB", (len(runs) * (width + GAP) - GAP, height + TITLE), "white")
    pen = ImageDraw.Draw(picture)
    font = ImageFont.truetype(str(FONT), 26)
    for i, (run, column) in enumerate(zip(runs, columns, strict=True)):
        left = i * (width + GAP)
        picture.paste(Image.fromarray(column), (left, TITLE))
        pen.text((left + width // 2, TITLE // 2), run.label, "black", font, anchor="mm")
    return picture


def main(arguments: list[str] | None = None) -> int:
    """Writes the picture; 2 if it cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m tools.readme_picture", description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        picture = draw([records.load_run(folder) for folder in options.runs])
        picture.save(options.output, optimize=True)
    except (ValueError, OSError) as error:
        print(f"readme_picture: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
