from .batches import training_loader as training_loader
from .cached_views import CachedViews as CachedViews
from .failures import expected_failure as expected_failure
from .launcher import check_launcher as check_launcher
from .loop import (
    StepError as StepError,
    Trainer as Trainer,
)
from .parts import (
    build_parts as build_parts,
    check_parts as check_parts,
    decoded as decoded,
    find_horde as find_horde,
    start as start,
    try_one_step as try_one_step,
)
from .state import TrainingState as TrainingState
