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


def test_max_classes_keeps_the_first_by_name_or_those_a_seed_draws(listing, tmp_path):
    dataset = ImageSet(listing, views=VIEWS, max_classes=2)
    assert dataset.class_names == ["auk", "emu"]
    assert dataset.labels.tolist() == [1, 0, 1]
    assert np.array_equal(dataset.to_picture(dataset[0][0]), pixels_of(1))

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
def test_validation_makes_queries_whatever_the_folder_and_the_order_of_lines(retrieval, fold):
    """Half of the images of a held-out item; a single one is in the gallery."""

    def queries(listing):
        part = ImageSet(listing, "validation", views=VIEWS, fold=fold)
        for label in range(part.num_classes):
            own = part.is_query[part.labels == label]
            assert own.sum() == len(own) // 2
        return {part.name(i)[-12:] for i in part.is_query.nonzero().flatten().tolist()}

    root = retrieval.root
    (root / "large").symlink_to(root)
    paths = [f"large/{path}" for path in retrieval.paths[::-1]]
    others = retrieval.classes[::-1], retrieval.parts[::-1]
    reordered = Listing("toy", root, "large", paths, *others)
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


def test_workers_see_the_same_and_no_global_random_state_is_read_or_written(listing):
    dataset = ImageSet(listing, views=VIEWS)
    assert_global_random_state_is_neither_read_nor_written(dataset)
    assert_workers_see_the_same(dataset)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
"""Pillow would hand it to Ghostscript, whatever the file is called."""


def test_an_image_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for suffix in ("jpg", "png"):
        path = tmp_path / f"1.{suffix}"
        Image.fromarray(pixels_of(0)).resize((60, 60)).save(path)
        whole = path.read_bytes()
        for content, why in (
            (whole[:-40], "OSError: image file is truncated.*"),
            (b"", "UnidentifiedImageError: cannot identify image file .*"),
            (POSTSCRIPT, "UnidentifiedImageError: cannot identify image file .*"),
            (None, "FileNotFoundError: .*No such file or directory.*"),
        ):
            path.unlink() if content is None else path.write_bytes(content)
            line = rf"{path}: cannot be read \({why}\); restore or replace it"
            with pytest.raises(DatasetError, match=line) as error:
                read_image(path)
            assert "\n" not in str(error.value)
        path.write_bytes(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(DatasetError, match=r"exceeds limit .*; restore or replace it$"):
        read_image(path)


GRAY = pixels_of(1)[:, :, 0]
SIXTEEN = GRAY.astype(np.uint16) * 256 + 77


def exif(orientation):
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def as_rgb(gray):
    return np.repeat(gray[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("name", "pixels", "expected"),
    [
        ("gray.png", GRAY, as_rgb(GRAY)),
        ("gray16.png", SIXTEEN, as_rgb(GRAY)),
        ("gray16.tif", SIXTEEN, as_rgb(GRAY)),
        ("gray16.pgm", SIXTEEN, as_rgb(GRAY)),
        ("bits.png", GRAY > 99, as_rgb((GRAY > 99) * np.uint8(255))),
        ("alpha.png", np.dstack([pixels_of(2), GRAY]), pixels_of(2)),
        ("cmyk.tif", 255 - np.dstack([pixels_of(4), GRAY * 0 + 255]), pixels_of(4)),
    ],
)
@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_images_are_rgb_with_their_pixels_as_stored(tmp_path, name, pixels, expected):
    image = Image.fromarray(pixels, "CMYK") if "cmyk" in name else Image.fromarray(pixels)
    image.save(tmp_path / name)
    assert read_image(tmp_path / name).mode == "RGB"
    assert np.array_equal(np.array(read_image(tmp_path / name)), expected)


def test_an_image_without_a_white_is_refused(tmp_path):
    Image.fromarray(GRAY.astype(np.float32)).save(tmp_path / "1.tif")
    with pytest.raises(DatasetError, match=r"1.tif: .*does not define which value is white"):
        read_image(tmp_path / "1.tif")


@pytest.mark.parametrize("transparency", [2, bytes(range(0, 200, 25))], ids=["colour", "table"])
def test_transparency_of_a_palette_is_ignored(tmp_path, transparency):
    colours = np.random.default_rng(0).integers(256, size=(8, 3), dtype=np.uint8)
    places = np.random.default_rng(1).integers(8, size=(HEIGHT, WIDTH), dtype=np.uint8)
    image = Image.fromarray(places)
    image.putpalette(colours.tobytes())
    image.save(tmp_path / "1.png", transparency=transparency)
    assert np.array_equal(np.array(read_image(tmp_path / "1.png")), colours[places])


@pytest.mark.parametrize("image", [pixels_of(3), SIXTEEN], ids=["colour", "16 bits"])
def test_a_rotated_image_is_turned_if_asked_for(tmp_path, image):
    path = tmp_path / "1.png"
    for orientation in range(10):
        Image.fromarray(image).save(path, exif=exif(orientation))
        stored = read_image(path)
        assert stored.size == (WIDTH, HEIGHT)
        expected = ImageOps.exif_transpose(stored)
        assert np.array_equal(read_image(path, upright=True), expected)
        assert np.array_equal(stored, expected) == (orientation not in range(2, 9))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_turns_nothing_unless_the_orientation_is_whole(tmp_path):
    path, made = tmp_path / "1.jpg", exif(6)
    made[0x010F] = "Maker"
    for old, new, size in (
        (
            b"\x01\x0f",
            b"\x01\x00",
            (HEIGHT, WIDTH),
        ),  # a width that is a text, beside the orientation
        (b"MM\0*", b"MM\0?", (WIDTH, HEIGHT)),
    ):
        Image.fromarray(pixels_of(3)).save(path, exif=made)
        path.write_bytes(path.read_bytes().replace(old, new))
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
