"""A study's file is read strictly, and compares only rows that had an equal choice."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_reading import read_study

RATE = "optimization.learning_rate"
DRAW = "--data.test_classes=draw.txt"
CONTENT: dict[str, Any] = {
    **{"question": "Does it help?", "recipes": "glyphs/finetune"},
    "rows": {"binomial": {"choose": {RATE: [0.1, 0.2]}}, "binomial_horde": {"takes": ["binomial"]}},
    "comparisons": {
        "1": {"claim": "HORDE helps", "better": "binomial_horde:descriptor", "than": "binomial"}
    },
}


def rows(binomial: dict[str, Any], **horde: Any) -> dict[str, Any]:
    return {"rows": {"binomial": binomial, "binomial_horde": horde}}


def compared(better: str, **others: Any) -> dict[str, Any]:
    return {"comparisons": {"1": {"claim": "c", "better": better, "than": "binomial", **others}}}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(CONTENT | changes))
    return str(path)


def test_studies_of_the_runner_are_read():
    """Those without published results: others are read by tests/end_to_end/test_published_results.py."""
    names = ("demo", "glyphs", "photographs/own", "photographs/jrs_birds")
    studies = {name: read_study(name) for name in names}
    of = {comparison.name: comparison for comparison in studies["glyphs"].comparisons}
    assert of["3"].reported_gain() == pytest.approx(2.4)  # HORDE, Table 1
    assert (of["3"].reported_on(), of["15"].reported_gain()) == ("cub", None)


def test_what_is_wrong_is_one_line_that_names_the_file(tmp_path):
    for changes, message in (
        ({"comparisons": None}, "comparisons: expected a mapping of names"),
        ({"rows": {"a": {"take": ["b"]}}}, "rows: Option 'take' is not accepted"),
        (rows({"takes": ["binomial_horde"]}), "rows.binomial.takes: no row 'binomial_horde' above"),
        (rows({"choose": {RATE: [1, 1]}}), "expected different values"),
        (rows({"choose": {RATE: [1, 2]}}), "unequal numbers of settings, [0, 2]"),
        # Lists that may widen differently are no equal budget, either.
        (
            rows({"choose": {RATE: [1, 2, 3]}}, choose={"losses[0].weight": [1, 2]})
            | {"choice": {"first": 2}},
            "unequal numbers of settings, [2, 3]",
        ),
        (rows({"choose": {RATE: [1]}}) | {"choice": {"finalists": 1}}, "finalists needs a choose"),
        ({"choice": {"behind": 4}}, "choice.behind: leaves rows out"),
        (rows({"same_for_all_seeds": True}), "is for rows with --optimization.steps=0"),
        ({"seeds": {"more": 5}}, "seeds: more and wider_than belong together"),
        ({"rows": {"../up": {}}}, "rows: '../up' is a folder's name, too"),
        ({"rows": {"binomial": {"recipe": "glyphs/finetune"}}}, "no recipe 'glyphs/finetune'"),
        (rows({"choose": {"data.fold": [0, 1]}}), "says how a candidate is measured"),
        (
            rows({"choose": {RATE: [1, 2]}}, takes=["binomial"], choose={RATE: [1, 2]}),
            f"rows.binomial_horde: {RATE} is chosen by two of the rows",
        ),
        (compared("binomial"), "comparisons.1: compares 'binomial'"),
        (compared("binomial_horde", reported=["horde/table1/cub_abe"]), "expected two recipes"),
        (compared("a"), "comparisons.1: no row 'a'"),
        (compared("binomial_horde", beyond=["a"], family="x"), "two sides, in a family that is"),
        (compared("binomial_horde", beyond=["a", "b"]), "1.beyond: expected two sides, in a fami"),
        (compared("binomial_horde", beyond=["a", "b"], family="x"), "comparisons.1: no row 'a'"),
        (rows({"settings": [DRAW]}), "its rows have different --data.test_classes"),
        (rows({}, settings=[DRAW], takes=["binomial"]), "may have seen this row's test classes"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_study(write(tmp_path, **changes))
        [line] = str(caught.value).splitlines()
        assert line.startswith(f"{tmp_path}/mine.yaml: ")
        assert message in line


def test_a_row_that_is_taken_over_by_two_ways_counts_once(tmp_path):
    more = {"choose": {"losses[0].weight": [1, 2, 3]}, "takes": ["binomial"]}
    content = rows(CONTENT["rows"]["binomial"], **more)
    content["rows"]["binomial_vem"] = {"takes": ["binomial", "binomial_horde"]}
    study = read_study(write(tmp_path, **content, choice={"equal_budget": False}))
    assert [study.budget(row) for row in study.rows] == [2, 5, 5]
    assert study.needed(["binomial_vem"]) == ["binomial", "binomial_horde", "binomial_vem"]


def test_an_unknown_study_is_told_of_those_there_are():
    with pytest.raises(ConfigError, match=r"no 'other'; expected a file \.yaml, or one of demo,"):
        read_study("other")
