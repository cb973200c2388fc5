"""How a page is filled: one environment for the report and the page of a bench."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


@functools.cache
def environment() -> jinja2.Environment:
    """Return what reads templates by their place in the package.

    A run folder may come from a stranger, so every text is escaped; a misspelt variable is an error.
    """
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("boovae", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def own_file(name: str) -> Markup:
    """Return a style or a script that pages hold, as it is."""
    from markupsafe import Markup

    return Markup(resources.files("boovae.report").joinpath(name).read_text(encoding="utf-8"))
