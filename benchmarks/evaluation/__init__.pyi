from .closed_form import (
    load_head as load_head,
    save_head as save_head,
    set_head as set_head,
)
from .curves import (
    SELECTED_BY as SELECTED_BY,
    Curves as Curves,
)
from .generalization_bound import (
    confidence_interval as confidence_interval,
    h_divergence as h_divergence,
    ideal_joint_error as ideal_joint_error,
    stratified_parts as stratified_parts,
)
from .networks import (
    RunNetwork as RunNetwork,
    load_export as load_export,
    load_network as load_network,
)
from .outputs import (
    best_by_the_test as best_by_the_test,
    save_embeddings as save_embeddings,
    test_outputs as test_outputs,
    test_untrained as test_untrained,
    verified as verified,
)
from .showcase import (
    save_neighbours as save_neighbours,
    save_showcase as save_showcase,
)
from .tester import (
    Evaluator as Evaluator,
    cluster_metrics as cluster_metrics,
    measure as measure,
    per_class as per_class,
)
