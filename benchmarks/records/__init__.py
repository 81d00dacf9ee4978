"""Records of a run: writing and reading."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "files": ["file_digest", "damage_named", "read_json", "replace_file", "write_json"],
        "run_writer": ["RunWriter"],
        "provenance": [
            *("changed_since", "describe_code", "describe_data", "describe_hardware"),
            *("describe_versions", "describe_weights", "now", "peak_memory"),
        ],
        "results": ["NonFiniteError", "Run", "digests", "has_diverged", "load_run"],
        "run_folder": [
            *("EMBEDDINGS", "RunFolder", "RunFolderError", "RunFolderInUseError"),
            *("check_same", "load_best", "load_checkpoint"),
        ],
        "steps": ["Row", "read_table"],
    },
)
