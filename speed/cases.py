"""All cases by name, with the device that they are for and their limits there."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from speed.case import Case
from speed.correctness import correctness, float16
from speed.glyphs import glyphs
from speed.moments import horde_moments, horde_sketches, horde_sketches_by_autograd
from speed.regularizers import energy_confusion, joint_similarity, vem
from speed.retrieval import in_shop, retrieval, stanford
from speed.steps import PHOTOGRAPHS, horde_steps, methods, steps


class Entry(NamedTuple):
    """The first line of the function's docstring is the title, the others are the text below it."""

    run: Callable[[Case], None]
    device: str = "cpu"  # where it runs unless it is named
    seconds: float = math.inf  # on a machine with one H100


CASES = {
    "horde_moments": Entry(horde_moments),
    "horde_sketch_stored": Entry(partial(horde_sketches, checkpoint=False)),
    "horde_sketch_recomputed": Entry(partial(horde_sketches, checkpoint=True)),
    "horde_sketch_autograd": Entry(horde_sketches_by_autograd),
    "horde_resnet50": Entry(partial(horde_steps, trunk="resnet50")),
    "horde_googlenet": Entry(partial(horde_steps, trunk="googlenet")),
    "methods_resnet50": Entry(partial(methods, trunk="resnet50")),
    "methods_googlenet": Entry(partial(methods, trunk="googlenet")),
    "methods_photographs": Entry(partial(methods, **PHOTOGRAPHS)),
    "joint_similarity": Entry(joint_similarity),
    "energy_confusion": Entry(energy_confusion),
    "vem": Entry(vem),
    "stanford": Entry(stanford),
    "in_shop": Entry(in_shop),
    "correctness": Entry(correctness, "cuda", 60),
    "steps": Entry(steps, "cuda", 90),
    "retrieval": Entry(retrieval, "cuda", 40),
    "float16": Entry(float16, "cuda", 15),
    "glyphs": Entry(glyphs, "cuda", 45),
}
