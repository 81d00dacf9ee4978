from .auditing import (
    check as check,
    fitted as fitted,
    judged as judged,
    registered as registered,
    registration as registration,
)
from .jobs import (
    Job as Job,
    check_settings as check_settings,
    make_job as make_job,
    plan as plan,
    read as read,
    try_out as try_out,
    wait_for as wait_for,
)
from .kept import Results as Results
from .launcher_options import (
    add_arguments as add_arguments,
    launcher as launcher,
)
from .queue import Queue as Queue
from .search import (
    Search as Search,
    read_space as read_space,
)
from .showing import (
    setup as setup,
    shown as shown,
)
from .study import Study as Study
