"""Templates of pages, shared by the report, the page of a bench and the server."""

from __future__ import annotations

import base64
import functools
from importlib import resources
from typing import TYPE_CHECKING

from markupsafe import Markup

from boovae.report.numbers import nats, percent

if TYPE_CHECKING:
    import jinja2


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment that loads templates by their path in the package.

    Every text is escaped, because run folders are untrusted; an undefined variable is an error.
    """
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("boovae", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    found.filters |= {"image": image_source, "nats": nats, "percent": percent}
    return found


def own_file(name: str) -> Markup:
    """Return a style sheet or script of this package, to be inserted unescaped."""
    return Markup(resources.files("boovae.report").joinpath(name).read_text(encoding="utf-8"))


def image_source(png: bytes) -> str:
    """Return a PNG as the address of an image inside the page."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
