"""Studies: a question, and how it is answered, in one YAML file that is fixed before the first test.

question: ...                  one line, over the page
recipes: PAPER/TABLE           of the rows
settings: [...]                further arguments of all runs
rows:
  ROW:                         an entry of that table, or with `recipe: PAPER/TABLE/ROW` any other
    settings: [...]            further arguments of its runs, such as --data.test_classes=FILE; a row with
                               --optimization.steps=0 trains nothing, is tested first, and is what others must beat
    measures: [...]            further arguments of its tests, such as --evaluation.orders=true
    takes: [ROW, ...]          rows above it whose chosen settings it takes over, before its own are chosen
    choose: {SETTING: [...]}   values to choose from, in order; of several settings, all combinations
    same_for_all_seeds: true   of a row that trains nothing: one test stands for all seeds
comparisons:
  NAME: {claim: ..., better: ROW, than: ROW}     see `Comparison`
choice: {...}                  see `Choice`
seeds: {...}                   see `Seeds`
primary: METRIC                decides; default: recall_at_1
agrees: METRIC                 a gain or harm must have the same sign by it, too; default: none
margin: 1.0                    percentage points that are worth having, and that "as good as" allows
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any

from benchmarks.settings.recipe_files import read_entry
from benchmarks.settings.types import AtLeast2, NonNegativeInt, Points, PositiveInt

CONTROL = "controls"
"""The family of comparisons that test the study itself: their words are no findings."""


@dataclass(frozen=True)
class StudyRow:
    """A training of the study, under a name; the keys are those of the file."""

    recipe: str
    settings: list[str] = field(default_factory=list)
    measures: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)
    choose: dict[str, list[float]] = field(default_factory=dict)
    same_for_all_seeds: bool = False


@dataclass(frozen=True)
class Comparison:
    """Two rows, of which one is claimed to be better.

    Args:
        better: ROW, or ROW:OUTPUT of its test; ROW:curve is the last point of its curves.
        than: The same.
        beyond: Two more sides, whose difference is subtracted: an interaction, `(better - than) - (beyond[0] -
            beyond[1])`, such as what a method gains on one head beyond its gain on another; not in the main family.
        claim: What is claimed, as the start of a sentence.
        method: Groups the comparisons of a figure; those of one method and family are pooled.
        family: Holm's correction counts the comparisons of one family.
        metric: Default: the study's primary one.
        as_good: Claim that `better` is at most the margin worse, not that it is better.
        paper: Where it says so.
        reported: The two recipes, PAPER/TABLE/ROW, whose published Recall@1 the paper compares: its gain, on its
            own data.
    """

    name: str
    claim: str
    better: str
    than: str
    method: str = ""
    family: str = "main"
    metric: str | None = None
    as_good: bool = False
    paper: str = ""
    reported: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)

    def sides(self) -> list[str]:
        """All sides: `better`, `than`, and those of `beyond`."""
        return [self.better, self.than, *self.beyond]

    def rows(self) -> list[str]:
        """The two compared rows."""
        return self.all_rows()[:2]

    def all_rows(self) -> list[str]:
        """The rows of all sides."""
        return [side.partition(":")[0] for side in self.sides()]

    def formula(self) -> str:
        """The difference, in the names of the sides."""
        better, than, *beyond = (f"`{side}`" for side in self.sides())
        formula = f"{better} - {than}"
        return f"({formula}) - ({beyond[0]} - {beyond[1]})" if beyond else formula

    def reported_gain(self) -> float | None:
        """The paper's gain, in percentage points of Recall@1 on its own data; None if it reports none."""
        if not self.reported:
            return None
        outputs = [next(iter(read_entry(name).cells.values())) for name in self.reported]
        better, than = (cells["recall_at_1"] for cells in outputs)
        return better - than

    def reported_on(self) -> str:
        """The dataset of the paper's gain, such as "cub"."""
        entries = map(read_entry, self.reported)
        return next((entry.settings["data"]["dataset"] for entry in entries), "")


@dataclass(frozen=True)
class Choice:
    """How settings are chosen, on validation classes.

    Args:
        metric: The largest mean over draws wins.
        draws: Trainings of each candidate, each with its own training and validation classes.
        first: So many values of each setting are tried first, from the middle of its list; then the next one while
            the best lies at the edge. Default: all.
        equal_budget: Refuse a comparison of rows that choose from different numbers of candidates.
        finalists: Test only so many main comparisons: those with the best row on validation classes, and of several
            with one base, those with the best method. They alone are corrected for, since no test class chose
            them. Default: all.
        behind: Leave a row out if one that it takes the settings of is more than so many percentage points behind
            the best row that takes none. Only with `finalists`. Default: try all.
    """

    metric: str = "mean_average_precision_at_r"
    draws: PositiveInt = 1
    first: PositiveInt | None = None
    equal_budget: bool = True
    finalists: PositiveInt | None = None
    behind: Points | None = None


@dataclass(frozen=True)
class Seeds:
    """The seeds of the test.

    Args:
        count: How many; a look at fewer would allow stopping at a pleasant result.
        first: The first of them.
        more: So many more, once, for the rows of a main comparison whose 95 % interval has a larger half-width than
            `wider_than` (percentage points) after the first ones.
        draw: The things that a seed draws, in words.
    """

    count: AtLeast2 = 10
    first: NonNegativeInt = 0
    more: NonNegativeInt = 0
    wider_than: Points | None = None
    draw: str = "the start, the batches and the views"

    def numbers(self, more: bool) -> range:
        """The first seeds, or also the further ones."""
        return range(self.first, self.first + self.count + self.more * more)


@dataclass(frozen=True)
class StudyFile:
    """The content of a study's file."""

    name: str
    question: str
    rows: dict[str, StudyRow]
    comparisons: list[Comparison]
    settings: list[str] = field(default_factory=list)
    choice: Choice = field(default_factory=Choice)
    seeds: Seeds = field(default_factory=Seeds)
    primary: str = "recall_at_1"
    agrees: str | None = None
    margin: Points = 1.0

    def metric(self, comparison: Comparison) -> str:
        """The metric of a comparison."""
        return comparison.metric or self.primary

    def tested_on(self, row: str) -> str | None:
        """The setting of a row that names test classes of its own; None for those of the whole study."""
        settings = self.rows[row].settings
        return next(
            (option for option in settings if option.startswith("--data.test_classes")), None
        )

    def untrained(self) -> list[str]:
        """The rows that train nothing."""
        return [row for row in self.rows if "--optimization.steps=0" in self.rows[row].settings]

    def has_blocks(self) -> bool:
        """True if some rows have other test classes than others."""
        return len(set(map(self.tested_on, self.rows))) > 1

    def needed(self, rows: list[str]) -> list[str]:
        """The rows and all rows whose settings they take, each once and after those it depends on."""
        taken = ((*self.needed(self.rows[row].takes), row) for row in rows)
        return list(dict.fromkeys(chain(*taken)))

    def budget(self, row: str, *, whole: bool = False) -> int:
        """Candidates for the settings of a row and of those that it takes over: all, or those tried first."""
        first = None if whole else self.choice.first
        grids = [self.rows[name].choose for name in self.needed([row])]
        return sum(
            math.prod(len(values[:first]) for values in grid.values()) for grid in grids if grid
        )

    def rule(self) -> str:
        """Everything that decides, as text.

        What is written for readers is left out, and so are defaults: a key that later code adds changes no plan.
        """
        return json.dumps(_decisive(self), sort_keys=True)

    def words(self) -> list[str]:
        """The question and the comparisons' claims: what the answer says yes or no to."""
        return [self.question, *(comparison.claim for comparison in self.comparisons)]


def _decisive(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _decisive(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_decisive(inner) for inner in value]
    if not is_dataclass(value):
        return value
    decisive, prose = {}, ("question", "name", "claim", "method", "paper", "draw")
    for key in fields(value):
        default = key.default_factory() if callable(key.default_factory) else key.default
        if key.name not in prose and (given := getattr(value, key.name)) != default:
            decisive[key.name] = _decisive(given)
    return decisive


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
