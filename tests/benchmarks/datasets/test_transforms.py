"""The views of an image against pictures made by hand with Pillow and numpy."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.datasets.transforms import ImageViews

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AUGMENTATIONS = ("multi_resolution", "random_crop", "random_resized_crop", "none")
FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def views(image_size, **settings):
    return ImageViews(image_size=image_size, **{"mean": MEAN, "std": STD, **settings})


def noise(width, height):
    generator = np.random.default_rng(width * height)
    return Image.fromarray(generator.integers(1, 256, (height, width, 3), dtype=np.uint8))


def middle_view(make, image):
    return make.cut(image, make.middle(image.size))


def random_view(make, image):
    return make.cut(image, make.draw(image.size))


def draws(make, image, count):
    """Training views as (S, S, 3) pictures."""
    return [make.to_picture(random_view(make, image)) for _ in range(count)]


def assert_uniform(counts, values):
    """Pearson's statistic, four standard deviations of its approximately normal distribution."""
    expected = sum(counts.values()) / len(values)
    freedom = len(values) - 1
    statistic = sum((counts[value] - expected) ** 2 / expected for value in values)
    assert set(counts) == set(values)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [(50, 37), (20, 90), (9, 13)])
@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("keep_aspect", [True, False])
def test_the_test_view_is_the_middle_of_the_resized_image(size, interpolation, keep_aspect):
    image, crop, resize = noise(*size), 17, 20
    make = views(crop, resize=resize, keep_aspect=keep_aspect, interpolation=interpolation)
    factor = resize / min(size)
    to = tuple(int(side * factor) for side in size) if keep_aspect else (resize, resize)
    resized = np.asarray(image.resize(to, FILTERS[interpolation]))
    (left, right), (top, bottom) = (  # an odd number of pixels has two middles
        (math.floor((side - crop) / 2), math.ceil((side - crop) / 2)) for side in to
    )
    middles = [resized[y : y + crop, x : x + crop] for y in (top, bottom) for x in (left, right)]
    picture = make.to_picture(middle_view(make, image))
    assert any(np.array_equal(picture, middle) for middle in middles)


def test_channels_are_normalised_in_the_order_red_green_blue_and_back():
    image = noise(64, 64)
    expected = ((np.asarray(image) / 255.0 - MEAN) / STD).transpose(2, 0, 1)
    make = views(64, resize=64)
    view = middle_view(make, image)
    np.testing.assert_allclose(view.numpy(), expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(make.to_picture(view), np.asarray(image))


def test_the_default_of_resize_shows_seven_eighths_or_with_multi_resolution_everything():
    sides = [views(28, augmentation=augmentation).resized_side for augmentation in AUGMENTATIONS]
    assert sides == [28, 32, 32, 32]
    with pytest.raises(ValueError, match=r"resize: expected at least .* \(28\), got 27"):
        views(28, resize=27)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_any_image_gives_views_of_the_size_that_the_seed_of_torch_decides(augmentation):
    make = views(12, augmentation=augmentation)
    for size in [(1, 1), (5, 300), (300, 5), (40, 31)]:
        image = noise(*size)
        state = torch.get_rng_state()
        kinds = (middle_view, random_view, random_view)
        test, first, other = (view(make, image) for view in kinds)
        for view in (test, first):
            assert (view.shape, view.dtype) == ((3, 12, 12), torch.float32)
            assert view.is_contiguous() and torch.isfinite(view).all()
        drawn = not torch.equal(torch.get_rng_state(), state)
        torch.set_rng_state(state)
        assert all(torch.equal(random_view(make, image), view) for view in (first, other))
    assert drawn == (not torch.equal(first, test)) == (augmentation != "none")


def test_random_crops_begin_anywhere_and_half_of_them_are_mirrored():
    """Crops of 8 x 8 from an image that is not resampled: red is the column, green the row."""
    rows, columns = np.mgrid[:12, :15]  # 12 is what the shorter side becomes
    source = np.stack([columns, rows, np.full_like(rows, 200)], axis=-1).astype(np.uint8)
    make = views(8, resize=12, augmentation="random_crop")
    assert make.draw((36, 24)).resized == (18, 12)
    seen, mirrored = Counter(), 0
    for picture in draws(make, Image.fromarray(source), 400):
        if picture[0, 0, 0] > picture[0, -1, 0]:
            picture = picture[:, ::-1]
            mirrored += 1
        left, top = picture[0, 0, :2].tolist()
        np.testing.assert_array_equal(picture, source[top : top + 8, left : left + 8])
        seen[left, top] += 1
    assert_uniform(seen, [(x, y) for x in range(8) for y in range(5)])
    assert abs(mirrored - 200) < 4 * math.sqrt(400) / 2, "four standard deviations off"


def test_multi_resolution_is_the_image_at_a_random_size_on_black():
    """The longer side is uniform; half as high as wide, the image always fits into the crop's height."""
    image = noise(100, 50)
    make = views(100, augmentation="multi_resolution")
    heights = []
    for picture in draws(make, image, 300):
        columns, rows = (np.flatnonzero(picture.any(axis=(axis, 2))) for axis in (0, 1))
        width, height = len(columns), len(rows)
        heights.append(height)
        assert width in {min(100, 2 * height - 1), min(100, 2 * height)}
        if width < 100:
            resized = image.resize((width, height), Image.Resampling.BILINEAR)
            canvas = Image.new("RGB", (100, 100))
            canvas.paste(resized, ((100 - width) // 2, (100 - height) // 2))
            sides = (canvas, np.asarray(canvas)[:, ::-1])
            assert any(np.array_equal(picture, side) for side in sides)
    assert min(heights) >= 41  # at a scale of 0.8, rounded up
    assert max(heights) <= 90  # at 1.8
    assert_uniform(Counter((height - 41) // 5 for height in heights), range(10))


@pytest.mark.parametrize("name", FILTERS)
def test_random_resized_crops_are_those_of_torchvision(name):
    image = noise(50, 40)
    make = views(32, augmentation="random_resized_crop", interpolation=name)
    crop = v2.RandomResizedCrop(32, (0.08, 1.0), (3 / 4, 4 / 3), v2.InterpolationMode(name))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = np.asarray(crop(image))
        torch.manual_seed(seed)
        picture = make.to_picture(random_view(make, image))
        assert any(np.array_equal(picture, side) for side in (expected, expected[:, ::-1]))


@pytest.mark.parametrize("keep_aspect", [True, False])
@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_a_batch_on_a_device_has_the_views_of_pillow(augmentation, interpolation, keep_aspect):
    """Of images of several sizes, smaller and larger than the view, smooth as photographs are."""
    settings = {"augmentation": augmentation, "interpolation": interpolation}
    make = views(24, resize=30, keep_aspect=keep_aspect, **settings)
    sizes = [(30, 24), (24, 30), (19, 70), (90, 41), (24, 24), (61, 64)]
    images = [
        noise(w // 6 + 2, h // 6 + 2).resize((w, h), Image.Resampling.BICUBIC) for w, h in sizes
    ]
    torch.manual_seed(0)
    cuts = [make.draw(size) for size in sizes for _ in range(4)]
    repeated = [image for image in images for _ in range(4)]
    expected = torch.stack([make.cut(*pair) for pair in zip(repeated, cuts, strict=True)])
    batch = make.cut_batch([torch.from_numpy(np.array(image)) for image in repeated], cuts)
    levels = (batch - expected).abs() * torch.tensor(STD).view(3, 1, 1) * 255
    assert levels.max() < 4
    assert levels.mean() < 0.1
    assert any(cut.mirrored for cut in cuts) == (augmentation != "none")
