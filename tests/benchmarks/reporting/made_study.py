"""Studies whose rows have made results, with noise of known size."""

from typing import Any

import numpy as np
from scipy import stats

from benchmarks.settings.study_files import Comparison, Seeds, StudyFile, StudyRow

NOISE = np.array([-0.3, 0.2, 0.4, -0.1, -0.2, 0.3, -0.4, 0.1, 0.25, -0.25])
N = len(NOISE)
ERROR = float(stats.sem(NOISE))
HALF = float(stats.t.ppf(0.975, N - 1)) * ERROR
RECALL, MAP = "recall_at_1", "mean_average_precision_at_r"
TRIPLET = ["horde/table1/cub_triplet_horde", "horde/table1/cub_triplet"]  # 3.1 points


def row_of(gain: float = 0.0, precision: Any = 0.0, *, noise: Any = NOISE) -> dict[int, Any]:
    """A row's results by seed: Recall@1 as points above 50 %, and MAP@R above 10 %."""
    of_map = np.broadcast_to(precision, len(noise))
    return {
        seed: {
            "metrics": {RECALL: (50 + gain + one) / 100, MAP: (10 + float(of_map[seed])) / 100},
            "outputs": {"descriptor": {RECALL: 0.25, MAP: 0.05}},
            "curve": {"seen_recall_at_1": 0.9},
            **{"commit": "0123abcdef", "dirty": False, "wall_time_s": 3600.0, "processor": "A"},
        }
        for seed, one in enumerate(noise)
    }


BASE = row_of(noise=0 * NOISE)


def compared(name: str, better: str = "new", **about: Any) -> Comparison:
    given = {"claim": f"{better} helps", "than": "base", **about}
    return Comparison(name, better=better, **given)


def study_of(*comparisons: Comparison, **changes: Any) -> StudyFile:
    rows = {row: StudyRow(f"toy/table/{row}") for one in comparisons for row in one.all_rows()}
    given = {"rows": rows, "seeds": Seeds(count=N), **changes}
    return StudyFile("toy", "Does it help?", comparisons=[*comparisons], **given)
