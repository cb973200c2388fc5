"""Settings: what there is to set, who wins, and what the data suggest. Imports neither torch nor tyro."""

from boovae.config.settings import (
    SMALLEST_BATCH,
    Settings,
    fitted_batch,
    flag,
    folder_name,
    from_mapping,
    own_strengths,
    read_toml,
    resolve,
    strength_texts,
    to_toml,
    toml_value,
)

__all__ = [
    "SMALLEST_BATCH",
    "Settings",
    "fitted_batch",
    "flag",
    "folder_name",
    "from_mapping",
    "own_strengths",
    "read_toml",
    "resolve",
    "strength_texts",
    "to_toml",
    "toml_value",
]
