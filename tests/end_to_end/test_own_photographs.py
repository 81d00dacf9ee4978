"""From a folder of photographs to a search among them, by the commands that each step prints."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.fake_trees import write_pictures
from tests.support.processes import ROOT, TIMEOUT

pytestmark = pytest.mark.slow

UNTRAINED = {
    "recipe": "images/resnet50/binomial",
    "settings": ["--optimization.steps=0", "--model.head=whitened", "--label=untrained network"],
}
STUDY = {
    "question": "Does HORDE help?",
    "recipes": "images/resnet50",
    "primary": "mean_average_precision_at_r",
    "margin": 1.0,
    "settings": ["--evaluation.verification=true"],
    "seeds": {"count": 2, "draw": "the network and the batches"},
    "rows": {"binomial": {}, "binomial_horde_sketch": {}, "untrained": UNTRAINED},
    "comparisons": {
        "HORDE": {"claim": "HORDE helps", "better": "binomial_horde_sketch", "than": "binomial"}
    },
}
TINY = [
    *("--model.trunk=test_resnet", "--model.trunk_args={}", "--model.embedding_size=16"),
    *("--data.image_size=32", "--data.resize=36", "--data.batch_size=8", "--data.num_workers=0"),
    *("--optimization.steps=4", "--evaluation.every=2", "--model.batch_norm=train"),
]


def done(command: list[str], folder: Path) -> str:
    """The output of a command, which has to succeed."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def printed(output: str, title: str) -> list[str]:
    """The command behind a title, with this Python and the clone's files."""
    (line,) = re.findall(rf"^{title}: (.+)$", output, re.MULTILINE)
    words = [
        str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(line)
    ]
    return [sys.executable, *words[1:]]


def test_from_a_folder_to_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    photographs = tmp_path / "photographs"
    # Ten images of a class are enough pairs for a threshold.
    files = [f"{name}/{i}.jpg" for name in "abcdefghijkl" for i in range(10)]
    write_pictures(photographs, files, different=len(files))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(STUDY))
    study = ["-m", "benchmarks.study", "mine.yaml", f"--data.root={photographs}"]
    first = done([sys.executable, *study, "--", *TINY], tmp_path)
    assert "Best so far: untrained network. Nothing is trained yet" in first
    lead = re.findall(r"^For \d+ of 100 images of new classes, .* \(60 queries\)\.$", first, re.M)
    assert len(lead) == 2, "before the trainings and after them"
    page = (tmp_path / "runs" / "studies" / "mine" / "study.html").read_text()
    assert "Does HORDE help?" in page and "What that looks like" in page
    assert lead[1] in page and "Class by class" in page and "Classes that are confused" in page
    assert "Known or unknown?" in page and "Known or unknown?" in first
    assert "With 5 photographs per class, the nearest one was right for " in page
    second = done(printed(first, "Fit the recommended method on all classes"), tmp_path)
    export = printed(second, "Export the recommended network")
    assert "finished" in " ".join(export) and "--thresholds" in export
    done(export, tmp_path)
    assert (tmp_path / "exported" / "thresholds.json").is_file()
    words = printed(second, "Search in a folder with it")
    words[words.index("QUERY.jpg")] = str(photographs / "a" / "0.jpg")
    assert "a/0.jpg" in done(words, tmp_path)
    assert (tmp_path / "neighbours.html").is_file()
