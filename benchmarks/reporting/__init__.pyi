from .claims import (
    SELECTION as SELECTION,
    Tuning as Tuning,
    judge as judge,
    read_claims as read_claims,
)
from .claims_page import (
    forest as forest,
    page_of_claims as page_of_claims,
)
from .comparison import compare as compare
from .figures import write_html as write_html
from .folds import (
    fair_comparison as fair_comparison,
    read_method as read_method,
)
from .kept import Results as Results
from .paper_figure import save_figure as save_figure
from .paper_table import (
    RUNS as RUNS,
    paper_page as paper_page,
)
from .recipe_list import recipe_table as recipe_table
from .table import Table as Table
from .templates import fill as fill
