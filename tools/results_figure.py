"""Draws docs/results.svg from the tables of the studies' pages: the main comparisons, by kind of image.

python tools/results_figure.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reporting.forest import Strip, forest_svg  # noqa: E402

SKETCHES = "HORDE with sketches helps binomial deviance"
JRS = "JRS helps AM\N{NON-BREAKING HYPHEN}softmax"
PROXY = "Proxy\N{NON-BREAKING HYPHEN}Anchor"
HEADS, METHODS = "photographs_heads", "photographs_heads_methods"
SECOND, TRUNK = "photographs_heads_second", "photographs_cars_heads"
WHITENING = "Whitening of the trained features is better than"
START = "A head that starts at principal components helps"
MECHANISM, LOSSES = "photographs_mechanism_butterflies", "photographs_mechanism_losses"
ROWS = {  # by kind: a label, the study's page, and how the row of its table begins
    "Flowers: 51 held-out classes, six seeds; a start at components over random numbers": [
        ("Proxy-Anchor", HEADS, f"{START} {PROXY}"),
        ("the same, halves exchanged", SECOND, f"{START} {PROXY}"),
        ("binomial deviance", HEADS, f"{START} binomial"),
        ("the same, halves exchanged", SECOND, f"{START} binomial"),
        ("AM-softmax", METHODS, f"{START} AM"),
    ],
    "Flowers, from components": [
        ("powers on Proxy-Anchor", HEADS, f"Powers help {PROXY} with a PCA start"),
        ("the same, halves exchanged", SECOND, f"Powers help {PROXY} with a PCA start"),
        ("powers on binomial deviance", HEADS, "Powers help binomial deviance with a PCA start"),
        ("the same, halves exchanged", SECOND, "Powers help binomial deviance with a PCA start"),
        ("HORDE on binomial deviance", METHODS, SKETCHES),
        ("HORDE with trained projections", METHODS, "HORDE with trained projections helps b"),
        ("JRS on AM-softmax", METHODS, JRS),
        ("energy confusion on binomial deviance", METHODS, "Energy confusion"),
        ("VEM attention on the margin loss", METHODS, "VEM attention"),
    ],
    "Cars, MobileNetV2 and Proxy-Anchor: 98 held-out classes, six seeds": [
        ("a start at components", TRUNK, START),
        ("no layer while training", TRUNK, "Training without a head helps"),
        ("whitening after random numbers", TRUNK, f"{WHITENING} a random head"),
        ("whitening after components", TRUNK, f"{WHITENING} a head that started"),
        ("powers beside random numbers", TRUNK, f"Powers help {PROXY} with a random"),
        ("powers from components", TRUNK, f"Powers help {PROXY} with a PCA"),
    ],
    "Cars: 98 held-out classes, ten seeds": [
        ("HORDE on binomial deviance", "photographs_cars", SKETCHES),
        ("the same, other seeds", "photographs_cars_orders", SKETCHES),
        ("the same, twice the steps", "photographs_cars_longer", SKETCHES),
        ("HORDE on multi-similarity", "photographs_cars_others", "HORDE with sketches"),
        ("the same, tuned for each", "photographs_cars_tuned", "HORDE with sketches"),
        ("HORDE with trained projections", "photographs_cars_others", "HORDE with trained"),
        ("JRS on AM-softmax", "photographs_cars_others", JRS),
        ("the same, tuned for each", "photographs_cars_tuned", JRS),
        ("energy confusion on binomial deviance", "photographs_cars_others", "Energy confusion"),
        ("VEM attention on the margin loss", "photographs_cars_others", "VEM attention"),
    ],
    "Birds: 100 held-out classes, five seeds, all layers trained": [
        ("HORDE on binomial deviance", "photographs_birds_whole", SKETCHES),
        ("HORDE on multi-similarity", "photographs_birds_whole", "HORDE with sketches helps m"),
        ("HORDE with trained projections", "photographs_birds_whole", "HORDE with trained"),
        ("powers on binomial deviance", "photographs_birds_whole", "A loss on powers"),
    ],
    "Birds: six seeds, the last stage trained": [
        ("HORDE on binomial deviance", "photographs_mechanism_birds", "HORDE with sketches helps"),
        ("powers on binomial deviance", "photographs_mechanism_birds", "A loss on powers"),
    ],
    "Butterflies: 50 held-out classes, six seeds": [
        ("HORDE on binomial deviance", MECHANISM, "HORDE with sketches helps"),
        ("HORDE on multi-similarity", LOSSES, "HORDE with sketches helps multi"),
        ("powers on binomial deviance", MECHANISM, "A loss on powers"),
        ("powers on Proxy-Anchor", LOSSES, f"Powers help {PROXY}"),
        ("powers on AM-softmax", LOSSES, "Powers help AM\N{NON-BREAKING HYPHEN}softmax"),
        ("powers on multi-similarity", LOSSES, "Powers help multi"),
        ("JRS on AM-softmax, tuned for each", "photographs_jrs_butterflies", JRS),
    ],
    "Groceries: 41 held-out classes, five seeds": [
        (f"{method}, {draw} split", page, f"{begin} ({draw} draw)")
        for method, page, begin in [
            ("HORDE on binomial deviance", "photographs_grocery_rates", SKETCHES),
            ("JRS on AM-softmax", "photographs_grocery_jrs", JRS),
        ]
        for draw in ("first", "second", "third")
    ],
    "Drawn characters: 1,085 classes, ten seeds": [
        (f"fixed HORDE on {name}", "fixed_projections", f"Fixed projections help {words}")
        for name, words in [
            ("binomial deviance", "binomial"),
            ("the contrastive loss", "the contrastive"),
            ("the triplet loss", "the triplet"),
        ]
    ],
}
MARGIN = 1.0  # points of MAP@R


def difference(page: str, begin: str) -> tuple[float, float]:
    """Mean and half-width in points of MAP@R, from the row of a study's page that begins so."""
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    header = re.search(r"^\| comparison \| .*$", text, re.MULTILINE)
    row = re.search(rf"^\| {re.escape(begin)}.*$", text, re.MULTILINE)
    if header is None or row is None:
        raise SystemExit(f"docs/{page}.md: no table with a row that begins {begin!r}")
    names, cells = (line[0].split("|") for line in (header, row))
    column = next((k for k, name in enumerate(names) if "by MAP@R" in name), 3)
    mean, half = re.findall(r"[-+]?\d+\.\d+", cells[column].replace("\N{MINUS SIGN}", "-"))
    return float(mean), float(half)


def figure() -> bytes:
    strips = list[Strip]()
    for kind, rows in ROWS.items():
        strips.append(Strip(kind))
        for label, page, begin in rows:
            mean, half = difference(page, begin)
            colour = "gain" if mean > half else "harm" if mean < -half else "seen"
            told, limits = f"{mean:+.2f} ± {half:.2f}", (mean - half, mean + half)
            strips.append(Strip(label, colour, told, mean, limits))
    title = "Gain over the same loss without the method, with 95 % intervals"
    return forest_svg(strips, MARGIN, "percentage points of MAP@R; right of 0: better", title)


if __name__ == "__main__":
    (ROOT / "docs" / "results.svg").write_bytes(figure())
