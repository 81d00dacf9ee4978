"""The Glyphs dataset: its classes, its views, its splits and its cache."""

import hashlib

import numpy as np
import pytest
import torch

from benchmarks.datasets import glyphs
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.listing import DatasetError
from tests.support.seeded_views import assert_global_random_state_is_neither_read_nor_written

FACES = 12


@pytest.fixture(scope="module")
def splits(glyphs_root):
    names = ("train", "test", "development", "validation")
    return {split: Glyphs(glyphs_root, split) for split in names}


@pytest.fixture(scope="module")
def train(splits):
    return splits["train"]


def test_splits_are_disjoint_and_have_an_image_per_face(splits):
    assert (splits["train"].num_classes, splits["test"].num_classes) == (1084, 1085)
    for split in splits.values():
        assert torch.bincount(split.labels).tolist() == [FACES] * split.num_classes
    classes = {split: set(dataset.class_names) for split, dataset in splits.items()}
    assert not classes["train"] & classes["test"]
    assert not classes["development"] & classes["validation"]
    assert classes["development"] | classes["validation"] == classes["train"]
    assert len(classes["validation"]) == round(0.25 * len(classes["train"]))


def test_the_stages_have_disjoint_classes_of_the_training_half(glyphs_root, splits):
    def names(split, **stages):
        return set(Glyphs(glyphs_root, split, **stages).class_names)

    pretraining = names("train", stage="pretraining")
    draws = ((0, 0), (1, 0), (0, 1))
    drawn = [names("train", stage="fine_tuning", seed=seed, fold=fold) for seed, fold in draws]
    left = names("validation", stage="fine_tuning")
    assert (len(pretraining), len(left)) == (750, 234)
    assert [len(classes) for classes in drawn] == [100] * 3 and len(set.union(*drawn)) > 200
    assert not pretraining & set.union(left, *drawn)
    assert not drawn[0] & left
    assert pretraining | drawn[0] | left == set(splits["train"].class_names)
    for stage in ("pretraining", "fine_tuning"):
        assert names("test", stage=stage) == set(splits["test"].class_names)
        assert names("development", stage=stage) == names("train", stage=stage)


def test_a_seed_draws_classes_with_their_images(glyphs_root, train):
    drawn, other = (Glyphs(glyphs_root, max_classes=50, draw_seed=seed) for seed in (0, 1))
    assert drawn.num_classes == 50 and drawn.class_names != other.class_names
    place = train.class_names.index(drawn.class_names[1]) * FACES
    assert np.array_equal(drawn._images[FACES], train._images[place])


def test_pretraining_sees_drawings_that_are_shifted_and_no_more(glyphs_root):
    dataset = Glyphs(glyphs_root, stage="pretraining")
    drawing = dataset._images[30]
    np.testing.assert_array_equal(dataset.to_picture(dataset[30][0]), drawing)
    shifts = [(down, right) for down in range(-3, 4) for right in range(-3, 4)]
    shifted = {np.roll(drawing, shift, (0, 1)).tobytes(): shift for shift in shifts}
    seen = {shifted[dataset.to_picture(dataset[30, seed][0]).tobytes()] for seed in range(60)}
    assert len(seen) > 25
    assert not drawing[[0, 1, 2, -3, -2, -1]].any()  # nothing comes in at the other side


def test_characters_that_look_the_same_are_one_class_and_none_is_blank_or_cut(splits):
    names = splits["train"].class_names + splits["test"].class_names
    assert len(set(names)) == len(names)
    assert {"U+0041 A", "U+0061 a", "U+0416 Ж"} < {*names}  # Cyrillic Zhe looks like nothing else
    assert not {"U+0391 Α", "U+0410 А"} & {*names}  # Greek Alpha, Cyrillic A
    for split in (splits["train"], splits["test"]):
        ink = split._images
        assert ink.reshape(len(ink), -1).max(axis=1).min() > 0
        assert not ink[:, [0, -1], :].any()
        assert not ink[:, :, [0, -1]].any()


def test_a_training_view_is_a_pure_function_of_index_and_seed(train):
    first, label, index = train[25, 3]
    assert (first.shape, first.dtype) == ((1, 32, 32), torch.float32)
    assert (label, index, train.name(25)) == (2, 25, f"{train.class_names[2]}, DejaVu Sans Oblique")
    assert torch.equal(first, train[25, 3][0])
    assert not torch.equal(first, train[25, 4][0])
    assert not torch.equal(first, train[25][0])
    assert_global_random_state_is_neither_read_nor_written(train)


def test_no_number_moves(train):
    """Images and views are these to the bit: results depend on them."""
    if glyphs.__freetype_version__ == "2.14.3":  # what draws the images
        assert train.fingerprint.startswith("16265f374ae36222d04482481fab4ee5")
    glyph = np.zeros((16, 16), np.uint8)
    glyph[4:12, 6:10] = 255
    keys = ((0, glyphs.TEST_SEED), (7, 0), (7, 2**62))
    views = [torch.from_numpy(glyphs._view(glyph, *key)) for key in keys]
    pictures = b"".join(Glyphs.to_picture(view).tobytes() for view in views)
    assert hashlib.sha256(pictures).hexdigest().startswith("60e9261088b246095a9108a84cd8e3ed")


def test_the_cache(tmp_path, monkeypatch):
    """Two faces of digits at 16 pixels, which are drawn in no time."""
    monkeypatch.setattr(glyphs, "FACES", dict(list(glyphs.FACES.items())[:2]))
    monkeypatch.setattr(glyphs, "DRAWABLE", "N")
    with pytest.raises(ValueError, match="image_size: expected at least 16, got 15"):
        Glyphs(tmp_path, image_size=15)
    before = Glyphs(tmp_path, image_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(glyphs, "_render", None)
        assert Glyphs(tmp_path, "test", image_size=16).fingerprint == before.fingerprint
    [path] = tmp_path.glob("*.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[:300] + whole[310:])
    with pytest.raises(DatasetError, match=f"{path}: is damaged; delete it, and it is made again"):
        Glyphs(tmp_path, image_size=16)
    path.unlink()
    assert Glyphs(tmp_path, image_size=16).fingerprint == before.fingerprint
    assert path.read_bytes() == whole
    assert Glyphs(tmp_path, image_size=24).fingerprint != before.fingerprint
    monkeypatch.setattr(glyphs, "__freetype_version__", "another")
    Glyphs(tmp_path, image_size=16)
    assert len(list(tmp_path.glob("*.npz"))) == 3
