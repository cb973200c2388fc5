"""Warnings about a run: what went wrong in training or makes its numbers misleading, each with a remedy."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from boovae.metrics.evaluation import FEW, NLL, Evaluation, Forgetting, Posterior
from boovae.metrics.forgetting import not_judged, of_earlier
from boovae.report.numbers import mean, number, percent
from boovae.report.run_record import RunRecord

LEAST_ACCURACY = 0.9
#: A task is being forgotten if its NLL has risen by this many nats, or by this share of its former value.
MOST_FORGETTING, MOST_FORGETTING_SHARE = 20.0, 0.2
#: A class is missing from the samples if its share of them is below this part of the fair share.
LEAST_SHARE = 0.1
#: Log-variances explode if a larger share of them lies at the upper limit.
MOST_AT_LIMIT = 0.25
#: A component is dead weight if dropping it costs less (nats); a share of them is normal, but not more than this.
LEAST_COST, MOST_DEAD = 1e-3, 1 / 3
#: At least this share of a task's components should be left when it ends.
LEAST_KEPT = 0.5
#: What helps against forgetting, by the part of the method's name that decides; the first match counts.
HELP = {
    "distill": "a larger --distill-weight retains old tasks better",
    "replay": "a larger --replay-weight or --replay-images replays more of them",
    "ewc": "a larger --ewc-strength retains old tasks better (boovae tune ewc chooses one)",
    "si": "a larger --si-strength retains old tasks better (boovae tune si chooses one)",
    "vcl": "a larger --vcl-weight retains old tasks better",
    "coreset": "a larger --coreset-images keeps more of them",
    "boo": "--method boo+distill also preserves the networks; with --method boo a larger --boo-lambda helps",
    "mog": "a larger --mog-lambda preserves old components, --method boo+distill the networks too",
    "joint": "joint training keeps all data: try more --epochs or a wider --net",
    "": "--method boo+distill is designed to retain old tasks",
}


#: Kinds to show while a run is still training; the others can wait for its end.
URGENT = ("collapse", "log-variance", "forgotten", "missing", "classifier")


class RunWarning(NamedTuple):
    """Something to know before reading the numbers; `kind` identifies the problem."""

    kind: str
    text: str


def find_warnings(run: RunRecord) -> list[RunWarning]:
    """Return the warnings about a run, the most serious first."""
    last = run.evaluations[-1] if run.evaluations else None
    posterior, text = last.posterior if last else None, ""
    found = [RunWarning("collapse", text)] if posterior and (text := _collapsed(run, posterior)) else []
    found += [RunWarning("divergence", text) for text in _divergences(run)]
    found += [RunWarning("note", _sentence(f"{note.text} (task “{run.task_name(note.task)}”)")) for note in run.remarks]
    if last:
        checks = {
            "log-variance": _exploding(run, posterior) if posterior else "",
            "forgotten": _forgotten(run, last),
            "missing": _missing(run, last),
            "classifier": _weak_classifier(last),
            "pruned": _pruned_since(run),
            "samples": _thin_samples(run, last.nll, last.forgetting) if last.nll else "",
        }
        found += [RunWarning(kind, text) for kind, text in checks.items() if text]
    components = {"dead": _dead(run), "idle": _idle(run), "cut short": _cut_short(run)}
    return found + [RunWarning(kind, text) for kind, text in components.items() if text]


# --- the model ------------------------------------------------------------------------------------------------------


def _collapsed(run: RunRecord, posterior: Posterior) -> str:
    tasks = np.flatnonzero(mean(posterior.active_units) < 1).tolist()
    if not tasks:
        return ""
    weight = _setting(run, "kl_weight", 1.0)
    warm_up = max(50, 2 * _setting(run, "kl_warmup", 0.0))
    return (
        f"The model has learned nothing about the images of {_names(run, tasks)} but their average: its posterior has "
        "collapsed, no latent dimension varies between them, so all their reconstructions and samples look the same. "
        f"--kl-warmup {warm_up:g} or a --kl-weight below {weight:g} helps, or more steps: more --epochs, a smaller "
        "--batch-size."
    )


def _setting(run: RunRecord, name: str, default: float) -> float:
    """Return a number of the configuration, which may come from a stranger and hold anything."""
    try:
        return float(run.config[name])
    except (KeyError, ValueError):
        return default


def _exploding(run: RunRecord, posterior: Posterior) -> str:
    share = mean(posterior.at_upper_limit)
    tasks = np.flatnonzero(share > MOST_AT_LIMIT).tolist()
    if not tasks:
        return ""
    worst = percent(float(np.nanmax(share)))
    return (
        f"The encoder's log-variance explodes: up to {worst} of its values for {_names(run, tasks)} are at the upper "
        "limit of --log-variance-range, so codes there are noise. If training was short, more "
        "--epochs or a smaller --batch-size help; otherwise a smaller --learning-rate or a wider range."
    )


def _forgotten(run: RunRecord, last: Evaluation) -> str:
    if last.task == 0 or last.forgetting is None or last.nll is None:
        return ""
    lost = mean(of_earlier(last.forgetting))
    if not np.isfinite(lost).any():
        return ""
    own = np.isfinite(last.forgetting.own[:-1]).any()
    learned = mean(last.nll.own if own else last.nll.per_task)[:-1] - lost
    limit = np.fmin(MOST_FORGETTING, MOST_FORGETTING_SHARE * np.abs(learned))
    tasks = np.flatnonzero(lost > limit).tolist()
    if not tasks:
        return ""
    worst = int(np.nanargmax(lost))
    verb = "is" if len(tasks) == 1 else "are"
    return (
        f"{_sentence(_names(run, tasks))[:-1]} {verb} being forgotten: at worst, “{run.task_name(worst)}”, an image "
        f"costs {number(float(lost[worst]))} nats more than when it was learned ({number(float(learned[worst]))}). "
        f"{_sentence(_help(run.head.method))}"
    )


def _help(method: str) -> str:
    return HELP[next((name for name in HELP if name in method.split("+")), "")]


def _missing(run: RunRecord, last: Evaluation) -> str:
    """Name classes that are rare in samples, old and new ones apart; needs a classifier that is good enough."""
    classes = run.classes(last)
    if last.diversity is None or not classes or _accuracy(last) < LEAST_ACCURACY:
        return ""
    shares = mean(last.diversity.proportions, axis=0)
    fair = 1 / len(classes)
    gone = [name for name, share in zip(classes, shares, strict=True) if share < LEAST_SHARE * fair]
    before = {name for each in run.evaluations if each.task < last.task for name in run.classes(each)}
    rare = f"under {percent(LEAST_SHARE * fair)} of them each, where {percent(fair)} would be fair"
    old, new = ([name for name in gone if (name in before) == known] for known in (True, False))
    texts = []
    if old:
        texts.append(f"Samples rarely show {_listed(old)} any more: {rare}. {_sentence(_help(run.head.method))}")
    if new:
        texts.append(
            f"Samples rarely show {_listed(new)}, of the newest task: {rare}. More --epochs or a smaller --batch-size "
            "learn it better."
        )
    return " ".join(texts)


def _divergences(run: RunRecord) -> list[str]:
    found = []
    for index, seed in enumerate(run.head.seeds):
        mine = [d for d in run.divergences if d.replica == index]
        frozen = next((d for d in mine if d.frozen), None)
        who = f"Replica {index + 1} (seed {seed})"
        if frozen is not None:
            found.append(
                f"{who} diverged in task “{run.task_name(frozen.task)}” and was frozen there; averages "
                "include it wherever its numbers are finite. A smaller --learning-rate helps."
            )
        elif mine:
            where = ", ".join(dict.fromkeys(f"“{run.task_name(d.task)}”" for d in mine))
            times = "once" if len(mine) == 1 else f"{len(mine)} times"
            found.append(
                f"{who} diverged {times} (task {where}), went back to its best state and continued at a lower "
                "learning rate. A smaller --learning-rate helps."
            )
    return found


# --- its components -------------------------------------------------------------------------------------------------


def _dead(run: RunRecord) -> str:
    light: dict[int, list[bool]] = {}
    for component in run.components:
        light.setdefault(component.task, []).append(component.cost is not None and component.cost < LEAST_COST)
    dead = {task: sum(light[task]) for task in sorted(light) if sum(light[task]) > MOST_DEAD * len(light[task])}
    if not dead:
        return ""
    return (
        f"{sum(dead.values())} components of {_names(run, list(dead))} are dead weight: dropping one costs less than "
        f"{LEAST_COST:g} nats. boovae inspect RUN --prune {LEAST_COST:g} drops such components of all tasks and "
        "replicas; fewer --components learn faster."
    )


def _idle(run: RunRecord) -> str:
    """Name tasks that lost more than half of their components at their end, as duplicates or for lack of weight."""
    wanted = run.config.get("components", "")
    if _cut_short(run):  # components that were never learned were not dropped
        wanted = run.config["epochs"]
    counts = {task: found.kept for task, found in run.kept.items() if found.kept is not None}
    kept = {task: float(mean(count)) for task, count in counts.items()} if wanted.isdigit() else {}
    tasks = sorted(task for task, count in kept.items() if count < LEAST_KEPT * int(wanted))
    if not tasks:
        return ""
    twins = max(float(mean(run.kept[task].twins)) for task in tasks)
    twin = f"up to {_count(twins)} were duplicates of others, the rest" if twins > 0 else "the others"
    return (
        f"Of {wanted} components only {_count(min(kept[task] for task in tasks))} were left to "
        f"{_names(run, tasks)}: {twin} had no weight. Fewer --components would do, or the task has too few images."
    )


def _cut_short(run: RunRecord) -> str:
    """Warn of too few epochs for components that are learned one after another."""
    wanted, epochs = (run.config.get(name, "") for name in ("components", "epochs"))
    boosted = {"boo", "boo-flow"} & set(run.head.method.split("+"))
    one_by_one = boosted and run.config.get("boo_objective") in ("forward", "literal")
    if not one_by_one or not wanted.isdigit() or not epochs.isdigit() or int(epochs) >= int(wanted):
        return ""
    return (
        f"One component is learned after every epoch: at most {epochs} of {wanted} in {epochs} epochs. "
        "Use more --epochs to learn them all; fewer --components would have given the same."
    )


# --- how it was measured --------------------------------------------------------------------------------------------


def _accuracy(last: Evaluation) -> float:
    """Return the accuracy of the classifier; NaN where there was none."""
    found = last.classifier.accuracy if last.classifier else None
    return math.nan if found is None else found


def _weak_classifier(last: Evaluation) -> str:
    if not _accuracy(last) < LEAST_ACCURACY:
        return ""
    return (
        f"The classifier is right on only {percent(_accuracy(last))} of the test images: too weak to trust diversity, "
        "class proportions and Fréchet distance. It is trained on the training images of all classes: more of "
        "them (a larger --limit) help, and --metric nll leaves these numbers out."
    )


def _pruned_since(run: RunRecord) -> str:
    tasks = sorted({pruning.task for pruning in run.prunings if pruning.late})
    if not tasks:
        return ""
    return (
        f"Components of {_names(run, tasks)} were pruned after the last evaluation: the numbers are from before; "
        "boovae eval RUN measures the model as it is now."
    )


def _thin_samples(run: RunRecord, nll: NLL, forgetting: Forgetting | None) -> str:
    effective, samples = mean(nll.typical_effective), nll.samples
    thin = np.flatnonzero(effective < FEW).tolist()
    if not thin:
        return ""
    lowest = number(float(np.nanmin(effective)), 1)
    more = (f" {10 * samples}" if samples else "") + ("" if nll.fitted is not None else " --fit-posterior")
    unjudged = forgetting is not None and not_judged(forgetting)
    unclear = ", and whether earlier tasks are forgotten cannot be judged" if unjudged else ""
    return (
        f"The NLL of {_names(run, thin)} is based on few effective importance samples (down to {lowest} of "
        f"{number(samples or math.nan, 0)}); the true value is probably lower{unclear}. boovae eval RUN "
        f"--samples{more} is more exact; longer training (--epochs) lets the encoder find the images."
    )


def _sentence(text: str) -> str:
    """Return a text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def _count(mean_of_replicas: float) -> str:
    """Return a mean number of things: 4, or 4.2."""
    return f"{round(mean_of_replicas, 1):g}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Return up to `most` names, and the number of the others."""
    listed = ", ".join(f"“{name}”" for name in names[:most])
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")


def _names(run: RunRecord, tasks: Sequence[int]) -> str:
    """Name up to four tasks."""
    return f"task{'s' if len(tasks) > 1 else ''} {_listed([run.task_name(task) for task in tasks], 4)}"
