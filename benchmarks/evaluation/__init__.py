"""Metrics, curves and pictures of a trained model."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "curves": ["Curves", "SELECTED_BY"],
        "outputs": ["best_by_the_test", "save_embeddings", "test_outputs"],
        "showcase": ["save_showcase"],
        "tester": ["cluster_metrics", "evaluate", "measure"],
    },
)
