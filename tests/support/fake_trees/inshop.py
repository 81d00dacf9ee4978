"""Trees that look like In-Shop Clothes Retrieval, as the owners' drive has it and flat."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_trees import spread, write_pictures

SIZES = ("img", "img_highres")
CATEGORIES = ("WOMEN/Dresses", "MEN/Denim", "WOMEN/Blouses_Shirts")


@dataclass(frozen=True)
class Photo:
    """One image.

    Args:
        item: Number of the item it shows.
        number: Within the item, from 1.
        status: "train", "query" or "gallery".
    """

    item: int
    number: int
    status: str

    @property
    def item_id(self) -> str:
        return f"id_{self.item:08d}"

    @property
    def category(self) -> str:
        return CATEGORIES[self.item % len(CATEGORIES)]

    @property
    def path(self) -> str:
        """Below `img` or `img_highres`."""
        return f"{self.category}/{self.item_id}/{self.number:02d}_1_front.jpg"


def few_photos(train_items: int = 4, test_items: int = 3) -> list[Photo]:
    """Three images of each item that trains; of each other one, two are queries and one is in the gallery."""
    statuses = [["train"] * 3] * train_items + [["query", "gallery", "query"]] * test_items
    return _photos(statuses)


def all_photos() -> list[Photo]:
    """The published numbers of photos: 25,882 of 3,997 items, and 14,218 queries and 12,612 others of 3,985."""
    training, testing = range(3_997), range(3_985)
    queries, gallery = spread(14_218, testing), spread(12_612, testing)
    statuses = [["train"] * size for size in spread(25_882, training).values()]
    statuses += [["query"] * queries[i] + ["gallery"] * gallery[i] for i in testing]
    return _photos(statuses)


def _photos(statuses: Sequence[Sequence[str]]) -> list[Photo]:
    return [
        Photo(item, number, status)
        for item, of_item in enumerate(statuses, start=1)
        for number, status in enumerate(of_item, start=1)
    ]


def write(
    root: Path,
    photos: Sequence[Photo] | None = None,
    *,
    images: Sequence[str] = ("img",),
    flat: bool = False,
    pictures: bool = True,
) -> Path:
    """Write a tree, by default of `few_photos`; returns its folder, root.

    Args:
        images: "img", "img_highres" or both.
        flat: The list lies beside the folder of images, not in Eval and Img.
    """
    photos = few_photos() if photos is None else photos
    partition = [f"img/{p.path:<70} {p.item_id} {p.status:<10}" for p in photos]
    path = root / ("" if flat else "Eval") / "list_eval_partition.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [len(partition), "image_name item_id evaluation_status", *partition]
    path.write_text("".join(f"{line}\n" for line in lines))
    for folder in images:
        place = root / ("" if flat else "Img") / folder
        place.mkdir(parents=True)
        if pictures:
            write_pictures(place, [photo.path for photo in photos])
    return root
