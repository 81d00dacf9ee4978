from .comparison import compare as compare
from .figures import (
    THUMBNAIL as THUMBNAIL,
    differing_neighbours as differing_neighbours,
    write_html as write_html,
)
from .folds import (
    fair_comparison as fair_comparison,
    read_method as read_method,
)
from .identification import known_or_unknown as known_or_unknown
from .names import UNTRAINED as UNTRAINED
from .paper_table import paper_page as paper_page
from .recipe_list import recipe_table as recipe_table
from .rows import differing_settings as differing_settings
from .study_advice import advice as advice
from .study_answer import MANY as MANY
from .study_choice import (
    Choice as Choice,
    choose as choose,
)
from .study_classes import (
    Section as Section,
    by_class as by_class,
    confused as confused,
    stored_by_class as stored_by_class,
)
from .study_html import study_html as study_html
from .study_page import (
    Candidate as Candidate,
    best as best,
    study_page as study_page,
)
from .svg import study_figures as study_figures
from .table import Table as Table
from .templates import fill as fill
from .untrained_rows import untrained_row as untrained_row
from .verdicts import (
    Finding as Finding,
    judge as judge,
)
