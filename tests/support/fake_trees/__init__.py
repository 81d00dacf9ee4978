"""Complete datasets in the layouts of their archives, with pictures of a few pixels."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 48, 40


def write_pictures(root: Path, paths: Iterable[str], different: int = 16) -> None:
    """JPEG files, the second grayscale: hard links to the first ones, so that thousands take a second.

    A file has at most 65,000 hard links on ext4.
    """
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    originals = []
    folders = set()
    for index, path in enumerate(paths):
        file = root / path
        if file.parent not in folders:
            file.parent.mkdir(parents=True, exist_ok=True)
            folders.add(file.parent)
        if index < different:
            pixels = rng.integers(256, size=(HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize((WIDTH, HEIGHT))
            picture.convert("L" if index == 1 else "RGB").save(file, "JPEG")
            originals.append(file)
        else:
            file.hardlink_to(originals[index % different])


def spread(images: int, classes: range) -> dict[int, int]:
    """So many images shared out among classes, as evenly as can be."""
    least, more = divmod(images, len(classes))
    return {label: least + (place < more) for place, label in enumerate(classes)}
