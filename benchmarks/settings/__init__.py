"""The settings of a run: types, recipes, command line and differences."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "changing": ["changed"],
        "command": ["Command", "parse"],
        "data": ["Data", "VIEWS", "num_workers"],
        "differences": [
            *("Change", "VOLATILE", "changes_of_methods", "changes_of_results", "config_changes"),
            *("flat", "settings_of_results"),
        ],
        "errors": ["ConfigError", "one_line"],
        "experiment": [
            *("BatchNorm", "ClassSpec", "Ensemble", "Evaluation"),
            *("Experiment", "Model", "Optimization"),
        ],
        "kinds": ["misfit"],
        "recipe_files": [
            *("GROUPS", "Entry", "Panel", "RecipeTable", "merge"),
            *("read_entry", "read_table", "recipe_names", "table_names"),
        ],
        "trusted": ["TRUST", "is_trusted", "trust", "trusted_module"],
        "yaml_files": ["dump", "read_yaml"],
    },
)
