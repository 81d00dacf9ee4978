"""Trees that look like In-Shop Clothes Retrieval, as the owners' drive has it and flat."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_trees import write_pictures


@dataclass(frozen=True)
class Photo:
    """One image: of which item, its number within the item, and "train", "query" or "gallery"."""

    item: int
    number: int
    status: str

    @property
    def item_id(self) -> str:
        return f"id_{self.item:08d}"

    @property
    def path(self) -> str:
        """Below `img` or `img_highres`."""
        return f"WOMEN/Dresses/{self.item_id}/{self.number:02d}_1_front.jpg"


def few_photos(train_items: int = 4, test_items: int = 3) -> list[Photo]:
    """Three images of each item that trains; of each other one, two are queries and one is in the gallery."""
    statuses = [["train"] * 3] * train_items + [["query", "gallery", "query"]] * test_items
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
