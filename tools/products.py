"""Draws pictures of products, to try a search on and to show it by: anyone may publish them.

    python tools/products.py FOLDER [--classes 60] [--images 8] [--seed 0]

Writes FOLDER/KIND-NUMBER/NUMBER.jpg. A class is one product: a bottle, lamp, mug, stool, teapot or vase with its
own shape, colours and pattern. Its images differ in how it is turned, in size, place, light and background.

Products are surfaces of revolution and tubes: grids of points (H, W, 3), x to the right, y to the viewer and z up,
which are turned, lit, and painted from the farthest point to the nearest one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.polynomial import Polynomial
from PIL import Image, ImageFilter

Floats = npt.NDArray[np.float64]
Part = tuple[Floats, Floats]
"""Points (H, W, 3) and their colours (H, W, 3), 0 to 1."""
Line = Sequence[float]
Paint = Callable[[Floats, Floats], Floats]

SIDE = 192  # pixels
DETAIL = 2  # painted on so many times as many pixels
DENSE = 160  # points along a unit of length, more than the pixels of the nearest product
KINDS = ("bottle", "lamp", "mug", "stool", "teapot", "vase")
PALETTE = np.array(
    [
        *((38, 70, 131), (191, 54, 42), (228, 178, 60), (46, 125, 91), (240, 236, 226)),
        *((52, 52, 58), (214, 122, 92), (120, 170, 190), (122, 84, 60), (150, 90, 140)),
    ]
)


def turned(radii: Line, heights: Line, paint: Paint, smooth: float = 0.08) -> Part:
    """A surface of revolution through (radius, height), its corners rounded."""
    far = np.concatenate([[0], np.hypot(np.diff(radii), np.diff(heights)).cumsum()])
    along, half = np.linspace(0, far[-1], int(far[-1] * DENSE)), int(smooth * DENSE) + 1
    weights = np.hanning(2 * half + 1) / half
    padded = (np.pad(np.interp(along, far, axis), half, "edge") for axis in (radii, heights))
    r, z = (np.convolve(axis, weights, "valid")[:, None] for axis in padded)
    around = np.linspace(0, 2 * np.pi, int(2 * np.pi * r.max() * DENSE))
    points = np.dstack([r * np.cos(around), r * np.sin(around), np.repeat(z, len(around), 1)])
    return points, paint(z / max(z.max(), 0.1), around)


def tube(x: Line, z: Line, colour: Floats, radii: Line = (0.08, 0.08)) -> Part:
    """A tube along the polynomial through (x, z)."""
    along, around = np.linspace(0, 1, 3 * DENSE)[:, None], np.linspace(0, 2 * np.pi, DENSE)
    curves = [Polynomial.fit(np.linspace(0, 1, len(x)), axis, len(x) - 1) for axis in (x, z)]
    centre, slope = ([f(along) for f in fs] for fs in (curves, [f.deriv() for f in curves]))
    radius = np.linspace(*radii, len(along))[:, None]
    out = radius * np.cos(around) / np.hypot(*slope)
    points = (centre[0] - slope[1] * out, radius * np.sin(around), centre[1] + slope[0] * out)
    return np.dstack(points), np.broadcast_to(colour, (*out.shape, 3))


def painter(draw: np.random.Generator, colours: Floats) -> Paint:
    """A pattern of two colours, by height, 0 to 1, and angle."""
    pattern, count, high = draw.integers(7), draw.integers(4, 9), draw.uniform(0.3, 0.8)

    def paint(height: Floats, angle: Floats) -> Floats:
        up, turns = np.broadcast_arrays(height * count, angle / (2 * np.pi))
        second = [
            up > high * count,
            up % 1 < 0.4,
            (turns * 2 * count) % 1 < 0.4,
            np.hypot(up % 1 - 0.5, (turns * 1.5 * (count + count % 2)) % 1 - 0.5) < 0.28,
            (np.floor(up) + np.floor(turns * 2 * count)) % 2 == 0,
            (up / 2 + np.abs((turns * 10) % 1 - 0.5)) % 1 < 0.35,
            np.abs(height - high + 0.15 - 0.04 * np.sin(8 * angle)) < 0.15,
        ][pattern]
        return np.where(second[..., None], colours[1], colours[0])

    return paint


def product(kind: str, draw: np.random.Generator) -> list[Part]:
    """The parts of a product on the ground, z = 0, about 2 high."""
    colours = PALETTE[draw.permutation(len(PALETTE))[:3]] / 255
    paint, accent = painter(draw, colours), colours[2]
    a, b, c, d = draw.uniform(0, 1, 4)

    def plain(height: Floats, angle: Floats) -> Floats:
        return np.broadcast_to(accent, (*np.broadcast_shapes(height.shape, angle.shape), 3))

    if kind == "vase":
        belly, waist, neck = 0.4 + 0.4 * b, 0.25 + 0.4 * c, 0.14 + 0.2 * d
        radii = (0, 0.25 + 0.2 * a, belly, waist, neck, neck + 0.2 * a)
        return [turned(radii, (0, 0, 0.6, 1.2, 1.6, 2), paint, smooth=0.3)]
    if kind == "mug":
        wide, top, foot = 0.5 + 0.2 * a, 1 + 0.5 * b, 0.35 + 0.15 * c
        far, middle = wide + 0.35 + 0.15 * d, (wide + foot) / 2
        ear = (middle, far, far, 0.9 * wide + 0.1 * foot)
        rises = [share * top for share in (0.25, 0.3, 0.85, 0.85)]
        body = turned((0, foot, middle, wide), (0, 0, 0.2 * top, top), paint)
        return [body, tube(ear, rises, accent)]
    if kind == "bottle":
        wide, neck, high = 0.35 + 0.25 * a, 0.1 + 0.08 * b, 0.9 + 0.4 * c
        heights = (0, 0, high, high + 0.1 + 0.4 * d, 1.9)
        cap = turned((0, neck + 0.04, neck + 0.04, 0), (1.8, 1.8, 2.05, 2.05), plain, smooth=0.02)
        return [turned((0, wide, wide, neck, neck), heights, paint), cap]
    if kind == "lamp":
        foot, low, high, start = 0.3 + 0.2 * a, 0.5 + 0.3 * b, 0.2 + 0.3 * c, 1 + 0.3 * d
        heights = (0, 0, 0.08, 0.12, start + 0.2)
        stand = turned((0, foot, foot, 0.05, 0.05), heights, plain, smooth=0.03)
        return [stand, turned((low, high), (start, 2.05), paint)]
    if kind == "teapot":
        wide, top = 0.6 + 0.2 * a, 0.9 + 0.4 * b
        radii = [share * wide for share in (0, 0.65, 1, 0.3 + 0.4 * c, 0)]
        body = turned(radii, (0, 0, top / 2, top, top), paint, smooth=0.2)
        knob = turned((0.2, 0.06, 0.13, 0), (top - 0.1, top, top + 0.12, top + 0.2), plain)
        spout = (0.7 * wide, wide + 0.25, wide + 0.3 + 0.2 * d)
        ear = (-0.8 * wide, -wide - 0.4, -wide - 0.4, -0.6 * wide)
        return [
            *(body, knob, tube(spout, (0.3 * top, 0.5 * top, top), accent, (0.16, 0.08))),
            tube(ear, (0.2 * top, 0.3 * top, top, 0.85 * top), accent),
        ]
    high, wide, spread, thick = 0.9 + 0.7 * a, 0.5 + 0.25 * b, 0.1 + 0.25 * c, 0.1 + 0.2 * d
    heights = (high, high, high + thick, high + thick)
    leg, colour = tube((wide - 0.12, wide - 0.12 + spread), (high, 0), accent, (0.07, 0.05))
    legs = [(turn(leg, 2, angle), colour) for angle in np.pi * np.array([0.25, 0.75, 1.25, 1.75])]
    return [turned((0, wide, wide, 0), heights, paint, smooth=0.03), *legs]


def turn(points: Floats, axis: int, angle: float) -> Floats:
    first, second = ((1, 2), (2, 0), (0, 1))[axis]
    new = points.copy()
    new[..., first] = np.cos(angle) * points[..., first] - np.sin(angle) * points[..., second]
    new[..., second] = np.sin(angle) * points[..., first] + np.cos(angle) * points[..., second]
    return new


def photograph(parts: list[Part], draw: np.random.Generator) -> Image.Image:
    """A picture of a product, as it happens to stand."""
    yaw, tilt, lean = draw.uniform(-0.9, 0.9), draw.uniform(0.15, 0.5), draw.normal(0, 0.04)
    light = np.array([draw.uniform(-0.8, 0.8), 0.9, draw.uniform(0.5, 1)])
    light /= np.linalg.norm(light)
    size, middle, ground = draw.uniform((0.28, 0.42, 0.8), (0.38, 0.58, 0.88))
    side = SIDE * DETAIL

    def seen(points: Floats) -> tuple[Floats, ...]:
        """Rows, columns and nearness."""
        x, near, z = np.moveaxis(turn(points, 0, -tilt), -1, 0)
        pixels = (side * (ground - size * z), side * (middle + size * x))
        return (*(axis.astype(int).clip(0, side - 1).ravel() for axis in pixels), near.ravel())

    shadow, columns = np.zeros((side, side), np.uint8), []
    for points, colours in parts:
        points = turn(turn(points, 2, yaw), 1, lean)
        normals = np.cross(np.gradient(points, axis=1), np.gradient(points, axis=0))
        normals /= np.linalg.norm(normals, axis=-1, keepdims=True) + 1e-9
        inside = turn(normals, 0, -tilt)[..., 1:2] < 0
        normals = np.where(inside, -normals, normals)
        halfway = (light + [0, 1, 0]) / np.linalg.norm(light + [0, 1, 0])
        lit = (0.45 + 0.65 * (normals @ light).clip(0)[..., None]) * np.where(inside, 0.6, 1)
        gloss = 0.5 * (normals @ halfway).clip(0)[..., None] ** 40
        columns.append((*seen(points), (colours * lit + gloss).reshape(-1, 3)))
        row, column, _ = seen((points - 0.4 * points[..., 2:] * light / light[2]) * [1, 1, 0])
        shadow[row, column] = 255
    soft = np.asarray(Image.fromarray(shadow).filter(ImageFilter.GaussianBlur(side / 50)))
    tint = draw.uniform(0.6, 0.9) + draw.normal(0, 0.03, 3)
    depth = np.abs(np.linspace(0, 1, side) - ground + 0.1)[:, None, None]
    scene = tint * (1.05 - 0.25 * depth) * (1 - soft[..., None] / 560)
    rows, across, near, colour = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(near)  # the nearest point is painted last
    scene[rows[order], across[order]] = colour[order]
    scene = scene * draw.uniform(0.8, 1.1) + draw.normal(0, 0.01, scene.shape)
    picture = Image.fromarray((255 * scene.clip(0, 1)).astype(np.uint8))
    return picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw pictures of products.")
    parser.add_argument("folder", type=Path)
    for option, default in (("classes", 60), ("images", 8), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already; name a new folder")
    for number in range(options.classes):
        kind = KINDS[number % len(KINDS)]
        parts = product(kind, np.random.default_rng([options.seed, number]))
        folder = options.folder / f"{kind}-{number // len(KINDS) + 1:02}"
        folder.mkdir(parents=True)
        for image in range(options.images):
            draw = np.random.default_rng([options.seed, number, image])
            photograph(parts, draw).save(folder / f"{image + 1:02}.jpg", quality=90)
    return 0


if __name__ == "__main__":
    sys.exit(main())
