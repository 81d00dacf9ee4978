"""The tree in Stanford_Online_Products.zip."""

from pathlib import Path

from tests.support.fake_trees import spread, write_pictures

SIZES = spread(34, range(1, 13)) | spread(21, range(11_319, 11_326))


def write(root: Path) -> Path:
    """Write Stanford_Online_Products into a folder; returns the folder Stanford_Online_Products."""
    folder = root / "Stanford_Online_Products"
    header = "image_id class_id super_class_id path"
    lists = {"train": [header], "test": [header]}
    paths = []
    for label, count in SIZES.items():
        for number in range(count):
            path = f"lamp_final/{111_085_000_000 + label}_{number}.JPG"
            paths.append(path)
            part = "train" if label <= 11_318 else "test"
            lists[part].append(f"{len(paths)} {label} 8 {path}")
    write_pictures(folder, paths)
    for part, lines in lists.items():
        (folder / f"Ebay_{part}.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder
