"""Cars-196: one dataset in four layouts, and their possible faults."""

import pickle
from collections import Counter
from pathlib import Path

import pytest
from numpy.lib.recfunctions import drop_fields
from scipy.io import loadmat

from benchmarks.datasets import cars
from benchmarks.datasets.listing import DatasetError, load
from tests.support.fake_trees import cars as fake

OFFICIAL = ("devkit", "horde")
INDEX = {"devkit": "devkit", "horde": "labels"}


def rewrite(path, change):
    """Save a .mat file again after `change` was made to its variables."""
    variables = {name: value for name, value in loadmat(path).items() if not name.startswith("__")}
    change(variables)
    fake.save(path, **variables)


def change_annotation(field, value, index=3):
    def change(variables):
        variables["annotations"][field][0, index] = value

    return change


def without_field(field):
    def change(variables):
        variables["annotations"] = drop_fields(variables["annotations"], field)

    return change


def change_line(path, number, line):
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines))


def test_the_fake_files_are_nested_as_the_real_ones(tmp_path):
    """Public readers of the devkit unwrap every number twice: annotations[0][i]["class"][0][0]."""
    annotations = loadmat(fake.write(tmp_path, "devkit") / "devkit/cars_train_annos.mat")[
        "annotations"
    ]
    assert annotations.dtype.names == (*fake.CORNERS, "class", "fname")
    assert annotations.shape == (1, 12)
    assert annotations[0][1]["class"][0][0] == 14
    assert annotations[0][1]["fname"][0] == "00002.jpg"


@pytest.mark.parametrize("layout", fake.LAYOUTS)
def test_every_layout_says_the_same(tmp_path, layout):
    images = fake.few_cars()
    listing = cars.read(fake.write(tmp_path, layout, images))
    expected = []
    for car in images:
        x1, y1, x2, y2 = car.corners  # no two images share them
        name = f"{car.class_id:03d} {fake.CLASS_NAMES[car.class_id - 1]}"
        expected.append(((x1 - 1, y1 - 1, x2, y2), name, "train" if car.class_id < 99 else "test"))
    found = zip(listing.boxes, listing.classes, listing.parts, strict=True)
    assert sorted(found) == sorted(expected)
    assert (listing.name, listing.layout, listing.root) == ("cars", layout, tmp_path)
    assert len(set(listing.paths)) == len(images)
    assert listing.fingerprint  # all files are there


@pytest.mark.parametrize("layout", fake.LAYOUTS)
def test_an_image_goes_with_its_own_row(tmp_path, layout):
    car = fake.Car("train", 1, 14, (39, 116, 569, 375))  # the first of the owners' file
    listing = cars.read(fake.write(tmp_path, layout, [car, fake.Car("test", 1, 174, (1, 1, 9, 9))]))
    row = listing.classes.index("014 Maker 183 Sedan 2012")
    assert listing.boxes[row] == (38, 115, 569, 375)
    assert (
        listing.paths[row]
        == {
            "devkit": "cars_train/00001.jpg",
            "combined": "car_ims/000001.jpg",
            "kaggle": "car_data/car_data/train/Maker 183 Sedan 2012/00001.jpg",
            "horde": "train/00001.jpg",
        }[layout]
    )


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A tree of the real size, without images."""
    root = tmp_path_factory.mktemp("cars")
    return fake.write(root, "kaggle", fake.all_cars(), pictures=False)


def test_names_of_classes_are_sorted_as_their_ids(full):
    listing = cars.read(full)
    names = sorted(set(listing.classes))
    assert [int(name[:3]) for name in names] == list(range(1, 197))
    assert [name[4:] for name in names] == fake.CLASS_NAMES != sorted(fake.CLASS_NAMES)


def test_at_full_size_the_counts_are_the_published_ones(full):
    listing = load(cars.INFO, full)
    assert listing.counts() == {"train": (8_054, 98), "test": (8_131, 98)}
    folders = Counter(path.split("/")[2] for path in listing.paths)
    assert folders == {"train": 8_144, "test": 8_041}  # the owners' numbers


@pytest.mark.parametrize("layout", fake.LAYOUTS)
def test_the_root_may_be_one_folder_above(tmp_path, layout):
    (tmp_path / "another dataset").mkdir()
    folder = fake.write(tmp_path / "stanford_cars", layout)
    assert cars.read(tmp_path) == cars.read(folder)


def test_of_several_layouts_the_owners_comes_first(tmp_path):
    for layout in reversed(fake.LAYOUTS):
        fake.write(tmp_path, layout)
    assert cars.read(tmp_path).layout == "devkit"
    # The devkit beside the combined images has no images of its own.
    (tmp_path / "cars_train").rename(tmp_path / "elsewhere")
    assert cars.read(tmp_path).layout == "combined"


def test_the_file_with_labels_may_lie_beside_the_devkit(tmp_path):
    folder = fake.write(tmp_path, "devkit")
    before = cars.read(folder)
    labelled = "cars_test_annos_withlabels.mat"
    (folder / "devkit" / labelled).rename(folder / labelled)
    assert cars.read(folder) == before


@pytest.mark.parametrize("layout", OFFICIAL)
@pytest.mark.parametrize("file", ["cars_meta.mat", "cars_test_annos_withlabels.mat"])
def test_a_missing_index_file_is_named(tmp_path, layout, file):
    folder = fake.write(tmp_path, layout)
    (folder / INDEX[layout] / "cars_test_annos.mat").unlink()
    (folder / INDEX[layout] / file).unlink()
    with pytest.raises(
        DatasetError, match=rf"{INDEX[layout]}/{file}: cannot be read .*No such file"
    ):
        cars.read(folder)


@pytest.mark.parametrize(
    ("layout", "file"),
    [
        ("devkit", "devkit/cars_train_annos.mat"),
        ("combined", "cars_annos.mat"),
        ("kaggle", "names.csv"),
        ("kaggle", "anno_train.csv"),
        ("kaggle", "anno_test.csv"),
    ],
)
def test_any_missing_index_file_is_named(tmp_path, layout, file):
    folder = fake.write(tmp_path, layout)
    (folder / file).unlink()
    with pytest.raises(DatasetError, match=rf"{file}: cannot be read .*No such file"):
        cars.read(folder)


def test_the_file_without_labels_under_the_name_of_the_other_is_refused(tmp_path):
    index = fake.write(tmp_path, "devkit") / "devkit"
    (index / "cars_test_annos.mat").rename(index / "cars_test_annos_withlabels.mat")
    with pytest.raises(
        DatasetError, match=r"withlabels\.mat: cannot be read .*no field of name class"
    ):
        cars.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_annotation("bbox_x2", "wide"), "ValueError: .*'wide'"),
        (change_annotation("bbox_x2", []), "cannot be read .TypeError"),
        (without_field("bbox_y1"), "no field of name bbox_y1"),
        (without_field("relative_im_path"), "no field of name relative_im_path"),
        (lambda variables: variables.pop("annotations"), "KeyError: 'annotations'"),
        (lambda variables: variables.pop("class_names"), "KeyError: 'class_names'"),
        (lambda variables: variables.update(annotations=[[1.0, 2.0]]), "cannot be read .IndexErr"),
    ],
)
def test_a_mat_file_with_wrong_content_is_named(tmp_path, change, message):
    folder = fake.write(tmp_path, "combined")
    rewrite(folder / "cars_annos.mat", change)
    with pytest.raises(DatasetError, match=rf"cars_annos\.mat: .*{message}.*; restore the file"):
        cars.read(folder)


def test_a_class_without_a_name_is_an_error(tmp_path):
    fake.write(tmp_path, "combined", [fake.Car("train", 1, 197, (1, 1, 9, 9))], pictures=False)
    with pytest.raises(DatasetError, match=r"cannot be read .IndexError: .*; restore the file"):
        cars.read(tmp_path)


@pytest.mark.parametrize("kept", [0, 50, 128, 0.5, 0.99])
def test_a_mat_file_cut_short_is_named(tmp_path, kept):
    path = fake.write(tmp_path, "combined") / "cars_annos.mat"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(DatasetError, match=r"cars_annos\.mat: cannot be read .*; restore"):
        cars.read(tmp_path)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content", ["pickle", "page", "hdf"])
def test_what_is_no_mat_file_is_refused_and_nothing_in_it_runs(tmp_path, content):
    path = fake.write(tmp_path, "combined") / "cars_annos.mat"
    path.write_bytes(
        {
            "pickle": pickle.dumps([Bomb(tmp_path / "ran")] * 20),
            "page": b"<html><title>404 Not Found</title></html>" * 10,
            "hdf": b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM" + bytes(400),
        }[content]
    )
    with pytest.raises(DatasetError, match=r"cars_annos\.mat: cannot be read .*; restore"):
        cars.read(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("00003.jpg,1,2,20,15", "TypeError"),
        ("00003.jpg,1,2,20,15,98,98", "TypeError"),
        ("00003.jpg,1,2,x,15,98", "ValueError: .*'x'"),
        ("", "TypeError"),
    ],
)
def test_a_wrong_line_is_an_error_of_its_file(tmp_path, line, message):
    folder = fake.write(tmp_path, "kaggle")
    change_line(folder / "anno_train.csv", 3, line)
    with pytest.raises(DatasetError, match=rf"anno_train\.csv: cannot be read .{message}"):
        cars.read(folder)


def test_a_folder_without_the_dataset_is_named(tmp_path):
    (tmp_path / "CUB_200_2011").mkdir()
    with pytest.raises(DatasetError, match=f"{tmp_path}: found no cars_train, car_ims, car_data"):
        cars.read(tmp_path)
    with pytest.raises(DatasetError, match=r"nowhere: cannot be read as a folder \(No such file"):
        cars.read(tmp_path / "nowhere")


def test_what_is_known_of_it():
    assert cars.INFO.name == "cars"
    assert not cars.INFO.archive
    assert [line.partition(":")[0] for line in cars.INFO.layouts] == [*fake.LAYOUTS]
    for file in ("car_devkit.tgz", "cars_test_annos_withlabels.mat", "car_ims.tgz", "jutrera"):
        assert file in cars.INFO.by_hand
