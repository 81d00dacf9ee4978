"""Recipes: one YAML file per table of a paper, one entry per training.

title: ...                                  one line over the printed table
shared: {...}                               settings of all trainings
trainings:
  ROW:
    label: ...                              the paper's name of the row, and the settings that differ
    cells: {OUTPUT: {METRIC: number}}       what the paper reports of each test-time output, in percent
    half_widths: {OUTPUT: {METRIC: number}} of the paper's own 95 % intervals, in percent points
  OTHER_ROW: {same_as: PAPER/TABLE/ROW, cells: ...}      another row of a training that is not run twice
quoted: [{row: ..., dataset: ..., METRIC: number}, ...]  what the paper copied from elsewhere
figure:                                     how `benchmarks.tables --figure` draws the runs of these rows
  KEY: ...                                  of a panel, for all panels
  panels: {TITLE: {KEY: ...}}               keys and values as of `Panel`

Beside the folder of a paper's tables lies PAPER.yaml:

differs: [{facts: {...}, of: ..., text: ...}, ...]    how trainings differ from the paper
not_given: [{facts: {...}, of: ..., text: ...}, ...]  what the paper leaves open, and what was chosen
printed: [{of: ..., text: ...}, ...]                  what is odd about the numbers that it prints
published_code: [{of: ..., text: ...}, ...]           where the trainings follow the paper and its code does not

A relative path of `model.weights` starts at the repository, wherever the command is given.

`of` is a regular expression, searched in "TABLE DATASET LABEL" of an entry; without one, all are meant. The facts
are those of tests/references/settings.yaml, each with what is built, or null where it is not read or not one value;
their test holds these lines against what is built.
"""

import argparse
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml
from jsonargparse.typing import PositiveInt

from benchmarks.settings.errors import ConfigError, one_line

RECIPES = Path(__file__).parents[1] / "recipes"

TABLE_KEYS = ("title", "shared", "trainings", "quoted", "figure")

ABOUT_THE_PAPER = ("cells", "half_widths", "same_as")
"""Keys of an entry, except the settings of its training."""

REMARKS = ("differs", "not_given", "printed", "published_code")
"""Keys of PAPER.yaml."""

GROUPS = ("data", "model", "optimization", "evaluation")
"""Settings that hold mappings."""

MOST, DEEPEST = 5_000, 50
"""Limits on the values and levels of a YAML file, far above the longest recipe's 1,359 and 9."""

SIZE = 2**20  # characters of a YAML file

METRIC = re.compile(
    r"((un)?seen_)?recall_at_[1-9]\d*|precision_at_1|r_precision|mean_average_precision(_at_r)?"
    r"|mean_reciprocal_rank|NMI|AMI|F1|ideal_joint_error|h_divergence"
)
"""Names of metrics that a test or a point of the curves measures."""

Cells = dict[str, dict[str, float]]
"""{test-time output: {metric: percent}}"""


@dataclass(frozen=True)
class Remark:
    """A line of PAPER.yaml: its text, its facts with their values, and its entries."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""


@dataclass(frozen=True)
class Entry:
    """A row of a table, or several rows of one training.

    Args:
        name: PAPER/TABLE/ROW.
        training: Name of the entry that defines the training: its own, or that of `same_as`.
        settings: Settings of the training.
        label: The paper's name of the row.
        remarks: Remarks on the training and its paper, by the keys of PAPER.yaml.
        cells: The paper's numbers.
        half_widths: Half-widths of the paper's own 95 % intervals.
    """

    name: str
    training: str
    settings: dict[str, Any]
    label: str
    remarks: dict[str, list[Remark]] = field(default_factory=dict)
    cells: Cells = field(default_factory=dict)
    half_widths: Cells = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a figure.

    Args:
        lines: {name: row}, over the steps of a training, or {name: {x: row}}, over a setting.
        metrics: Each is a line of its own, or a column of the records "oracle" and "evaluation".
        output: The test-time output of the metrics; default: the first that has them.
        x: Label of the x axis.
        steps: Training steps in one unit of x, if x counts training steps.
        picture: In place of lines: "features" or "thinned" (HORDE's Figure 1), "map" or "retrieval".
        row: The row of the picture.
        grid: Numbers of queries of a retrieval, and of neighbours of each.
    """

    lines: dict[str, str | dict[float, str]] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=lambda: ["recall_at_1"])
    output: str | None = None
    x: str = "training step"
    steps: PositiveInt = 1
    picture: Literal["features", "thinned", "map", "retrieval"] | None = None
    row: str | None = None
    grid: tuple[PositiveInt, PositiveInt] = (8, 8)

    def rows(self) -> list[str]:
        """The rows of the table that it shows."""
        found = [] if self.row is None else [self.row]
        for line in self.lines.values():
            found += [line] if isinstance(line, str) else line.values()
        return found


@dataclass(frozen=True)
class RecipeTable:
    """A file of recipes."""

    name: str
    title: str
    entries: list[Entry]
    quoted: list[dict[str, Any]]
    figure: dict[str, Panel] = field(default_factory=dict)


def table_names() -> list[str]:
    """PAPER/TABLE of all files."""
    return [
        str(path.relative_to(RECIPES).with_suffix("")) for path in sorted(RECIPES.glob("*/*.yaml"))
    ]


def recipe_names() -> list[str]:
    """PAPER/TABLE/ROW of all entries."""
    return [entry.name for table in table_names() for entry in read_table(table).entries]


def read_table(name: str) -> RecipeTable:
    """Read all entries of PAPER/TABLE.

    Raises:
        ConfigError: if there is no such file, or it is not as described above.
    """
    content = _content(name)
    quoted = content.get("quoted") or []
    for row in quoted:
        if not isinstance(row, dict) or not {"row", "dataset"} <= row.keys():
            raise ConfigError(f"{name}.quoted: expected {{row: ..., dataset: ...}}, got {row!r}")
        about = ("row", "dataset", "backbone", "embedding_dim")
        _check_numbers(f"{name}.quoted", {key: row[key] for key in row if key not in about})
    entries = [_entry(f"{name}/{row}", content) for row in content["trainings"]]
    figure = _figure(f"{name}.figure", content)
    return RecipeTable(name, content.get("title") or name, entries, quoted, figure)


def _figure(key: str, content: Mapping[str, Any]) -> dict[str, Panel]:
    shared = dict(content.get("figure") or {})
    if not shared:
        return {}
    panels, keys = shared.pop("panels", {}), [known.name for known in fields(Panel)]
    _check_kind(f"{key}.panels", panels, dict)
    if not panels:
        raise ConfigError(f"{key}.panels: expected {{TITLE: {{...}}}}, got none")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Panel)
    figure = {}
    for title, own in panels.items():
        where = f"{key}.{title}"
        _check_kind(f"{where}: title", title, str)
        _check_kind(where, own, dict)
        described = {name: value for name, value in (shared | own).items() if value is not None}
        if unknown := described.keys() - set(keys):
            raise ConfigError(
                f"{where}: unknown {', '.join(map(str, unknown))}; there are {', '.join(keys)}"
            )
        try:
            panel = figure[title] = Panel(**parser.parse_object(described))
        except argparse.ArgumentError as error:
            raise ConfigError(f"{where}: {one_line(error)}; got {described}") from error
        _check_metrics(f"{where}.metrics", panel.metrics)
        for name, line in panel.lines.items():  # the parser does not look at keys
            _check_kind(f"{where}.lines: name", name, str)
            _check_numbers(
                f"{where}.lines.{name}", {} if isinstance(line, str) else {x: x for x in line}
            )
        missing = set(panel.rows()) - content["trainings"].keys()
        alone = bool(panel.lines) == bool(panel.picture and panel.row)
        if missing or alone or not panel.metrics:
            raise ConfigError(
                f"{where}: expected lines and their metrics, or a picture and its row, of rows of this table; got "
                f"{', '.join(missing) or described}"
            )
    return figure


def read_entry(name: str, *, followed: bool = False) -> Entry:
    """Read the entry PAPER/TABLE/ROW.

    Args:
        followed: True if another entry refers to it with same_as: it must then have a training of its own.

    Raises:
        ConfigError: if there is no such entry; it lists the existing ones.
    """
    table, _, row = name.rpartition("/")
    content = _content(table)
    if row not in content["trainings"]:
        there = ", ".join(content["trainings"])
        raise ConfigError(f"recipe: no {row!r} in {table}; there are {there}")
    training = content["trainings"][row]
    if followed and isinstance(training, dict) and "same_as" in training:
        raise ConfigError(f"{name}: is itself same_as another entry; name that one")
    return _entry(name, content)


def _content(table: str) -> dict[str, Any]:
    if table not in table_names():
        raise ConfigError(
            f"recipe: no table {table!r}; there are {', '.join(table_names())}, and --list shows their entries"
        )
    path = RECIPES / f"{table}.yaml"
    return _read_table(path, path.stat().st_mtime_ns)


@cache
def _read_table(path: Path, changed: int) -> dict[str, Any]:
    content = read_yaml(path)
    unknown = content.keys() - set(TABLE_KEYS)
    trainings = content.get("trainings")
    if unknown or not isinstance(trainings, dict) or not all(isinstance(t, str) for t in trainings):
        raise ConfigError(
            f"{path}: expected trainings by name, and at most {', '.join(TABLE_KEYS)}; got "
            f"{', '.join(map(str, content))}"
        )
    kinds = {"title": str, "shared": dict, "quoted": list, "figure": dict}
    for key, kind in kinds.items():
        _check_kind(f"{path}: {key}", content.get(key, kind()), kind)
    for key in GROUPS:
        _check_kind(f"{path}: shared.{key}", (content.get("shared") or {}).get(key, {}), dict)
    return content


def _entry(name: str, content: Mapping[str, Any]) -> Entry:
    own = content["trainings"][name.rpartition("/")[2]]
    own = {} if own is None else own
    _check_kind(name, own, dict)
    own = dict(own)
    for key in ("cells", "half_widths", "same_as", "label", *GROUPS):
        kind = {"label": str, "same_as": str}.get(key, dict)
        _check_kind(f"{name}.{key}", own.get(key, kind()), kind)
    about = {key: own.pop(key) for key in ABOUT_THE_PAPER if key in own}
    cells, half_widths = about.get("cells") or {}, about.get("half_widths") or {}
    _check_cells(f"{name}.cells", cells)
    _check_cells(f"{name}.half_widths", half_widths)
    if "same_as" in about:
        if own.keys() - {"label"}:
            raise ConfigError(
                f"{name}: has the settings of {about['same_as']}; leave out {', '.join(own)}"
            )
        origin = read_entry(about["same_as"], followed=True)
        training, settings = origin.training, origin.settings
        label = own.get("label", origin.label)
    else:
        settings = merge(content.get("shared") or {}, own)
        if weights := settings.get("model", {}).get("weights"):
            settings["model"] = settings["model"] | {
                "weights": str(RECIPES.parents[1] / str(weights))
            }
        training, label = name, settings.get("label", name)
    paper, _, table = name.rpartition("/")[0].partition("/")
    about_it = f"{table} {settings.get('data', {}).get('dataset', '')} {label}"
    remarks = {
        key: [remark for remark in found if re.search(remark.of, about_it)]
        for key, found in read_remarks(paper).items()
    }
    return Entry(name, training, settings, label, remarks, cells, half_widths)


def read_remarks(paper: str) -> dict[str, list[Remark]]:
    """Read the lines of PAPER.yaml; none if there is no such file.

    Raises:
        ConfigError: if a line is not as described above.
    """
    path = RECIPES / f"{paper}.yaml"
    return _read_remarks(path, path.stat().st_mtime_ns) if path.exists() else {}


@cache
def _read_remarks(path: Path, changed: int) -> dict[str, list[Remark]]:
    content = read_yaml(path)
    if unknown := content.keys() - {*REMARKS}:
        raise ConfigError(f"{path}: expected {', '.join(REMARKS)}; got {min(unknown, key=str)}")
    for key in content:
        _check_kind(f"{path}: {key}", content[key], list)
    return {key: [_remark(path, line) for line in content[key]] for key in content}


def _remark(path: Path, line: Any) -> Remark:
    try:
        remark = Remark(**{**line, "facts": dict(line.get("facts", {}).items())})
        re.compile(remark.of)
        if not all(isinstance(word, str) for word in (remark.text, *remark.facts)):
            raise TypeError("text and names of facts are text")
        return remark
    except (AttributeError, TypeError, re.error) as error:
        raise ConfigError(
            f"{path}: expected lines {{facts: {{...}}, of: REGEX, text: ...}}, got {line!r} ({error})"
        ) from error


def _check_cells(key: str, cells: Mapping[str, Any]) -> None:
    for output, row in cells.items():
        _check_kind(f"{key}.{output}", row, dict)
        _check_numbers(f"{key}.{output}", row)
        _check_metrics(f"{key}.{output}", row)


def _check_metrics(key: str, names: Iterable[str]) -> None:
    for name in names:
        if not METRIC.fullmatch(str(name)):
            raise ConfigError(
                f"{key}: unknown metric {name!r}; such are recall_at_1, NMI, r_precision"
            )


def _check_numbers(key: str, row: Mapping[str, Any]) -> None:
    for metric, value in row.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ConfigError(f"{key}.{metric}: expected a number, got {value!r}")


def _check_kind(key: str, value: Any, kind: type) -> None:
    words = {dict: "a mapping", list: "a list", str: "text"}
    if not isinstance(value, kind):
        raise ConfigError(f"{key}: expected {words[kind]}, got {value!r}")


class TooLargeError(yaml.composer.ComposerError):
    """Error: more values or levels than settings have."""


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and very large files, and reads 1e-5 as a number."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        self._refuse(self._depth > DEEPEST, f"more than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not alias:
            values = [] if isinstance(node, yaml.ScalarNode) else node.value
            inner = [
                part
                for value in values
                for part in (value if isinstance(value, tuple) else [value])
            ]
            self._sizes[node] = 1 + sum(self._sizes.get(part, 0) for part in inner)
        self._refuse(node not in self._sizes, "an alias inside the value that it stands for")
        size = max(self._sizes[node], len(self._sizes))
        self._refuse(size > MOST, f"more than {MOST:,} values, aliases written out")
        return node

    def _refuse(self, wrong: bool, found: str) -> None:
        if wrong:
            mark = self.peek_event().start_mark
            raise TooLargeError(None, None, found, mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in [self.construct_object(key, deep=True) for key, _ in node.value]:
            if not isinstance(key, Hashable):
                continue  # refused below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=True)


class StrictDumper(yaml.SafeDumper):
    """YAML dumper for `StrictLoader`: it quotes texts that would be read as numbers, such as "1e5"."""


for either in (StrictLoader, StrictDumper):
    either.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_yaml(text: str) -> Any:
    """Read YAML text with `StrictLoader`.

    Raises:
        ValueError: if the text is not valid YAML, or too long.
    """
    if len(text) > SIZE:
        raise ValueError(f"expected settings, got more than {SIZE:,} characters")
    try:
        return yaml.load(text, StrictLoader)
    except Exception as error:  # a tag may declare any text a number, a date or binary
        raise ValueError(one_line(error)) from error


jsonargparse.set_loader("strict", load_yaml, exceptions=(ValueError,))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigError: if the file is missing, unreadable, or holds something else.
    """
    try:
        with path.open() as file:
            content = load_yaml(file.read(SIZE + 1))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def dump(config: Mapping[str, Any]) -> str:
    """Settings as YAML for `--config`."""
    return yaml.dump(dict(config), Dumper=StrictDumper, sort_keys=False)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings into others, level by level; the description of a class is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both and "class_path" not in value else value
    return merged
