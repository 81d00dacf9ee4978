from .class_paths import (
    build as build,
    resolved as resolved,
)
from .frozen_stages import FrozenStages as FrozenStages
from .images import (
    Datasets as Datasets,
    build_datasets as build_datasets,
    build_tested as build_tested,
    count_classes as count_classes,
    image_size as image_size,
    image_views as image_views,
    list_images as list_images,
    show_to as show_to,
)
from .network import (
    STARTING_WEIGHTS as STARTING_WEIGHTS,
    EmbeddingModel as EmbeddingModel,
    batch_norms as batch_norms,
    build_model as build_model,
)
from .objective import (
    build_loss as build_loss,
    build_optimizer as build_optimizer,
)
