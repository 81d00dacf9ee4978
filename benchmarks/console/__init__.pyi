from .arguments import (
    DECIMAL as DECIMAL,
    INTEGER as INTEGER,
    at_least as at_least,
    columns as columns,
    command_parser as command_parser,
    decimal as decimal,
    say as say,
    split_settings as split_settings,
)
from .failures import (
    causes as causes,
    lacks_shared_memory as lacks_shared_memory,
    machine_failure as machine_failure,
)
from .memory import keep_memory as keep_memory
from .printing import (
    PrintableError as PrintableError,
    is_plain as is_plain,
    posix_module as posix_module,
    printable as printable,
    progress_bar as progress_bar,
    reason as reason,
)
from .stopping import (
    StopRequest as StopRequest,
    handle_signals as handle_signals,
    ignore_signals as ignore_signals,
    leave as leave,
    signals_handled as signals_handled,
    workers_dismissed as workers_dismissed,
)
from .writing import (
    InUseError as InUseError,
    OwnedFolder as OwnedFolder,
    alone as alone,
    let_others_read as let_others_read,
    replace_file as replace_file,
    replacing as replacing,
)
