from . import folder as folder
from .catalogue import (
    IMAGE_DATASETS as IMAGE_DATASETS,
    Augmentation as Augmentation,
    DatasetName as DatasetName,
    Interpolation as Interpolation,
)
from .fetch import (
    FetchError as FetchError,
    fetch_file as fetch_file,
    what_differs as what_differs,
)
from .glyphs import Glyphs as Glyphs
from .images import ImageSet as ImageSet
from .listing import (
    DatasetError as DatasetError,
    DatasetInfo as DatasetInfo,
    Listing as Listing,
    load as load,
)
from .splits import (
    Split as Split,
    Stage as Stage,
    validation_fold as validation_fold,
)
from .transforms import (
    CROP_FRACTION as CROP_FRACTION,
    ImageViews as ImageViews,
)
