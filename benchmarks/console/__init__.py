"""Parts that all commands share: progress bars, arguments, stopping, and files that are complete or absent."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "arguments": ["HelpFormatter", "at_least", "columns", "say", "split_settings"],
        "printing": ["PrintableError", "is_plain", "printable", "printable_names", "reason"],
        "progress": ["progress_bar"],
        "writing": [
            *("InUseError", "OwnedFolder", "alone"),
            *("let_others_read", "replace_file", "replacing"),
        ],
        "stopping": [
            *("StopRequest", "handle_signals", "ignore_signals", "leave"),
            *("signals_handled", "workers_dismissed"),
        ],
    },
)
