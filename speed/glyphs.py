"""A run of the benchmarks' runner."""

import tempfile
from pathlib import Path

from benchmarks.records.results import load_run
from benchmarks.reporting.table import Table
from benchmarks.run import main
from speed.case import Case


def glyphs(case: Case) -> None:
    """A run on Glyphs by the runner.

    `benchmarks/run.py --recipe glyphs/demo/binomial_horde`, shortened to 300 steps of 80 images of 32 px. Its
    images per second are those of the training steps, without tests and checkpoints. The loss must fall.
    """
    words = ["--recipe=glyphs/demo/binomial_horde", "--report=false", "--evaluation.every=0"]
    words += ["--data.max_classes=24"] if case.tiny else []
    words += [f"--optimization.steps={2 if case.tiny else 300}"]
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words, f"--data.root={folder}", f"--output={folder}/run"]) == 0
        run = load_run(Path(folder, "run"))
        losses = run.table("training")["loss"]
    about = run.info
    rows = [["images per second", f"{about['images_per_second']:.0f}"]]
    rows += [["Recall@1 at the end", f"{about['metrics']['recall_at_1']:.3f}"]]
    if gibibytes := about["peak_memory_gib"].get("gpu"):
        rows += [["peak memory on the GPU", f"{gibibytes:.2f} GiB"]]
    rows += [["loss at first and at the end", f"{losses[0]:.4g}, {losses[-1]:.4g}"]]
    case.tell(Table(["the run", ""], rows).markdown())
    rose = f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    assert case.tiny or losses[-1] < losses[0], rose
