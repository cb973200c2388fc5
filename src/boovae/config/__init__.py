"""Settings: their declarations, their precedence, and defaults that suit the data. Imports neither torch nor tyro."""

from boovae.config.section import Section
from boovae.config.settings import (
    CORE,
    CORE_NAMES,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    Settings,
    TrainingSettings,
    folder_name,
    to_toml,
)

__all__ = [
    "CORE",
    "CORE_NAMES",
    "DataSettings",
    "EvaluationSettings",
    "ModelSettings",
    "Section",
    "Settings",
    "TrainingSettings",
    "folder_name",
    "to_toml",
]
