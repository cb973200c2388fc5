"""`boovae bench coreset-size`: how many real images per task must be kept to do as well as a few learned ones."""

from __future__ import annotations

from collections.abc import Sequence

from boovae.bench import cells as grid
from boovae.bench.request import Request
from boovae.bench.results import Measured
from boovae.bench.study import Line, final, write_study
from boovae.bench.tables import title_of

DATASETS = ("mnist", "fashion_mnist")
#: What coresets are compared with.
METHODS = ("boo", "boo+distill")
#: Images kept per task.
SIZES = (15, 50, 100, 200, 500)


def plan(request: Request) -> list[grid.Cell]:
    """Return a cell for every size of the coreset, and those of the methods it is compared with."""
    sizes = [f"{_label(size)}=coreset:coreset_images={size}" for size in SIZES]
    return grid.plan(request.datasets, [*sizes, *request.methods], request.given, request.tasks, request.joint_tasks)


def write(request: Request, measured: Sequence[Measured], missing: Sequence[str]) -> dict[str, str]:
    """Write figure, numbers and page, and say which size is needed."""
    return write_study(
        request,
        measured,
        missing,
        title="Size of the coreset",
        at="images kept per task",
        titles={metric: title_of(metric) for metric in request.metrics},
        lines=_lines,
        findings=_findings(request, measured),
    )


def _label(size: int) -> str:
    return f"coreset of {size}"


def _lines(measured: Measured, metric: str) -> list[Line]:
    points = [(float(size), final(measured, _label(size), metric)) for size in SIZES]
    lines = [Line("coreset", [(size, spread) for size, spread in points if spread])]
    coresets = set(map(_label, SIZES))
    for label in measured.labels:
        spread = final(measured, label, metric)
        if label not in coresets and spread:
            lines.append(Line(label, [(float(SIZES[0]), spread), (float(SIZES[-1]), spread)], flat=True))
    return lines


def _findings(request: Request, measured: Sequence[Measured]) -> dict[str, str]:
    """Say from which size on a coreset is better than each method it is compared with."""
    found = {}
    for each in measured:
        for metric in request.metrics:
            for method in (label for label in each.labels if label not in map(_label, SIZES)):
                other = final(each, method, metric)
                sizes = [(size, final(each, _label(size), metric)) for size in SIZES]
                tried = {size: ours.mean < other.mean for size, ours in sizes if ours and other}
                if tried:
                    of = "" if len(tried) == len(SIZES) else f" (of {', '.join(map(str, tried))}, the finished ones)"
                    found[f"{each.dataset}: coreset below {method} in {title_of(metric)}"] = _enough(tried) + of
    return found


def _enough(better: dict[int, bool]) -> str:
    """Say at which sizes a coreset is better; more images need not be, where seeds are few.

    >>> _enough({15: False, 50: True, 100: True}), _enough({15: True, 50: False})
    ('from 50 images per task', 'only with 15 images per task')
    """
    sizes = [size for size, good in better.items() if good]
    if not sizes:
        return "at no size tried"
    if all(good for size, good in better.items() if size >= sizes[0]):
        return f"from {sizes[0]} images per task"
    return f"only with {', '.join(map(str, sizes))} images per task"
