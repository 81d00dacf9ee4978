"""Lists of losses in recipes, files and options: the last one overrides the others, as a whole."""

import random
from pathlib import Path

import pytest

from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.recipe_files import dump

RECIPES = [f"glyphs/compare/{row}" for row in ("binomial", "binomial_energy_confusion", "jrd")]


def random_term(draw: random.Random) -> dict[str, object]:
    """A term, which has a weight or not; seldom one that is none."""
    if draw.random() < 0.1:
        return draw.choice([{}, {"weight": 2.0}, {"loss": "x"}, {"loss": {}, "wieght": 1.0}])
    term: dict[str, object] = {"loss": {"class_path": f"package.Loss{draw.randrange(3)}"}}
    if draw.random() < 0.5:
        schedule = {"class_path": "package.Ramp", "init_args": {"steps": draw.randrange(9)}}
        term["weight"] = draw.choice([draw.uniform(-2, 2), schedule])
    return term


def test_the_last_list_holds_as_a_whole(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`pytest tests/end_to_end/attacks -k last_list --attacks 1000` tries a thousand."""
    draw = random.Random(0)
    for attack in range(request.config.getoption("--attacks")):
        files, options, last = [], [], []
        for layer in range(draw.randint(1, 3)):
            last = [random_term(draw) for _ in range(draw.randint(1, 3))]
            if options or draw.random() < 0.5:
                options.append(f"--losses={last}")
                continue
            path = tmp_path / f"{attack}-{layer}.yaml"
            path.write_text(dump({"losses": last}))
            files.append(f"--config={path}")
        argv = [f"--recipe={draw.choice(RECIPES)}", *files, *options]
        try:
            found = parse(argv).config["losses"]
        except ConfigError as error:
            assert str(error).startswith("losses: "), (argv, error)
            assert "\n" not in str(error)
            continue
        assert found == [{"weight": 1.0} | term for term in last], argv
