"""Names of published results: the digests of their settings, and of their plans, as the code spells them now.

    python -m tools.published_names > before.json            before a setting, a class or an argument is renamed
    python -m tools.published_names --since before.json      after it: results/*.json say which digest is which

A result is found by a digest of all its settings. A new name, or a new setting that is not null, changes the digest
and not the result; without the second command the study would train it again.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.records.files import read_json, write_json
from benchmarks.settings.study_reading import read_study
from benchmarks.studies import jobs
from benchmarks.studies.kept import RENAMED, Results
from benchmarks.studies.study import Study

RESULTS = Path(__file__).resolve().parents[1] / "results"
PHOTOGRAPHS = "photographs_"

OF_PHOTOGRAPHS = (
    *("cars", "cars_longer", "cars_orders", "cars_others", "cars_tuned", "birds_whole"),
    *("grocery", "grocery_controls", "grocery_jrs", "grocery_rates", "jrs_butterflies"),
    *("mechanism_birds", "mechanism_butterflies", "mechanism_losses", "heads", "heads_methods"),
    "cars_heads",
)
STUDIES = {
    **{"claims": "glyphs", "fixed_projections": "glyphs_fixed"},
    **{f"{PHOTOGRAPHS}{name}": f"photographs/{name}" for name in OF_PHOTOGRAPHS},
    "photographs_heads_second": "photographs/heads",  # with the other half of the species
}
"""{file of results: its study}."""

WEIGHTS = "2b4a5f7e9a1870e2c41efd811c5b04f7e5843b32900a338e3f181204a324f9c6"
BIRDS_WEIGHTS = "641a988bb298218421fbb803aa7e0368488e9b100f087f67296d3df14a3be604"
"""The same without their classifier, as a bundle has them."""
MOBILENET_WEIGHTS = "d04b343404c14a9c8dfdbebb9117de6bb25df067bee179468774dd1d442aa7d2"
MOBILENET = (
    "{pad_type: same, pretrained_cfg_overlay: {mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}}"
)

TEST_CLASSES = {
    "birds.txt": "40738155192237cb00d7cd5eaf1b30c8d1713e1926d994a23d5ed291e4d4dcb6",
    "butterflies.txt": "7a20bff0af44e81091ecc709db8f7320a09349bb017c1631808741bb6e1bc002",
    "cars.txt": "05469a8cb0bca61ff1554fd6cd780a39a9658147dd0b2574d92d8fc1b11a9334",
    "flowers.txt": "3dd014459a5ec27e04f5c2d89401c1a013e52b2612ab721bf59b3418f7705122",
    "flowers_second.txt": "df68553db211e4dbb8f337036726bbf6006c8e41d47d30780d93186ab65f63d6",
    "grocery_test_classes_0.txt": "d90085ce828c374bf1836de2387599a7d700570f3a4c28ab080d36a7d5d7a230",
    "grocery_test_classes_1.txt": "aa33f5bafdbe9d0c770cc085f76f50ee598289c2709a89d787dd50ca7cb555a8",
    "grocery_test_classes_2.txt": "6e01a0222e2e1ed829732f1974f7e4dbd4d4ff31030932212af31601d6bf0218",
}
KINDS = {kind: kind for kind in ("cars", "birds", "butterflies")}
KINDS |= {"mechanism_losses": "butterflies", "heads": "flowers", "heads_second": "flowers_second"}
KINDS |= {"cars_heads": "cars"}
"""{word of a file's name, the longest of several: whose test classes it has}."""


@contextmanager
def settings_of(file: str) -> Iterator[list[str]]:
    """The settings that a study was started with, as far as its digests know them; no photograph is needed.

    What counts of photographs is in the digests of the lists of test classes and of the trunk's weights.
    """
    if not file.startswith(PHOTOGRAPHS):
        yield []
        return
    weights, arguments = BIRDS_WEIGHTS if "birds_whole" in file else WEIGHTS, "{}"
    if "cars_heads" in file:
        weights, arguments = MOBILENET_WEIGHTS, MOBILENET
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        patch.object(jobs, "file_digest", lambda path: TEST_CLASSES.get(path.name, weights)),
    ):
        for name in (*TEST_CLASSES, "trunk.safetensors"):
            Path(name).touch()
        words = sorted((word for word in KINDS if word in file), key=len)
        classes = [f"--data.test_classes={KINDS[word]}.txt" for word in words[-1:]]
        network = [f"--model.trunk_args={arguments}", "--model.weights=trunk.safetensors"]
        yield ["--data.root=photographs", *network, *classes]


def jobs_of(study: Study) -> Iterator[tuple[str, jobs.Job]]:
    """All trainings of a study, each with a name that no setting's spelling changes."""
    for row in study.rows:
        for job in chain(*study.candidates(row).values(), study.tests(row)):
            yield f"{row}: {job.name}", job


def digests(file: str, results: Results) -> tuple[dict[str, str], dict[str, str]]:
    """{name: digest} of a file's trainings and its plan: as they are now, and as they are published."""
    with settings_of(file) as settings:
        study = Study(read_study(STUDIES[file]), results, Path("runs"), settings)
        published, now = {"plan": study.digest}, {"plan": study.own_digest}
        for name, job in jobs_of(study):
            now[name] = job.digest[:16]
            published[name] = results.renamed.get(now[name], now[name])
    return now, published


def rename(file: str, before: dict[str, str]) -> int:
    """Say in a file of results which of today's digests is which of before; the number of new ones.

    Settings that validation chose are known once the results of the validation are found: as many rounds.
    """
    added: dict[str, str] = {}
    while True:
        results = Results(RESULTS / f"{file}.json")
        results.renamed |= added
        now, published = digests(file, results)
        new = {
            now[name]: before[name]
            for name in now.keys() & before.keys()
            if published[name] != before[name]
        }
        if not new.items() - added.items():
            break
        added |= new
    if added:
        content = read_json(RESULTS / f"{file}.json")
        del content["sha256"]
        renamed = {**content.get(RENAMED, {}), **added}
        write_json(RESULTS / f"{file}.json", {**content, RENAMED: dict(sorted(renamed.items()))})
    return len(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--since", type=Path, metavar="FILE.json", help="the names of before")
    since: Path | None = parser.parse_args().since
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if since is None:
        names = {file: digests(file, Results(RESULTS / f"{file}.json"))[1] for file in STUDIES}
        json.dump(names, sys.stdout, indent=1)
        return
    for file, before in json.loads(since.read_text()).items():
        print(f"{file}: {rename(file, before)} digests have a new spelling", flush=True)


if __name__ == "__main__":
    main()
