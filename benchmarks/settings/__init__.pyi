from .class_spec import ClassSpec as ClassSpec
from .command import (
    Command as Command,
    parse as parse,
)
from .data import (
    VIEWS as VIEWS,
    Data as Data,
    num_workers as num_workers,
)
from .differences import (
    VOLATILE as VOLATILE,
    Change as Change,
    changed as changed,
    changes_of_methods as changes_of_methods,
    changes_of_results as changes_of_results,
    config_changes as config_changes,
    flat as flat,
    plain as plain,
    settings_of_results as settings_of_results,
)
from .errors import (
    ConfigError as ConfigError,
    one_line as one_line,
)
from .experiment import (
    Evaluation as Evaluation,
    Experiment as Experiment,
    Optimization as Optimization,
)
from .model import (
    BatchNorm as BatchNorm,
    Model as Model,
)
from .recipe_files import (
    Entry as Entry,
    RecipeTable as RecipeTable,
    is_recipe as is_recipe,
    read_entry as read_entry,
    read_table as read_table,
    recipe_names as recipe_names,
    table_names as table_names,
)
from .study_files import (
    CONTROL as CONTROL,
    Comparison as Comparison,
    StudyFile as StudyFile,
    StudyRow as StudyRow,
    digest as digest,
)
from .study_reading import (
    read_study as read_study,
    study_names as study_names,
)
from .trusted import (
    OURS as OURS,
    TRUST as TRUST,
    is_trusted as is_trusted,
    trust as trust,
    trusted_module as trusted_module,
)
from .yaml_files import (
    dump as dump,
    misread as misread,
    read_yaml as read_yaml,
)
