"""After the answer: a page in HTML, and the recommended row trained on all classes."""

from pathlib import Path

from tests.benchmarks.studies.toy import RATE, change, command, finish


def test_the_recommended_row_is_trained_on_all_classes_once(toy, trained_by, capsys):
    change(rows={"base": {"choose": {RATE: [0.1, 0.2]}}, "new": {"takes": ["base"]}, "third": {}})
    seen = []

    def train(jobs):
        for job in jobs:
            rate = job.config["optimization"]["learning_rate"]
            seen.append((job.config["data"]["split"], rate, job.folder))
            gain = 0.1 * ("new" in job.training)
            finish(job, 0.5 + gain + job.seed / 1e4 + (rate == 0.2) / 1e3)

    trained_by(train)
    assert command() == 0
    printed = capsys.readouterr().out
    assert (
        "on all classes: python -m benchmarks.study toy.yaml --output=toy.md --finish\n" in printed
    )
    assert "all" not in {split for split, *_ in seen}
    page = Path("toy.html").read_text()
    assert "benchmarks.study toy.yaml --output=toy.md --finish</pre>" in page
    seen.clear()
    assert command("--finish") == 0
    [(split, rate, folder)] = seen
    assert (split, rate) == ("all", 0.2), "the chosen one"
    assert folder.parent == Path("runs/studies/toy/finished")
    assert f"benchmarks.export {folder} --output exported" in capsys.readouterr().out
    seen.clear()
    assert command("--finish") == 0 and not seen


def test_finishing_trains(toy, capsys):
    assert command("--finish", "--page-only") == 2
    assert "--finish: trains, and --page-only does not" in capsys.readouterr().err
