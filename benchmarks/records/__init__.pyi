from .files import (
    damage_named as damage_named,
    file_digest as file_digest,
    read_json as read_json,
    write_json as write_json,
)
from .provenance import (
    descends as descends,
    describe_code as describe_code,
    describe_data as describe_data,
    describe_hardware as describe_hardware,
    describe_launcher as describe_launcher,
    describe_tested as describe_tested,
    describe_versions as describe_versions,
    keep_code as keep_code,
    describe_weights as describe_weights,
    look_through as look_through,
    now as now,
    peak_memory as peak_memory,
)
from .results import (
    DONE as DONE,
    NonFiniteError as NonFiniteError,
    Run as Run,
    about_as_long as about_as_long,
    digests as digests,
    has_diverged as has_diverged,
    has_thresholds as has_thresholds,
    load_run as load_run,
    outcome as outcome,
)
from .run_folder import (
    EMBEDDINGS as EMBEDDINGS,
    HEAD as HEAD,
    RunFolder as RunFolder,
    RunFolderError as RunFolderError,
    check_same as check_same,
    run_identity as run_identity,
    load_best as load_best,
    load_checkpoint as load_checkpoint,
    run_changes as run_changes,
)
from .run_writer import RunWriter as RunWriter
from .steps import (
    Row as Row,
    read_table as read_table,
)
from .trackers import check_trackers as check_trackers
