"""Many runs: planned from recipes, seeds, folds or a search, and run side by side or on Ray."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "options": ["add_arguments", "launcher"],
        "planning": ["OURS", "check_settings", "plan", "plan_folds"],
        "queue": ["Queue", "some_are_missing", "summary"],
        "search": ["Search"],
        "search_space": ["read_space"],
    },
)
