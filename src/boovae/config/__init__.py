"""Settings: their declarations, their precedence, and defaults that suit the data. Imports neither torch nor tyro."""

from boovae.config.section import Section
from boovae.config.settings import (
    CORE,
    CORE_NAMES,
    SMALLEST_BATCH,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    Settings,
    TrainingSettings,
    fitted_batch,
    folder_name,
    to_toml,
)

__all__ = [
    "CORE",
    "CORE_NAMES",
    "SMALLEST_BATCH",
    "DataSettings",
    "EvaluationSettings",
    "ModelSettings",
    "Section",
    "Settings",
    "TrainingSettings",
    "fitted_batch",
    "folder_name",
    "to_toml",
]
