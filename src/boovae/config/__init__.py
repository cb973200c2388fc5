"""Settings: their declarations, their precedence, and defaults that suit the data. Imports neither torch nor tyro."""

from boovae.config.section import Section as Section
from boovae.config.settings import CORE as CORE
from boovae.config.settings import CORE_NAMES as CORE_NAMES
from boovae.config.settings import DataSettings as DataSettings
from boovae.config.settings import EvaluationSettings as EvaluationSettings
from boovae.config.settings import ModelSettings as ModelSettings
from boovae.config.settings import Settings as Settings
from boovae.config.settings import TrainingSettings as TrainingSettings
from boovae.config.settings import folder_name as folder_name
from boovae.config.settings import to_toml as to_toml
