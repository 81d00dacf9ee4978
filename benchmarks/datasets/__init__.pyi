from . import (
    folder as folder,
    table as table,
)
from .catalogue import (
    IMAGE_DATASETS as IMAGE_DATASETS,
    Augmentation as Augmentation,
    DatasetName as DatasetName,
    Interpolation as Interpolation,
)
from .decoded import DecodedImages as DecodedImages
from .glyphs import Glyphs as Glyphs
from .image_files import (
    read_image as read_image,
    walk as walk,
)
from .image_folder import ImageFolder as ImageFolder
from .images import ImageSet as ImageSet
from .listing import (
    DatasetError as DatasetError,
    Listing as Listing,
    load as load,
)
from .queries import (
    Ranking as Ranking,
    answerable as answerable,
    count_queries as count_queries,
    leaving_text as leaving_text,
    queries_text as queries_text,
)
from .remarks import (
    remarks as remarks,
    verify_command as verify_command,
)
from .splits import Stage as Stage
from .transforms import ImageViews as ImageViews
