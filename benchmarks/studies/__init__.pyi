from .auditing import (
    check as check,
    registered as registered,
    registration as registration,
    try_out as try_out,
)
from .fitting import fitted as fitted
from .jobs import Job as Job
from .kept import Results as Results
from .launching import (
    add_arguments as add_arguments,
    launcher as launcher,
)
from .pace import (
    Pace as Pace,
    measure as measure,
)
from .planning import (
    OURS as OURS,
    check_settings as check_settings,
    plan as plan,
    plan_folds as plan_folds,
)
from .queue import (
    Queue as Queue,
    some_are_missing as some_are_missing,
    summary as summary,
)
from .search import Search as Search
from .study import Study as Study
from .search_space import read_space as read_space
