"""Numbers and keys in YAML mean the same to every reader, or are refused."""

import argparse
import re
from math import inf

import pytest

from benchmarks.console.arguments import at_least
from benchmarks.settings.yaml_files import dump, load_yaml

OTHER_NUMBERS = ("010", "-010", "0o17", "0x1F", "0b11", "1_000", "1:30", "1:30.5", "01e3", "007.5")
NUMBERS = (0, 7, -3, 10**20, 0.5, -0.25, 1e-05, 1.5e300, inf)


def test_what_is_written_reads_back():
    shared = ["*", "[x", "{a: 1}", "1e5", "a*b", "2024-01-01", *OTHER_NUMBERS, *map(str, NUMBERS)]
    settings = {"a": shared, "b": {"c": shared, "d": 1e-5, "e": None, "f": [*NUMBERS]}}
    assert load_yaml(dump(settings)) == settings
    assert load_yaml("[.5, +3, 1., 1E3, -.inf]") == [0.5, 3, 1, 1000, -inf]
    assert load_yaml("[2024-01-01, 1:x, 0x, v010]") == ["2024-01-01", "1:x", "0x", "v010"]


@pytest.mark.parametrize("number", OTHER_NUMBERS)
def test_a_number_that_readers_of_yaml_disagree_on_is_refused(number):
    tagged = (f"!!int '{number}'", f"!!float {number}")
    for text in (number, f"a: [{{b: {number}}}]", f"{{{number}: 1}}", *tagged):
        with pytest.raises(ValueError, match=f"decimal digits, got {re.escape(number)}"):
            load_yaml(text)
    with pytest.raises(argparse.ArgumentTypeError):
        at_least(0)(number)


def test_what_would_make_another_value_is_refused():
    for text, message in (
        ("a: &a {b: 1}\nc:\n  <<: *a\n  d: 2", "<<"),
        ("a: !!set {b}", "the tag 'tag:yaml.org,2002:set'"),
        ("a: !!timestamp 2024-01-01", "the tag 'tag:yaml.org,2002:timestamp'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_yaml(text)


@pytest.mark.parametrize("key", ["no", "1.5"])
def test_a_key_is_text(key):
    with pytest.raises(ValueError, match="expected text; quote it"):
        load_yaml(f"{key}: 1")
    assert load_yaml(f"'{key}': 1") == {key: 1}
    with pytest.raises(ValueError, match="appears twice"):
        load_yaml("1: a\n'1': b")
