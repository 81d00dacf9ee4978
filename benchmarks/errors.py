"""What ends a run before it starts."""


class ConfigError(ValueError):
    """The description of the run is wrong; one line that names the key, what came and what to do."""
