"""`ImageSet`: the images of a listing as labelled tensors."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.datasets.image_files import read_image
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.listing import DatasetError, Listing
from tests.support.seeded_views import (
    assert_global_random_state_is_neither_read_nor_written,
    assert_workers_see_the_same,
)

WIDTH, HEIGHT = 12, 10


class Views:
    """Pixels as they are; a training view is brighter."""

    image_size = resize = keep_aspect = None

    def middle(self, size):
        return 0

    def draw(self, size):
        return torch.rand(())

    def cut(self, image, more):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() + more


VIEWS = Views()


def pixels_of(index):
    return np.random.default_rng(index).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)


def shown(dataset, index):
    """The pixels of a test view."""
    return dataset[index][0].permute(1, 2, 0).numpy()


def write_listing(root, rows):
    """A PNG for each row (class, part), of which the i-th is noise of seed i."""
    paths = []
    for index, (name, _) in enumerate(rows):
        path = f"{name}/{index:03}.png"
        (root / name).mkdir(exist_ok=True)
        Image.fromarray(pixels_of(index)).save(root / path)
        paths.append(path)
    names, parts = map(list, zip(*rows, strict=True))
    return Listing("toy", root, "flat", paths, names, parts)


TRAIN = ["owl", "emu", "jay", "owl", "auk", "emu", "ibis", "kea"]
TEST = ["tit", "rhea", "tit"]
ROWS = [*((c, "train") for c in TRAIN[:5]), *((c, "test") for c in TEST)]
ROWS += [(c, "train") for c in TRAIN[5:]]


@pytest.fixture
def listing(tmp_path):
    return write_listing(tmp_path, ROWS)


def classes_of(dataset):
    """The class of each image, after asserting that label and path say the same."""
    names = [dataset.class_names[label] for label in dataset.labels]
    assert names == [dataset.name(i).split("/")[0] for i in range(len(dataset))]
    return names


def test_labels_count_the_classes_by_name_and_images_keep_their_order(listing):
    train, test = (ImageSet(listing, split, views=VIEWS) for split in ("train", "test"))
    assert train.class_names == ["auk", "emu", "ibis", "jay", "kea", "owl"]
    assert classes_of(train) == TRAIN and classes_of(test) == TEST
    assert train.labels.dtype == torch.int64
    assert (train.num_classes, test.num_classes) == (6, 2)
    assert [test[i][1:] for i in range(3)] == [(1, 0), (0, 1), (1, 2)]
    assert np.array_equal(shown(test, 0), pixels_of(5))
    assert test.ranking is None
    halves = ("development", "validation")
    split = [
        {*classes_of(ImageSet(listing, half, views=VIEWS, fold=1, folds=3))} for half in halves
    ]
    assert [len(classes) for classes in split] == [4, 2] and set.union(*split) == set(TRAIN)


def test_views_of_an_image_that_follow_each_other_are_made_of_one_decoding(listing):
    decoded = []

    class Counted(ImageSet):
        def image(self, index):
            decoded.append(index)
            return super().image(index)

    keys = [(0, 1), (0, 2), 0, 1]
    items = Counted(listing, views=VIEWS).__getitems__(keys)
    assert decoded == [0, 1]
    plain = ImageSet(listing, views=VIEWS)
    assert all(torch.equal(item[0], plain[key][0]) for key, item in zip(keys, items, strict=True))


def test_max_classes_keeps_the_first_by_name_or_those_a_seed_draws(listing):
    dataset = ImageSet(listing, views=VIEWS, max_classes=2)
    assert classes_of(dataset) == ["emu", "auk", "emu"]
    assert np.array_equal(shown(dataset, 0), pixels_of(1))

    def drawn(seed, most=3):
        dataset = ImageSet(listing, views=VIEWS, max_classes=most, draw_seed=seed)
        return sorted({*classes_of(dataset)})

    assert [drawn(seed) for seed in (0, 2)] == [["ibis", "jay", "owl"], ["emu", "ibis", "kea"]]
    assert drawn(0, 9) == ["auk", "emu", "ibis", "jay", "kea", "owl"]
    assert all(set(drawn(seed, 2)) < set(drawn(seed)) for seed in range(9))


def test_queries_are_the_listed_ones_and_in_validation_half_of_an_items_images(tmp_path):
    """Whatever the folder and the order of lines; a single image is in the gallery."""
    rows = [(f"item{i}", "train") for i in range(12) for _ in range(1 + i % 6)]
    rows += [("item90", "query"), ("item90", "gallery"), ("item91", "gallery"), ("item91", "query")]
    listing = write_listing(tmp_path, rows)
    listed = ImageSet(listing, "test", views=VIEWS).ranking.queries
    assert listed.tolist() == [True, False, False, True]
    assert ImageSet(listing, "development", views=VIEWS).ranking is None

    def queries(listing):
        part = ImageSet(listing, "validation", views=VIEWS)
        for label in range(part.num_classes):
            own = part.ranking.queries[part.labels == label]
            assert own.sum() == len(own) // 2
        return {part.name(i)[-12:] for i in part.ranking.queries.nonzero().flatten().tolist()}

    (tmp_path / "large").symlink_to(tmp_path)
    paths = [f"large/{path}" for path in listing.paths[::-1]]
    reordered = Listing("toy", tmp_path, "", paths, listing.classes[::-1], listing.parts[::-1])
    assert queries(listing) == queries(reordered) != set()


def test_a_training_view_is_a_pure_function_of_index_and_seed(listing):
    dataset, again = (ImageSet(listing, views=VIEWS) for _ in range(2))
    first = dataset[2, 7][0]
    assert torch.equal(first, again[2, 7][0])
    assert not torch.equal(first, dataset[2, 8][0])
    noises = [dataset[i, 7][0] - dataset[i][0] for i in (2, 3)]
    assert not torch.allclose(*noises, rtol=0, atol=1e-3)
    # Seeds that differ beyond 32 bits.
    assert not torch.equal(dataset[2, 2**62][0], dataset[2, 2**62 + 2**32][0])
    assert_global_random_state_is_neither_read_nor_written(dataset)
    assert_workers_see_the_same(dataset)


def test_an_image_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "1.jpg"
    Image.fromarray(pixels_of(0)).resize((60, 60)).save(path)
    whole = path.read_bytes()
    # Pillow would hand PostScript to Ghostscript, whatever the file is called.
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for content, why in (
        (whole[:-40], "OSError: image file is truncated.*"),
        (postscript, "UnidentifiedImageError: cannot identify image file .*"),
        (None, "No such file or directory"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        line = rf"{path}: cannot be read \({why}\); restore (or replace it|it, or name another)$"
        with pytest.raises(DatasetError, match=line):
            read_image(path)
    os.mkfifo(tmp_path / "2.jpg")  # nobody writes into it
    with pytest.raises(DatasetError, match=r"2.jpg: .*it is no regular file"):
        read_image(tmp_path / "2.jpg")
    Image.fromarray(pixels_of(0)[..., 0].astype(np.float32)).save(tmp_path / "1.tif")
    with pytest.raises(DatasetError, match=r"1.tif: .*does not define which value is white"):
        read_image(tmp_path / "1.tif")
    path.write_bytes(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(DatasetError, match=r"exceeds limit .*; restore or replace it$"):
        read_image(path)


GRAY = pixels_of(1)[:, :, 0]
SIXTEEN = GRAY.astype(np.uint16) * 256 + 77


def as_rgb(gray):
    return np.repeat(gray[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("name", "pixels", "expected"),
    [
        ("gray16.png", SIXTEEN, as_rgb(GRAY)),
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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rotated_image_is_turned_if_asked_for(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for pixels in (pixels_of(3), SIXTEEN):
        Image.fromarray(pixels).save(tmp_path / "1.png", exif=exif)
        stored, turned = (np.array(read_image(tmp_path / "1.png", upright=up)) for up in (0, 1))
        assert stored.shape == (HEIGHT, WIDTH, 3)
        assert np.array_equal(turned, np.rot90(stored, -1))
    exif[0x010F] = "Maker"  # damaged: then a width that is a text
    Image.fromarray(pixels_of(3)).save(tmp_path / "1.jpg", exif=exif)
    content = (tmp_path / "1.jpg").read_bytes()
    (tmp_path / "1.jpg").write_bytes(content.replace(b"\x01\x0f", b"\x01\x00"))
    assert read_image(tmp_path / "1.jpg", upright=True).size == (HEIGHT, WIDTH)
