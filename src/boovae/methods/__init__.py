"""Continual-learning methods, and the registry that knows them by name."""

from boovae.config.section import Section
from boovae.methods.method import Method, TaskImages
from boovae.methods.method_list import MethodList
from boovae.methods.registry import (
    METHODS,
    REGISTRY,
    from_mapping,
    import_outside,
    is_method,
    make_method,
    outside_digest,
    register,
    resolve,
)

__all__ = [
    "METHODS",
    "REGISTRY",
    "Method",
    "MethodList",
    "Section",
    "TaskImages",
    "from_mapping",
    "import_outside",
    "is_method",
    "make_method",
    "outside_digest",
    "register",
    "resolve",
]
