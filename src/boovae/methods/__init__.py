"""Continual-learning methods, and the registry that knows them by name."""

from boovae.methods.base import Combination, Method, TaskImages
from boovae.methods.registry import (
    METHODS,
    import_outside,
    is_method,
    make_method,
    never_read,
    outside_digest,
    register,
    settings_read,
    strengths_of,
)

__all__ = [
    "METHODS",
    "Combination",
    "Method",
    "TaskImages",
    "import_outside",
    "is_method",
    "make_method",
    "never_read",
    "outside_digest",
    "register",
    "settings_read",
    "strengths_of",
]
