"""Writes characters that the network in examples/glyphs has not seen, as a folder of images to search.

    python -m benchmarks.datasets.drawn FOLDER [--classes 100]

A class is a character of the test half of Glyphs, FOLDER/NAME/FACE.png, drawn in twelve faces and not perturbed.
"""

import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.console.arguments import at_least, command_parser, user_folder
from benchmarks.console.printing import reason
from benchmarks.console.stopping import leave, signals_handled

SIDE = 96  # pixels


def write(folder: Path, classes: int) -> int:
    """Write the images of the first classes, and return their number."""
    from benchmarks.datasets.glyphs import Glyphs  # imports torch, which --help does without

    with tempfile.TemporaryDirectory() as cache:
        glyphs = Glyphs(cache, "test", image_size=SIDE, max_classes=classes)
    for index in range(len(glyphs)):
        name, face = glyphs.name(index).rsplit(", DejaVu ")
        name = unicodedata.name(name[-1], name[:-2])  # a newer Unicode has further names
        words = (word.lower().replace(" ", "-") for word in (name, face))
        path = folder.joinpath(*words).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(glyphs.drawing(index)).save(path)
    return len(glyphs)


@signals_handled(leave)
def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was written, and return the exit status: 2 if the folder is not new or empty."""
    parser = command_parser("datasets.drawn", __doc__)
    parser.add_argument("folder", type=user_folder, metavar="FOLDER", help="new or empty")
    parser.add_argument("--classes", type=at_least(2), default=100, help="default: 100")
    options = parser.parse_args(arguments)
    folder = options.folder
    try:
        if folder.exists() and any(folder.iterdir()):
            parser.error(f"{folder}: holds files; choose a new folder")
        images = write(folder, options.classes)
    except OSError as error:
        parser.error(reason(error))
    print(f"{folder}: {images:,} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
