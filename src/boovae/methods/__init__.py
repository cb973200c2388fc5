"""Continual-learning methods, and the registry that knows them by name."""

from boovae.config.section import Section as Section
from boovae.methods.method import Method as Method
from boovae.methods.method import TaskImages as TaskImages
from boovae.methods.method_list import MethodList as MethodList
from boovae.methods.registry import METHODS as METHODS
from boovae.methods.registry import REGISTRY as REGISTRY
from boovae.methods.registry import from_mapping as from_mapping
from boovae.methods.registry import import_outside as import_outside
from boovae.methods.registry import is_method as is_method
from boovae.methods.registry import make_method as make_method
from boovae.methods.registry import outside_digest as outside_digest
from boovae.methods.registry import register as register
from boovae.methods.registry import resolve as resolve
