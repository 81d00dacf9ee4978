"""The report: hand-computed intervals, pairing by seed, curves, neighbours, no links, clear errors."""

import base64
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.console.printing import printable
from benchmarks.records.files import write_json
from benchmarks.records.results import Run, digests, load_run
from benchmarks.report import main
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.identification import judge
from benchmarks.reporting.neighbours import differing_neighbours, report_neighbours
from benchmarks.reporting.study_sections import confused
from benchmarks.settings.errors import ConfigError
from tests.benchmarks.made import DIVERGED
from tests.benchmarks.reporting.made_runs import (
    DATA,
    METRICS,
    add_curves,
    metrics,
    table,
    write_run,
)


@pytest.fixture
def make(tmp_path):
    return partial(write_run, tmp_path)


def compared(*folders: Path) -> str:
    return compare([load_run(folder) for folder in folders]).markdown()


def test_means_and_paired_differences_by_hand(make):
    recalls = {"base": {0: 0.40, 1: 0.50}, "horde": {3: 0.10, 1: 0.53, 0: 0.42}, "one": {0: 0.41}}
    recalls["better"] = {seed: recall + 0.1 for seed, recall in recalls["base"].items()}
    runs = [load_run(make(of, s, r)) for of, seeds in recalls.items() for s, r in seeds.items()]
    text = compare(runs).markdown()
    base, _, one, _ = table(text)
    # Student's t of one degree of freedom: 12.706205 times half the distance of two.
    assert (base["method"], base["Recall@1 (%)"], base["seeds"]) == ("base", "45.00 ± 63.53", "2")
    assert [one[f"{name} (%)"] for name in METRICS.values()] == [f"{n}.00" for n in range(41, 47)]
    horde, better = table(text, 1)  # of seeds that both have: +2 and +3 points
    assert (horde["method"], horde["Recall@1"], horde["pairs"]) == ("horde", "+2.50 ± 6.35", "2")
    assert better["Recall@1"] == "+10.00 ± 0.00"
    assert "+2.50 ± 6.35 points for horde (2 pairs of seeds: undecided)" in text
    assert "; +1.00 points for one (one seed: undecided); " in text
    assert "; +10.00 ± 0.00 points for better (2 pairs of seeds: higher)." in text
    assert "points for base (2 pairs of seeds: lower)" in compare(runs, "better").markdown()
    counts = {"test_queries": 12, "unanswered_queries": 4}
    one = compared(make("counted", 0, 0.4, data=DATA | counts))
    assert re.search(r"^## .* images, 12 queries, of which 4 have nothing to find", one)
    with pytest.raises(ValueError, match=r"no finished run has the label 'x'; .*\['base', "):
        compare(runs, "x")


def test_rows_and_columns_are_what_was_measured(make):
    odd = make("odd", 0, 0.4, metrics={"recall_at_1000": 0.9, "NMI": 0.5}, never_acted=True)
    text = compared(odd)
    assert list(table(text)[0]) == ["method", "Recall@1000 (%)", "NMI (%)", "seeds"]
    assert f"{odd}: the loss was 0 in every step" in text
    outputs = {"descriptor": metrics(0.6), "parts": {}, "order_2": metrics(0.3)}
    base = make("base", 0, 0.4)
    text = compared(base, make("horde", 0, 0.5, outputs=outputs))
    names = ["base", "horde", "horde †", "horde, order 2"]
    assert [row["method"] for row in table(text)] == names
    assert table(text)[2]["Recall@1 (%)"] == "60.00"
    assert "† the test-time descriptor" in text
    vem = make("vem", 0, 0.5, metrics={**metrics(0.5), "variance_correlation": 0.8})
    for runs in ([vem, base], [base, vem]):  # a metric of one method is no hindrance
        assert {row["method"] for row in table(compared(*runs))} == {"vem", "base"}


def test_the_start_of_the_baseline_is_a_row(make):
    """It is not compared as a method; what a training lost against it is told of each."""
    folders = [
        make(label, seed, recall, before_training=metrics(start))
        for label, recall in (("A", 0.4), ("B", 0.65))
        for seed, start in enumerate((0.6, 0.7))
    ]
    folders.append(make("C", 0, 0.4, before_training=metrics(0.1)))
    text = compared(*folders)
    rows = table(text)
    assert [row["method"] for row in rows] == ["A", "B", "C", "before training"]
    assert rows[-1]["Recall@1 (%)"].startswith("65.00 ± ") and rows[-1]["seeds"] == "2"
    assert "± is the half-width" in text and "A row of one seed has no interval" in text
    below = table(text, 1)
    assert [row["method"] for row in below] == ["B", "before training"]
    assert below[1]["Recall@1"].startswith("+25.00")
    assert "A: training lost 25.00 points against the untrained network (65.00 %)." in text
    assert text.count("training lost") == 1, "not of B, as good, and C, better"


def test_a_headline_says_what_training_lost_against_the_best_untrained_network(make):
    """The best one by MAP@R, which the start may not be; older records have no untrained outputs."""

    def only(recall: float, precision: float) -> dict[str, float]:
        return {"recall_at_1": recall, "mean_average_precision_at_r": precision}

    tested = {"untrained_features": only(0.9, 0.3), "untrained_whitened": only(0.77, 0.5)}
    tested |= {"untrained_pca": only(0.6, 0.4), "features_pca": metrics(0.7)}
    sizes = {"model": {"embedding_size": 128}, "evaluation": {"features": 64}}
    about = {"before_training": only(0.8, 0.4), "config": sizes}
    about["data"] = DATA | {"known_classes": 7}
    folder = make("A", 0, 0, **about, outputs=tested, metrics=only(0.65, 0.45))
    output = folder.parent / "new" / "folder" / "elsewhere.html"
    assert main([str(folder)]) == main([str(folder), f"--output={output}"]) == 0
    page = (folder / "report.html").read_text()
    assert page == output.read_text()
    assert "test classes, 7 of them trained on by other images" in page
    assert "No curves were recorded" in page and "None were saved, or" in page
    white = "untrained trunk, 128 components after within-class whitening"
    lost = "training lost 12.00 points against the untrained network"
    assert "<p><strong>Recall@1 compared with A: +5.00 points for A, 64 comp" in page
    assert f"; {lost} ({white}: 77.00 %).</strong></p>" in page
    names = ["A", "A, 64 components", "untrained trunk, pooled features", white]
    names += ["untrained trunk, 128 components", "before training"]
    assert [row["method"] for row in table(compared(folder))] == names
    as_is = make("E", 0, 0, **about, steps=0, outputs=tested, metrics=only(0.65, 0.45))
    assert "training lost" not in compared(as_is), "nothing was trained"
    by_map = make("B", 0, 0, **about, metrics=only(0.81, 0.3))
    assert "81.00 %; training lost 10.00 points of MAP@R against the" in compared(by_map)
    equal = make("C", 0, 0, before_training=only(0.8, 0.4), metrics=only(0.8, 0.4))
    assert "training lost" not in compared(equal)
    without_map = make("D", 0, 0.8, before_training={"recall_at_1": 0.9})
    assert "lost 10.00 points against" in compared(without_map)


VERIFICATION = {
    **{"area": 0.9, "area_half_width": 0.05, "other_pairs": 2000},
    "rates": [
        {
            **{"false_accepts": 0.01, "true_accepts": 0.4, "true_accepts_half_width": 0.1},
            **{"threshold": 0.625, "threshold_half_width": 0.03},
        },
        {
            **dict.fromkeys(("true_accepts", "threshold", "threshold_half_width")),
            **{"false_accepts": 0.0001, "needs": 100_000},
        },
    ],
}


def identification(queries: int, right: float) -> dict[str, Any]:
    """Of a test in which each query was compared with 90 images."""
    lacking = dict.fromkeys(("threshold", "true_positives", "false_positives_half_width"))
    rates = [
        {"threshold": 0.8, "true_positives": right, "true_positives_half_width": 0.05}
        | {"false_positives": rate, "misnamed": 0.02, "false_positives_half_width": rate / 2}
        | (lacking | {"needs": round(10 / rate)} if rate * queries < 10 else {})
        for rate in (0.1, 0.01, 0.001)
    ]
    about = {"gallery_images": 100, "gallery_classes": 10, "compared": 90, "own_images": 9}
    about |= {"unknown_queries": queries, "unknown_classes": 10, "rates": rates}
    about |= {"known_queries": queries - 20, "known_classes": 8}
    return about | {"unknown": {"missed": 0.1, "threshold": 0.7, "rejected": 0.6}}


def test_verification_and_identification_are_told_in_words(make):
    found = {"verification": VERIFICATION, "identification": identification(1000, 0.5)}
    one = make("A", 0, 0.4, **found)
    text = compared(one)
    assert "an area under the ROC of 90.00 ± 5.00 %" in text
    shown = [list(row.values()) for row in table(text, 1)]
    assert shown == [["1 %", "0.625 ± 0.030", "40.00 ± 10.00"], ["0.01 %", "–", "–"]]
    assert "the test has 2,000 pairs of two classes, and needs 100,000" in text
    sure = "with a confidence of 95 %)"
    assert f"Of 100 unknown images, 1 is called known (0 to 2 {sure}, and 60 unknown." in text
    assert f"Of 100 known ones, 50 are named rightly (45 to 55 {sure}, 2 wrongly, and" in text
    assert "the 980 known ones, of 8 classes, have about 9 images of their class to find" in text
    shown = [list(row.values()) for row in table(text, 2)]
    assert shown[1:] == [["1 % ± 0.50", "0.800", "50.00 ± 5.00"], ["0.1 %", "–", "–"]]

    found = {"verification": VERIFICATION | {"area": 0.8}, "identification": identification(99, 0)}
    other = make("A", 1, 0.4, **found)
    assert "The test has 99 images, and a threshold needs 100" in compared(other)
    text = compared(one, other, make("B", 0, 0.5))
    [*_, row] = table(text, 1)
    assert row["method"] == "A" and [*row.values()][2:] == ["40.00 ± 0.00", "–"]
    assert row["area under the ROC (%)"].startswith("85.00 ± ")
    assert [list(row.values()) for row in table(text, 2)] == [["A", "50.00", "50.00", "–"]]
    useless = make("C", 0, 0.4, identification=identification(200, 0.08))
    assert "where 10 of 100 unknown images are called known, 8 of" in compared(useless)


@pytest.mark.parametrize(
    ("images", "asked", "told"),
    [
        (90, None, (0.01, 0.5, 0.02, 0.6, 1)),
        (900, None, (0.1, 0.41, 0.11, 0, 10)),
        (180, 0.2, (0.2, 0.4, 0.12, 0.2, 2)),
        (180, 0.01, "rates that are of use here, 0.2, 0.02, got 0.01"),
        (9000, None, "because the folder is 100 times as large as the tested gallery of 90"),
    ],
)
def test_rates_in_a_larger_folder_are_limits(images, asked, told):
    found = identification(1000, 0.5)
    if isinstance(told, str):
        with pytest.raises(ValueError, match=re.escape(told)):
            judge(found, images, asked)
        return
    one = judge(found, images, asked)
    rates = (one.false_positives, one.true_positives, one.misnamed, one.rejected, one.times)
    assert rates == pytest.approx(told) and ("limits" in one.told()) == (images > 90)
    assert [*map(one.word, (0.9, 0.75, 0.6))] == ["known", "not sure", "unknown"]
    few = judge(found, images, asked, own_images=1).told()
    assert "has about 1 image of a class, so that fewer" in few and "fewer" not in one.told()


def test_a_run_that_diverged_is_counted_and_named(make):
    folders = [make("wild", 0, 0, **DIVERGED), make("base", 0, 0.4), make("base", 1, 0.4)]
    folders += [make("horde", 0, 0.5), make("horde", 1, 0, **DIVERGED)]
    text = compared(*folders)
    assert [(row["method"], row["seeds"], row["Recall@1 (%)"]) for row in table(text)] == [
        ("wild", "0 (diverged: seed 0)", "–"),
        ("base", "2", "40.00 ± 0.00"),
        ("horde", "1 (diverged: seed 1)", "50.00"),
    ]
    assert f"diverged: {folders[4]}, seed 1: the loss is nan" in text
    with pytest.raises(ValueError, match=r"diverged \(the loss is nan\), not finished"):
        compared(folders[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (DIVERGED | {"label": "base", "seed": 0}, "label 'base' already has seed 0 in .*base-0"),
        ({"status": "stopped"}, r"horde-0: the run is stopped, not finished.*--resume"),
        ({"data": DATA | {"fingerprint": "xyz"}}, "fingerprint is 'xyz', but 'abc' in .*base-0"),
        ({"metrics": {"recall_at_10": 0.5}}, r"measured \['recall_at_10'\], but .*base-0"),
        ({"label": "base", "seed": 1, "config": {"a": 1}}, "its a is not that of .*base-0"),
        ({"label": "base", "seed": 1, "weights": {"sha256": "1"}}, "its model.weights is not that"),
        ({"label": "before training"}, "the label 'before training' is also the name of another"),
    ],
)
def test_runs_that_cannot_be_compared(make, refused, changes, message):
    start = {"before_training": metrics(0.1), "outputs": {"order_2": metrics(0.3)}}
    folders = [make("base", 0, 0.4, **start), make("horde", 0, 0.5, **changes)]
    assert re.search(message, refused(main, *folders))
    assert not list(folders[0].parent.rglob("*.html"))


def test_html_holds_all_and_loads_nothing(make, capsys):
    folders = [make(*run) for run in (("base", 0, 0.4), ("base", 1, 0.4), ("ho<r>de", 0, 0.5))]
    for folder in folders:
        add_curves(folder)
    assert main([str(folder) for folder in folders]) == 0
    path = folders[0] / "comparison.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {path}"
    page = path.read_text(encoding="utf-8")
    assert not re.search("://|<script|<link", page)
    sources = re.findall('src="data:image/svg.xml;base64,(.*?)"', page)
    assert len(sources) == page.count("src=")
    svg = "".join(base64.b64decode(source).decode() for source in sources)
    assert not re.search("<r>|<b>not html</b>", page + svg), "labels and settings are escaped"
    row = r'scope="row"[^>]*>ho&lt;r&gt;de</th>\s*<td data-name="Recall@1 \(%\)"[^>]*>50.00<'
    assert re.search(row, page)
    titles = ["Recall@1 (%) on training classes", "Recall@1 (%) on new classes", "Training loss"]
    assert re.findall('aria-label="(.*?)"', svg) == titles
    assert svg.count(">ho&lt;r&gt;de</text>") == 3
    lights = svg.count("stroke-opacity: 0.3")
    assert lights == 6, "two seeds: a light line each for loss, seen and unseen"
    assert page.count("commit: 0123abc\ndirty: true") == 3 and "lr: 0.003" in page
    assert page.count("<details><summary>") == 3, "runs"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("neighbours.npz", b"no zip"),
        ("neighbours.npz", b""),
        ("records/training.csv", b"~iteration~,loss\n1,x\n"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(make, refused, name, content):
    folder = make("base", 0, 0.4)
    (folder / "records").mkdir()
    (folder / name).write_bytes(content)
    if not content:  # another one than the run has written
        write_json(folder / "run.json", load_run(folder).info | {"files": digests(folder)})
        np.savez(folder / name, queries=[])
    line = refused(main, folder)
    assert line.startswith(f"{folder / name}: ")
    assert "run that training again" in line or "delete it" in line
    assert not (folder / "report.html").exists()


class Images:
    """Two classes of three images each."""

    labels, class_names = torch.tensor([0, 0, 0, 1, 1, 1]), ["<a>", "b"]
    name = to_picture = staticmethod(lambda item: item)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return np.zeros((8, 8), np.uint8), 0


def saved(folder: Path, nearest: list[int], **more: Any) -> Run:
    """A run that saved the nearest neighbour of each image, and the last image."""
    folder.mkdir()
    near = np.stack([nearest, [5] * 6], axis=1)
    np.savez(folder / "neighbours.npz", queries=np.arange(6), neighbours=near, **more)
    return Run(folder, {})


ASKED = r'alt="query: (\d), class (.*?)"'


def test_neighbours_of_two_methods(tmp_path):
    """They answer the same evenly spread queries below each other; a third method saved none."""
    precision = np.array([0.5, 1, 0.2, np.nan, 0.9, 0.8])
    runs = {
        "base": [saved(tmp_path / "base", [1, 3, 1, 4, 0, 0])],
        "<new>": [saved(tmp_path / "new", [1, 0, 3, 4, 5, 0], precision=precision)],
        "none": [Run(tmp_path / "none", {})],
    }
    near = report_neighbours(runs, Images())
    by = ", by average precision, one of a class"
    spread, best, worst = near.values()
    assert [*near][1:] == [f"Best queries of <new>{by}", f"Worst queries of <new>{by}"]
    for page, rows in ((spread, "012345"), (best, "1450"), (worst, "2504")):
        names = ["&lt;a&gt;", "b"]
        assert re.findall(ASKED, page) == [(row, names[int(row) // 3]) for row in rows]
    look = r'title="(base|&lt;new&gt;)"|class="(right|wrong)"'
    queries = [re.findall(look, part) for part in spread.split('class="asked"')[1:]]
    assert [[method or frame for method, frame in part] for part in queries[1:3]] == [
        ["base", "wrong", "wrong", "&lt;new&gt;", "right", "wrong"],
        ["base", "right", "wrong", "&lt;new&gt;", "wrong", "wrong"],
    ]
    assert report_neighbours(runs) == {}, "the images are not there"


def test_queries_for_which_one_of_two_networks_is_right(tmp_path):
    """Of six images of two classes; the first neighbour decides."""
    found = {"<new>": [1, 2, 1, 4, 0, 0], "old": [1, 3, 3, 4, 5, 0]}
    runs = {label: saved(tmp_path / label, nearest) for label, nearest in found.items()}
    page = differing_neighbours(runs, Images())
    assert [int(n) for n in re.findall(r"\d+", page.partition("</p>")[0])] == [6, 2, 2, 1, 1]
    right, wrong = page.split("<h4>")[1:]
    assert right.startswith("Right with &lt;new&gt;, wrong with old</h4>")
    asked = [re.findall(ASKED, part) for part in (right, wrong)]
    assert asked == [[("1", "&lt;a&gt;"), ("2", "&lt;a&gt;")], [("4", "b")]]
    same = differing_neighbours({"one": runs["old"], "two": runs["old"]}, Images())
    assert "0 with one alone, 0 with two alone" in same and same.count("<p") == 1
    [section] = confused(runs["old"], Images(), "old")
    assert "3 of 6 queries" in section.text
    assert section.table.rows == [["&lt;a>", "b", "3 of 6", "2", "1"]]
    assert [row for row, _ in re.findall(ASKED, section.pictures)] == ["1", "2"]


HOSTILE = "a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"
SHOWN = r"a\x1b[2Jb\nc\r\x07\x00\x85\u202ed\u2028e\ud800\uffff"


def test_names_reach_a_message_without_control_characters():
    assert printable("Bücher, 本, 👩‍🔬, α±1 %") == "Bücher, 本, 👩‍🔬, α±1 %"
    error = ConfigError(f"{HOSTILE}: is missing")
    assert str(error) == f"{SHOWN}: is missing"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
