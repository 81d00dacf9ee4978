"""Glyphs: a retrieval dataset that every installation already has.

Matplotlib ships the DejaVu fonts. Every character that all twelve of their common faces can draw is a class
(about 2,150), and every face gives one image of it. Half of the classes train and the other half test, as in
CUB-200-2011, Cars-196, Stanford Online Products and In-Shop. Each view of an image has a random affine map, an
occluding rectangle and Gaussian noise.

Construction:

1. Characters: letters, numbers, punctuation and symbols that have an outline in each face.
2. Classes: two characters whose outlines are the same, up to a shift, in at least half of the faces are one class,
   named after the lower code point (Latin A, Greek Alpha and Cyrillic A). Outlines depend only on the font files.
3. Images: drawn once at one em size, without hinting, centred; glyphs that would be too large are drawn smaller.
   They are cached in `root` under a name that hashes the font files.
4. Splits: classes are ordered by the SHA-256 of their name. The first half trains; it is cut into the validation
   folds, or into stages (docs/glyphs.md): its first 750 classes are for "pretraining", shifted but not otherwise
   perturbed; "fine_tuning" draws 100 of the others for each seed and fold.
"""

import hashlib
import math
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from matplotlib.ft2font import FT2Font, LoadFlags, __freetype_version__

from benchmarks.console.printing import progress_bar
from benchmarks.console.writing import replacing
from benchmarks.datasets.listing import DatasetError
from benchmarks.datasets.splits import Split, Stage, limited, shuffled, validation_fold

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FORMAT = 1  # of the cache: raise it with every change to the classes or their drawing
FACES = {
    f"DejaVu {family} {style}".strip(): f"DejaVu{family}-{style}".replace(" ", "").rstrip("-")
    + ".ttf"
    for family, slanted in (("Sans", "Oblique"), ("Sans Mono", "Oblique"), ("Serif", "Italic"))
    for style in ("", slanted, "Bold", f"Bold {slanted}")
}
DRAWABLE = "LNPS"  # Unicode's letters, numbers, punctuation, symbols; marks (M) need a base letter

EM = 7 / 8  # em size of the drawing, of the image's side
LONGEST_SIDE = 3 / 4  # largest extent of a glyph: leaves room for the affine map
# The perturbation; each value is drawn uniformly from the symmetric or the given range.
ROTATION = math.radians(15)
SHEAR = math.tan(math.radians(10))
SCALE = (0.75, 1.15)
TRANSLATION = 0.1  # of the image's side
OCCLUDED_SIDE = 0.5  # at most, of the image's side: at most a quarter of the area
NOISE = 0.15  # standard deviation, of the range from black to white
SHIFT = 3 / 32  # of the image's side, at most: the only perturbation in pretraining
PRETRAINED, FINE_TUNED = 750, 100  # classes of the stages
TEST_SEED = 2**63  # larger than that of any training view


class Glyphs(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
    """Characters as classes, font faces as their images; classes are disjoint between splits.

    Items, splits and attributes are as those of `ImageSet`; an image is (1, S, S), normalised to -1 (background) to
    1 (ink) plus noise, and the fingerprint is of all rendered images and their class names.

    Args:
        root: Folder of the cache. The images are rendered on first use, in some seconds.
        image_size: Height and width S in pixels.
        stage: Split the training half by stages instead, see above. Default: by folds.
        seed: With the fold, decides which classes the stage "fine_tuning" draws.

    Raises:
        DatasetError: if the cache is damaged.
        ValueError: for an impossible fold, or an image_size below 16.
    """

    ranking = None  # every image is a query and in the gallery
    layout = "rendered"
    view = None  # there is one kind
    content = None  # the fingerprint is that of the pixels

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        image_size: int = 32,
        fold: int = 0,
        folds: int = 4,
        max_classes: int | None = None,
        stage: Stage | None = None,
        seed: int = 0,
        draw_seed: int | None = None,
    ) -> None:
        if image_size < 16:  # accents would vanish
            raise ValueError(f"image_size: expected at least 16, got {image_size}")
        names, images, self.fingerprint = _cached(Path(root), image_size)
        chosen = _split(names, split, fold, folds, stage, seed)
        self.class_names = limited(chosen, max_classes, draw_seed)
        self.num_classes = len(self.class_names)
        self.labels = torch.arange(self.num_classes).repeat_interleave(len(FACES))
        self._clean = stage == "pretraining" and split in ("train", "development")
        self._images = images[np.isin(names, self.class_names)].reshape(-1, image_size, image_size)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[torch.Tensor, int, int]:
        index, seed = key if isinstance(key, tuple) else (key, None)
        glyph = self._images[index]
        if self._clean:
            view = _shifted(glyph, index, seed)
        else:
            view = _view(glyph, index, TEST_SEED if seed is None else seed)
        return torch.from_numpy(view), index // len(FACES), index

    def name(self, index: int) -> str:
        """The class and the face of an image: "U+0041 A, DejaVu Sans Bold"."""
        label, face = divmod(index, len(FACES))
        return f"{self.class_names[label]}, {list(FACES)[face]}"

    def drawing(self, index: int) -> Pixels:
        """An image as it was drawn, (S, S), not perturbed."""
        image: Pixels = self._images[index]
        return image

    @staticmethod
    def to_picture(image: torch.Tensor) -> Pixels:
        """Undo the normalisation of an item's image: (1, S, S) float -> (S, S) uint8."""
        picture = (image[0].float().cpu() + 1) * (255 / 2)
        return picture.round().clamp(0, 255).to(torch.uint8).numpy()


def _shifted(glyph: Pixels, index: int, seed: int | None) -> Floats:
    """A glyph (S, S) shifted by a seed, (1, S, S); without a seed as it was drawn."""
    right, down = 0, 0
    if seed is not None:
        most = int(SHIFT * len(glyph))  # less than the border that every drawing has
        generator = np.random.Generator(np.random.SFC64((index, seed)))
        right, down = generator.integers(-most, most + 1, size=2).tolist()
    return np.roll(glyph, (down, right), axis=(0, 1))[None].astype(np.float32) * (2 / 255) - 1


def _view(glyph: Pixels, index: int, seed: int) -> Floats:
    """The view of a glyph (S, S) for a seed, (1, S, S): a pure function of its arguments."""
    generator = np.random.Generator(np.random.SFC64((index, seed)))
    draws = generator.random(10).tolist()
    angle, shear, right, down = (2 * draw - 1 for draw in draws[:4])
    scale, height, width, top, left, gray = draws[4:]

    # As torch's `grid_sample` takes it, [M^-1 | -M^-1 t], from a place in the view to that in the glyph:
    # M = scale * rotation(angle) @ [[1, shear], [0, 1]] and t = (right, down), in units of half a side.
    angle, shear, scale = angle * ROTATION, shear * SHEAR, SCALE[0] + scale * (SCALE[1] - SCALE[0])
    right, down = 2 * right * TRANSLATION, 2 * down * TRANSLATION
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    xx, xy, yx, yy = cos + shear * sin, sin - shear * cos, -sin, cos
    inverse = (xx, xy, -xx * right - xy * down), (yx, yy, -yx * right - yy * down)
    affine = np.array(inverse, dtype=np.float32)
    size = len(glyph)
    where = torch.from_numpy((_grid(size) @ affine.T).reshape(1, size, size, 2))
    ink = torch.from_numpy(glyph[None, None].astype(np.float32))
    view: Floats = F.grid_sample(ink, where, align_corners=False)[0].numpy()

    tall, wide = round(height * OCCLUDED_SIDE * size), round(width * OCCLUDED_SIDE * size)
    row, column = int(top * (size - tall + 1)), int(left * (size - wide + 1))
    view[:, row : row + tall, column : column + wide] = 255 * gray

    view *= 2 / 255
    view -= 1
    view += generator.standard_normal(view.shape, dtype=np.float32) * np.float32(2 * NOISE)
    return view


@cache
def _grid(size: int) -> Floats:
    """The centres (x, y, 1) of an image's pixels in `grid_sample`'s coordinates, (size * size, 3)."""
    axis = (2 * np.arange(size, dtype=np.float32) + 1) / size - 1
    x, y = np.tile(axis, size), np.repeat(axis, size)
    return np.stack([x, y, np.ones_like(x)], axis=1)


def _split(
    names: Sequence[str], split: Split, fold: int, folds: int, stage: Stage | None, seed: int
) -> list[str]:
    """A split's classes, in the order of the names."""
    order, half = shuffled(names), len(names) // 2
    whole = {"all": order, "test": order[half:]}
    if split in whole:
        kept = {*whole[split]}
    elif stage is not None:
        seen, others = order[:PRETRAINED], order[PRETRAINED:half]
        if stage == "fine_tuning":
            drawn = shuffled(others, salt=f"{seed} {fold} ")
            seen, others = drawn[:FINE_TUNED], drawn[FINE_TUNED:]
        kept = {*(others if split == "validation" else seen)}
    elif split == "train":
        kept = {*order[:half]}
    else:
        kept = {*validation_fold(order[:half], fold, folds)[split == "validation"]}
    return [name for name in names if name in kept]


Rendered = tuple[list[str], Pixels, str]
"""The classes' names, their images (classes, faces, S, S), and the SHA-256 of both."""


def _cached(root: Path, size: int) -> Rendered:
    """All classes, rendered if need be."""
    files = [Path(matplotlib.get_data_path(), "fonts", "ttf", file) for file in FACES.values()]
    version = f"{FORMAT} {__freetype_version__}".encode()
    digest = hashlib.sha256(version + b"".join(file.read_bytes() for file in files)).hexdigest()
    path = root / f"glyphs-v{FORMAT}-{size}px-{digest[:16]}.npz"
    if not path.exists():
        rendered, drawn = _render([FT2Font(str(file)) for file in files], size)
        root.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(file, code_points=rendered, images=drawn)
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=1)  # a run reads it for each of its splits
def _read(path: Path, *facts: int) -> Rendered:
    try:  # the file has checksums
        with np.load(path) as archive:
            code_points, images = archive["code_points"].tolist(), archive["images"]
    except Exception as error:  # damaged bytes make numpy raise almost any error
        raise DatasetError(f"{path}: is damaged; delete it, and it is made again") from error
    names = [f"U+{point:04X} {chr(point)}" for point in code_points]
    fingerprint = hashlib.sha256("\n".join(names).encode() + images.tobytes()).hexdigest()
    return names, images, fingerprint


def _render(fonts: Sequence[FT2Font], size: int) -> tuple[list[int], Pixels]:
    """Find the classes and draw them; return the code points and the images (classes, faces, size, size)."""
    code_points = _distinct_characters(fonts)
    images = np.zeros((len(code_points), len(fonts), size, size), dtype=np.uint8)
    for face, font in enumerate(progress_bar(fonts, desc="Rendering glyphs", unit="face", delay=1)):
        for row, code_point in enumerate(code_points):
            ink = _drawn(font, chr(code_point), EM * size)
            if (extent := max(ink.shape)) > LONGEST_SIDE * size:
                smaller = EM * size * LONGEST_SIDE * size / extent
                ink = _drawn(font, chr(code_point), smaller)
            top, left = (size - ink.shape[0]) // 2, (size - ink.shape[1]) // 2
            images[row, face, top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return code_points, images


def _distinct_characters(fonts: Sequence[FT2Font]) -> list[int]:
    """Code points that every font draws, except those that half of the fonts draw like another one."""
    common = set.intersection(*(set(font.get_charmap()) for font in fonts))
    code_points = sorted(c for c in common if unicodedata.category(chr(c))[0] in DRAWABLE)
    # (characters, fonts): equal numbers in a column are equal outlines, 0 is none.
    drawings = np.empty((len(code_points), len(fonts)), dtype=np.int64)
    for column, font in enumerate(fonts):
        numbers = {b"": 0}
        for row, code_point in enumerate(code_points):
            outline = _outline(font, code_point)
            drawings[row, column] = numbers.setdefault(outline, len(numbers))

    kept: list[int] = []
    for row, drawing in enumerate(drawings):
        same = (drawings[kept] == drawing).sum(axis=1)
        if drawing.all() and not (2 * same >= len(fonts)).any():
            kept.append(row)
    return [code_points[row] for row in kept]


def _outline(font: FT2Font, code_point: int) -> bytes:
    """A glyph's outline in font units, moved to the origin; empty for a blank."""
    font.load_char(code_point, flags=LoadFlags.NO_SCALE)
    vertices, codes = font.get_path()
    return (vertices - vertices.min(axis=0)).tobytes() + codes.tobytes() if len(vertices) else b""


def _drawn(font: FT2Font, character: str, em: float) -> Pixels:
    """The smallest box around a drawn character, (height, width)."""
    font.set_size(em, 72)  # at 72 dpi a point is a pixel
    font.set_text(character, flags=LoadFlags.NO_HINTING)
    font.draw_glyphs_to_bitmap()
    picture: Pixels = np.array(font.get_image())
    rows, columns = (np.flatnonzero(picture.any(axis=axis)) for axis in (1, 0))
    return picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
