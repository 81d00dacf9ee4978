"""Many runs: sweeps, searches and folds."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "folds": ["evaluation_runs"],
        "launching": ["OURS", "add_arguments", "check_settings", "launcher"],
        "search": ["Search"],
        "search_space": ["read_space"],
        "sweep": ["Sweep", "plan", "some_are_missing", "summary"],
    },
)
