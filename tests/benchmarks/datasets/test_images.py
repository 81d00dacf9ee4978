"""`ImageSet`: the images of a listing as labelled tensors."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from benchmarks.datasets import folder
from benchmarks.datasets.image_files import read_image
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError, Listing
from tests.support.counting import calls
from tests.support.fake_trees import write_pictures
from tests.support.seeded_views import (
    assert_global_random_state_is_neither_read_nor_written,
    assert_workers_see_the_same,
)

WIDTH, HEIGHT = 12, 10


@dataclass
class Views:
    """Pixels as they are; a training view has noise."""

    image_size = resize = None
    keep_aspect = True

    def test(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()

    def train(self, image):
        view = self.test(image)
        return view + torch.rand(view.shape)

    def to_picture(self, view):
        return view.permute(1, 2, 0).to(torch.uint8).numpy()


VIEWS = Views()


def pixels_of(index):
    return np.random.default_rng(index).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)


def write_listing(root, rows, **more):
    """A PNG for each row (class, part), of which the i-th is noise of seed i."""
    paths = []
    for index, (name, _) in enumerate(rows):
        path = f"{name}/{index:03}.png"
        (root / name).mkdir(exist_ok=True)
        Image.fromarray(pixels_of(index)).save(root / path)
        paths.append(path)
    names, parts = map(list, zip(*rows, strict=True))
    return Listing("toy", root, "flat", paths, names, parts, **more)


TRAIN = ["owl", "emu", "jay", "owl", "auk", "emu", "ibis", "kea"]
TEST = ["tit", "rhea", "tit"]
ROWS = [*((c, "train") for c in TRAIN[:5]), *((c, "test") for c in TEST)]
ROWS += [(c, "train") for c in TRAIN[5:]]


@pytest.fixture
def listing(tmp_path):
    return write_listing(tmp_path, ROWS)


@pytest.fixture
def retrieval(tmp_path):
    """Queries and a gallery, as In-Shop Clothes Retrieval has them: items of one to six images."""
    rows = [(f"item{i}", "train") for i in range(12) for _ in range(1 + i % 6)]
    rows += [("item90", "query"), ("item90", "gallery"), ("item91", "gallery"), ("item91", "query")]
    return write_listing(tmp_path, rows)


def test_labels_count_the_classes_by_name_and_images_keep_their_order(listing):
    train, test = (ImageSet(listing, split, views=VIEWS) for split in ("train", "test"))
    assert train.class_names == ["auk", "emu", "ibis", "jay", "kea", "owl"]
    assert train.labels.tolist() == [5, 1, 3, 5, 0, 1, 2, 4]
    assert train.labels.dtype == torch.int64
    assert [train.name(i).split("/")[0] for i in range(len(train))] == TRAIN
    assert test.class_names == ["rhea", "tit"]
    assert test.labels.tolist() == [1, 0, 1]
    assert (train.num_classes, len(train), test.num_classes, len(test)) == (6, 8, 2, 3)
    assert [test[i][1:] for i in range(3)] == [(1, 0), (0, 1), (1, 2)]
    assert np.array_equal(test.to_picture(test[0][0]), pixels_of(5))
    assert torch.equal(test[0][0], torch.from_numpy(pixels_of(5)).permute(2, 0, 1).float())
    assert (test.name(0), test.layout) == ("tit/005.png", "flat")
    assert test.is_query is None


@pytest.mark.parametrize("fold", range(3))
def test_development_and_validation_cut_the_training_classes(listing, fold):
    parts = [
        ImageSet(listing, split, views=VIEWS, fold=fold, folds=3)
        for split in ("development", "validation")
    ]
    classes = [set(part.class_names) for part in parts]
    assert not classes[0] & classes[1]
    assert classes[0] | classes[1] == set(TRAIN)
    assert len(classes[1]) == 2
    assert sum(map(len, parts)) == len(TRAIN)
    for part in parts:
        assert sorted(set(part.labels.tolist())) == list(range(part.num_classes))
        names = [part.class_names[label] for label in part.labels]
        assert names == [part.name(i).split("/")[0] for i in range(len(part))]


def test_max_classes_keeps_the_first_by_name(listing):
    dataset = ImageSet(listing, views=VIEWS, max_classes=2)
    assert dataset.class_names == ["auk", "emu"]
    assert dataset.labels.tolist() == [1, 0, 1]
    assert np.array_equal(dataset.to_picture(dataset[0][0]), pixels_of(1))


def test_a_seed_draws_classes_by_their_names_alone(listing, tmp_path):
    def drawn(seed, most=3, of=listing, split="train", **fold):
        dataset = ImageSet(of, split, views=VIEWS, max_classes=most, draw_seed=seed, **fold)
        names = [dataset.class_names[label] for label in dataset.labels]
        assert names == [dataset.name(i).split("/")[0] for i in range(len(dataset))]
        return dataset.class_names

    assert [drawn(seed) for seed in (0, 2)] == [["ibis", "jay", "owl"], ["emu", "ibis", "kea"]]
    assert drawn(0, 9) == ["auk", "emu", "ibis", "jay", "kea", "owl"]
    assert len({tuple(drawn(seed)) for seed in range(20)}) > 8
    (tmp_path / "twice").mkdir()
    twice = write_listing(tmp_path / "twice", [*reversed(ROWS), *ROWS])
    for seed in range(9):
        assert set(drawn(seed, 2)) < set(drawn(seed))
        assert drawn(seed, of=twice) == drawn(seed)
        left = ImageSet(listing, "development", views=VIEWS, fold=1, folds=3).class_names
        assert set(drawn(seed, split="development", fold=1, folds=3)) < set(left)


def test_queries_of_the_test_part_are_the_listed_ones(retrieval):
    test = ImageSet(retrieval, "test", views=VIEWS)
    assert test.is_query.tolist() == [True, False, False, True]
    assert ImageSet(retrieval, "train", views=VIEWS).is_query is None
    assert ImageSet(retrieval, "development", views=VIEWS).is_query is None


@pytest.mark.parametrize("fold", range(4))
def test_validation_makes_queries_and_a_gallery_of_held_out_items(retrieval, fold):
    part = ImageSet(retrieval, "validation", views=VIEWS, fold=fold)
    assert part.is_query.dtype == torch.bool
    for label in range(part.num_classes):
        images = int((part.labels == label).sum())
        queries = int(part.is_query[part.labels == label].sum())
        assert queries == images // 2  # and so a single image is in the gallery


def test_queries_depend_on_neither_the_folder_nor_the_order_of_lines(retrieval):
    def queries(listing):
        part = ImageSet(listing, "validation", views=VIEWS)
        return {part.name(i)[-12:] for i in part.is_query.nonzero().flatten().tolist()}

    root = retrieval.root
    for name in set(retrieval.classes):
        (root / "large").mkdir(exist_ok=True)
        (root / "large" / name).symlink_to(root / name)
    reordered = Listing(
        "toy",
        root,
        "large",
        [f"large/{path}" for path in retrieval.paths[::-1]],
        retrieval.classes[::-1],
        retrieval.parts[::-1],
    )
    assert queries(retrieval)
    assert queries(reordered) == queries(retrieval)


def test_a_training_view_is_a_pure_function_of_index_and_seed(listing):
    dataset, again = (ImageSet(listing, views=VIEWS) for _ in range(2))
    first = dataset[2, 7][0]
    assert torch.equal(first, again[2, 7][0])
    assert not torch.equal(first, dataset[2, 8][0])
    noises = [dataset[i, 7][0] - dataset[i][0] for i in (2, 3)]
    assert not torch.allclose(*noises, rtol=0, atol=1e-3)
    assert dataset[2, 7][1:] == dataset[2][1:]
    # Seeds that differ beyond 32 bits.
    assert not torch.equal(dataset[2, 2**62][0], dataset[2, 2**62 + 2**32][0])


def test_global_random_state_is_neither_read_nor_written(listing):
    assert_global_random_state_is_neither_read_nor_written(ImageSet(listing, views=VIEWS))


def test_data_loader_workers_see_the_same(listing):
    assert_workers_see_the_same(ImageSet(listing, views=VIEWS))


def damage(path, how):
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut off": content[:-40], "empty": b"", "PostScript": POSTSCRIPT}[how])


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
"""Pillow would hand it to Ghostscript, whatever the file is called."""
DAMAGES = {
    "cut off": "OSError: image file is truncated.*",
    "empty": "UnidentifiedImageError: cannot identify image file .*",
    "PostScript": "UnidentifiedImageError: cannot identify image file .*",
    "missing": "FileNotFoundError: .*No such file or directory.*",
}


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_image_stops_the_reading_with_its_path(tmp_path, suffix, how):
    path = tmp_path / f"1.{suffix}"
    Image.fromarray(pixels_of(0)).resize((60, 60)).save(path)
    damage(path, how)
    message = rf"{path}: cannot be read \({DAMAGES[how]}\); restore or replace it"
    with pytest.raises(DatasetError, match=message) as error:
        read_image(path)
    assert "\n" not in str(error.value)


def test_an_image_that_is_too_large_is_refused(tmp_path, monkeypatch):
    Image.fromarray(pixels_of(0)).save(tmp_path / "1.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(DatasetError, match=r"exceeds limit .*; restore or replace it$"):
        read_image(tmp_path / "1.png")


GRAY = pixels_of(1)[:, :, 0]
SIXTEEN = GRAY.astype(np.uint16) * 256 + 77


def exif(orientation):
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def as_rgb(gray):
    return np.repeat(gray[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("name", "image", "arguments", "expected"),
    [
        ("gray.png", Image.fromarray(GRAY), {}, as_rgb(GRAY)),
        ("gray16.png", Image.fromarray(SIXTEEN), {}, as_rgb(GRAY)),
        ("gray16.tif", Image.fromarray(SIXTEEN), {}, as_rgb(GRAY)),
        ("gray16.pgm", Image.fromarray(SIXTEEN), {}, as_rgb(GRAY)),
        ("float.tif", Image.fromarray(GRAY.astype(np.float32)), {}, None),
        ("bits.png", Image.fromarray(GRAY > 99), {}, as_rgb((GRAY > 99) * np.uint8(255))),
        (
            "alpha.png",
            Image.fromarray(np.dstack([pixels_of(2), GRAY])),
            {},
            pixels_of(2),
        ),
        ("exif.png", Image.fromarray(pixels_of(3)), {"exif": exif(6)}, pixels_of(3)),
        (
            "cmyk.tif",
            Image.fromarray(255 - np.dstack([pixels_of(4), GRAY * 0 + 255]), "CMYK"),
            {},
            pixels_of(4),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_images_are_rgb_with_their_pixels_as_stored(tmp_path, name, image, arguments, expected):
    path = tmp_path / name
    image.save(path, **arguments)
    if expected is None:
        with pytest.raises(DatasetError, match=rf"{name}: .*does not define which value is white"):
            read_image(path)
    else:
        assert read_image(path).mode == "RGB"
        assert np.array_equal(np.array(read_image(path)), expected)


@pytest.mark.parametrize("transparency", [2, bytes(range(0, 200, 25))], ids=["colour", "table"])
def test_transparency_of_a_palette_is_ignored(tmp_path, transparency):
    colours = np.random.default_rng(0).integers(256, size=(8, 3), dtype=np.uint8)
    places = np.random.default_rng(1).integers(8, size=(HEIGHT, WIDTH), dtype=np.uint8)
    image = Image.fromarray(places)
    image.putpalette(colours.tobytes())
    image.save(tmp_path / "1.png", transparency=transparency)
    assert np.array_equal(np.array(read_image(tmp_path / "1.png")), colours[places])


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("image", [pixels_of(3), SIXTEEN], ids=["colour", "16 bits"])
def test_a_rotated_image_is_turned_if_asked_for(tmp_path, orientation, image):
    path = tmp_path / "1.png"
    Image.fromarray(image).save(path, exif=exif(orientation))
    stored = read_image(path)
    assert stored.size == (WIDTH, HEIGHT)
    expected = ImageOps.exif_transpose(stored)
    assert np.array_equal(read_image(path, upright=True), expected)
    assert np.array_equal(stored, expected) == (orientation not in range(2, 9))


@pytest.mark.parametrize(
    ("old", "new", "turned"),
    [
        (b"\x01\x0f", b"\x01\x00", True),  # a width that is a text, beside the orientation
        (b"MM\0*", b"MM\0?", False),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_turns_nothing_unless_the_orientation_is_whole(tmp_path, old, new, turned):
    path, made = tmp_path / "1.jpg", exif(6)
    made[0x010F] = "Maker"
    Image.fromarray(pixels_of(3)).save(path, exif=made)
    path.write_bytes(path.read_bytes().replace(old, new))
    size = (HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT)
    assert read_image(path, upright=True).size == size


def test_only_a_folder_of_ones_own_is_shown_upright(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(pixels_of(3)).save(tmp_path / name / "1.png", exif=exif(6))
    own = folder.read(tmp_path, 0.5)
    stored = Listing("cub", tmp_path, "flat", own.paths, own.classes, own.parts)
    shown = [ImageSet(listing, views=VIEWS)[0][0] for listing in (own, stored)]
    turned = np.asarray(Image.fromarray(pixels_of(3)).rotate(-90, expand=True))
    for view, pixels in zip(shown, (turned, pixels_of(3)), strict=True):
        assert np.array_equal(VIEWS.to_picture(view), pixels)


def test_a_set_looks_at_each_file_once_and_opens_none(tmp_path):
    paths = [f"{i % 20}/{i}.jpg" for i in range(1_000)]
    write_pictures(tmp_path, paths)
    classes = [path.split("/")[0] for path in paths]
    listing = Listing("toy", tmp_path, "flat", paths, classes, ["train"] * len(paths))
    with calls(20 * len(paths)) as counted:
        ImageSet(listing, "validation", views=VIEWS)
    assert counted["getsize"] == len(paths)
    assert counted["open"] == 0
