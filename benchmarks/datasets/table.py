"""A table of one's own: a CSV or Parquet file with a row for each image; docs/datasets.md has the columns."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.datasets.folder import held_out
from benchmarks.datasets.listing import Box, DatasetError, Listing
from benchmarks.datasets.table_rows import Row, read_rows


def read(
    file: Path,
    root: Path,
    test_classes: Path | float | None = None,
    *,
    known_classes: bool = False,
    camera: str | None = None,
    sequence: str | None = None,
    default: float | None = 0.5,
) -> Listing:
    """List the images of a table, in its order.

    A test image is a query, or in the gallery, or both, as all are without these columns. If only one of them is
    there, the other one is its opposite.

    Args:
        root: The folder that relative paths start from; all images lie in it.
        test_classes: Only without a column `split`: as of a folder.
        known_classes: Allow that classes to test on are trained on, too.
        camera, sequence: The column of the images' groups, by one of the two: images of a query's class and camera
            leave its ranking, or all of its sequence. An empty cell is no group.
        default: The fraction if neither the table nor `test_classes` says it; None: all.

    Raises:
        DatasetError: naming the file, and the line and column, of what cannot be used.
        ValueError: if test_classes or known_classes does not suit the table; for a camera and a sequence.
    """
    if camera is not None and sequence is not None:
        raise ValueError("sequence: data.camera names the groups already; leave one of them out")
    group = camera if sequence is None else sequence
    rows = read_rows(file, group)
    if not rows:
        raise DatasetError(f"{file}: has no rows; expected one for each image")
    paths, classes = [row.path(root) for row in rows], [row.label() for row in rows]
    _check_separators(file, root, rows, paths)
    boxes = [row.box() for row in rows]
    _check_repeated(rows, paths, boxes)
    if "split" in rows[0].names:
        if test_classes is not None:
            raise ValueError(
                f"test_classes: {file} has a column split, which decides; leave it out"
            )
        tested = [row.tests() for row in rows]
        _check_splits(rows)
        if not known_classes:
            _check_unknown(rows, classes, tested)
    else:
        if known_classes:
            raise ValueError(
                f"known_classes: needs a column split, and {file} has none; add it, or leave this out"
            )
        names, chosen = sorted({*classes}), default if test_classes is None else test_classes
        held = {*names} if chosen is None else held_out(chosen, names)
        tested = [name in held for name in classes]
    parts = [row.part() if test else "train" for row, test in zip(rows, tested, strict=True)]
    _check_sides(rows, parts)
    return Listing(
        *("table", root, "table", paths, classes, parts),
        upright=True,
        boxes=boxes if any(boxes) else None,
        places=[row.place for row in rows],
        groups=[row.group(i) for i, row in enumerate(rows)] if group is not None else None,
        whole_groups=sequence is not None,
    )


def _check_repeated(rows: Sequence[Row], paths: Sequence[str], boxes: Sequence[Box | None]) -> None:
    """Refuse an image, or a part of it, that is listed twice."""
    seen: dict[tuple[str, Box | None], Row] = {}
    for row, path, box in zip(rows, paths, boxes, strict=True):
        if (first := seen.setdefault((path, box), row)) is not row:
            remedy = "; an image that is query and gallery has one row, with true in both columns"
            raise DatasetError(
                f"{row.place}: lists {path} as {first.line} does; remove one of them"
                f"{remedy if {'query', 'gallery'} & {*row.names} else ''}"
            )


def _check_separators(file: Path, root: Path, rows: Sequence[Row], paths: Sequence[str]) -> None:
    """Refuse paths that Windows wrote."""
    pairs = zip(rows, paths, strict=True)
    if missing := [row for row, path in pairs if "\\" in path and not (root / path).exists()]:
        raise DatasetError(
            f"{file}: {len(missing):,} of {len(rows):,} paths have backslashes, as Windows writes them, such as "
            f"{missing[0].cells['path']} ({missing[0].line}); write / in their place"
        )


def _check_sides(rows: Sequence[Row], parts: Sequence[str]) -> None:
    """Refuse queries without a gallery, and a gallery without queries."""
    sides = {*parts} - {"train"}
    if sides in ({"query"}, {"gallery"}):
        [side] = sides
        raise DatasetError(
            f"{rows[parts.index(side)].place}: is only {side}, as all test rows are; expected queries and a gallery"
        )


def _check_splits(rows: Sequence[Row]) -> None:
    """Refuse a third part, for which there is no use."""
    third = [row for row in rows if row.cells["split"] in ("validation", "val")]
    if third and any(row.cells["split"] == "test" for row in rows):
        raise third[0].wrong(
            "split",
            "train or test, as other rows are called test (settings are chosen on folds of the training classes: "
            "call the row train, or leave it out)",
        )


def _check_unknown(rows: Sequence[Row], classes: Sequence[str], tested: Sequence[bool]) -> None:
    """Refuse test classes that train."""
    trained = {name for name, test in zip(classes, tested, strict=True) if not test}
    known = [i for i, name in enumerate(classes) if tested[i] and name in trained]
    if known:
        count = len({classes[i] for i in known})
        raise DatasetError(
            f"{rows[known[0]].place}, column split: {count:,} of the classes to test on are trained on, too, such "
            f"as {classes[known[0]]!r}; give each class one split, or, to test photographs of known classes, set "
            "data.known_classes to true"
        )
