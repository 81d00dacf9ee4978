"""Lists of losses in recipes, files and options: the last one overrides the others, as a whole."""

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import dump

RECIPES = [f"glyphs/compare/{row}" for row in ("binomial", "binomial_energy_confusion", "jrd")]

TERMS = st.fixed_dictionaries(
    {"loss": st.builds(lambda n: {"class_path": f"package.Loss{n}"}, st.integers(0, 2))},
    optional={"weight": st.floats(-2, 2)},
)
NO_TERMS = st.sampled_from([{}, {"weight": 2.0}, {"loss": "x"}, {"loss": {}, "wieght": 1.0}])
LISTS = st.lists(TERMS | TERMS | NO_TERMS, min_size=1, max_size=3)


@given(
    recipe=st.sampled_from(RECIPES),
    files=st.lists(LISTS, max_size=2),
    options=st.lists(LISTS, min_size=1, max_size=2),
)
def test_the_last_list_holds_as_a_whole(
    tmp_path: Path, recipe: str, files: list[Any], options: list[Any]
) -> None:
    argv = [f"--recipe={recipe}"]
    for number, terms in enumerate(files):
        path = tmp_path / f"{number}.yaml"
        path.write_text(dump({"losses": terms}))
        argv.append(f"--config={path}")
    try:
        found = parse([*argv, *(f"--losses={terms}" for terms in options)]).config["losses"]
    except ConfigError as error:
        assert all(line.lstrip().startswith("losses: ") for line in str(error).splitlines())
    else:
        assert found == [{"weight": 1.0} | term for term in options[-1]]
