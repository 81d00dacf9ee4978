"""Tables, figures and pages made from finished runs."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "claims": ["SELECTION", "Tuning", "judge", "read_claims"],
        "claims_page": ["forest", "page_of_claims"],
        "comparison": ["compare"],
        "figures": ["write_html"],
        "folds": ["fair_comparison", "read_method"],
        "kept": ["Results"],
        "paper_figure": ["save_figure"],
        "paper_table": ["RUNS", "paper_page"],
        "recipe_list": ["recipe_table"],
        "table": ["Table"],
        "templates": ["fill"],
    },
)
