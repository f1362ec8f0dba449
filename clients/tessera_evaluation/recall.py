"""How often the served model is right: a dataset through a running server, and the figures of its answers.

- For each class: balanced accuracy (mean of the share of right answers on yes and on no pictures), precision and
  recall of yes. ``recall.macro`` is the mean and ``recall.min_class`` the least balanced accuracy over classes,
  ``recall.precision`` and ``recall.yes`` are those of all classes' questions together.
- For each kind of question: the share of answers equal to the right one (case, spaces and a final stop aside), and
  for descriptions the overlap of words (F1) as well.
- For large pictures (longer side >= 1280): the same, for all kinds and for the classes.
- QPM: questions answered per minute of wall time, pictures ready on disk beforehand.

A question that ended in an error counts as answered wrong.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tessera_client.client import Client
from tessera_client.messages import Answer, Usage
from tessera_evaluation.datasets import Item
from tessera_wire.errors import TesseraClientError

LARGE = 1280


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item. ``text`` is None if it ended in ``error``."""

    item: Item
    text: str | None
    error: TesseraClientError | None = None
    seconds: float = 0.0
    usage: Usage | None = None

    @property
    def counts(self) -> bool:
        """Whether it counts towards the figures per class."""
        return self.item.kind == "presence" and self.item.scored

    @property
    def says(self) -> str:
        """``"yes"``, ``"no"`` or, for anything else, an empty string."""
        first = re.match(r"\W*(yes|no)\b", self.text or "", re.I)
        return first[1].lower() if first else ""

    @property
    def right(self) -> bool:
        if self.item.kind == "presence":
            return self.says != "" and self.says == normal(self.item.answer)
        return self.text is not None and normal(self.text) == normal(self.item.answer)


def normal(text: str) -> str:
    """Lower case, single spaces, no full stop at the end."""
    return " ".join(text.lower().split()).rstrip(". ")


def run(
    client: Client,
    items: Sequence[Item],
    *,
    picture: Callable[[Item], Any] = attrgetter("picture"),
    concurrency: int = 16,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> tuple[list[Outcome], float]:
    """Asks every item's question; returns the outcomes in order and the seconds it all took. ``picture``: what is sent
    of an item."""
    started = time.perf_counter()
    answers = client.ask_many(
        ((picture(item), item.question) for item in items),
        concurrency=concurrency,
        progress=progress,
        errors="return",
        **options,
    )
    outcomes = [
        Outcome(item, answer.text, seconds=answer.seconds, usage=answer.usage)
        if isinstance(answer, Answer)
        else Outcome(item, None, answer)
        for item, answer in zip(items, answers, strict=True)
    ]
    return outcomes, time.perf_counter() - started


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """All figures of a run as plain data; shares between 0 and 1, None where nothing was asked."""
    scored = [o for o in outcomes if o.counts]
    classes = {
        name: presence([o for o in scored if o.item.cls == name]) for name in sorted({o.item.cls for o in scored})
    }
    balanced = [c["balanced_accuracy"] for c in classes.values() if c["balanced_accuracy"] is not None]
    together = presence(scored)
    large = [o for o in outcomes if max(o.item.width, o.item.height) >= LARGE]
    kinds = {}
    for kind in sorted({o.item.kind for o in outcomes}):
        of_kind = [o for o in outcomes if o.item.kind == kind]
        kinds[kind] = {"questions": len(of_kind), "accuracy": _share(o.right for o in of_kind)}
        if kind == "description":
            kinds[kind]["word_f1"] = _mean([word_f1(o.text or "", o.item.answer) for o in of_kind])
    answered = sorted(o.seconds for o in outcomes if o.text is not None)
    return {
        "recall.macro": _mean(balanced),
        "recall.min_class": min(balanced, default=None),
        "recall.precision": together["precision"],
        "recall.yes": together["recall"],
        "classes": classes,
        "kinds": kinds,
        "large": {
            "questions": len(large),
            "accuracy": _share(o.right for o in large),
            "presence": presence([o for o in large if o.counts]),
        },
        "questions": len(outcomes),
        "errors": sum(o.text is None for o in outcomes),
        "seconds": round(seconds, 3),
        "qpm": round(60 * len(answered) / seconds, 1) if seconds > 0 else None,
        "latency_ms": {"p50": _quantile(answered, 0.5), "p99": _quantile(answered, 0.99)},
    }


def share_right(figures: Mapping[str, Any]) -> float:
    """The one figure of a run: ``recall.macro``, or where it has no such classes the share of right answers."""
    if figures["recall.macro"] is not None:
        return figures["recall.macro"]
    return sum(kind["questions"] * kind["accuracy"] for kind in figures["kinds"].values()) / figures["questions"]


def presence(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and shares of yes/no questions. An answer that is neither is wrong, and no yes."""
    positives = [o for o in outcomes if normal(o.item.answer) == "yes"]
    negatives = [o for o in outcomes if normal(o.item.answer) == "no"]
    found = sum(o.says == "yes" for o in positives)
    false_alarms = sum(o.says == "yes" for o in negatives)
    recall, rejection = _share(o.right for o in positives), _share(o.right for o in negatives)
    return {
        "yes": len(positives),
        "no": len(negatives),
        "balanced_accuracy": None if recall is None or rejection is None else (recall + rejection) / 2,
        "precision": found / (found + false_alarms) if found + false_alarms else None,
        "recall": recall,
    }


def word_f1(text: str, wanted: str) -> float:
    """Harmonic mean of the shares of words in common."""
    a, b = Counter(re.findall(r"\w+", text.lower())), Counter(re.findall(r"\w+", wanted.lower()))
    common = sum((a & b).values())
    return 2 * common / (a.total() + b.total()) if common else 0.0


def print_table(result: dict[str, Any], console: Any) -> None:
    """The figures as tables on a rich console."""
    from rich.table import Table

    classes = Table("class", "yes", "no", "balanced acc.", "precision", "recall", title="Hazards")
    for name, row in result["classes"].items():
        shares = map(_percent, (row["balanced_accuracy"], row["precision"], row["recall"]))
        classes.add_row(name, str(row["yes"]), str(row["no"]), *shares)
    console.print(classes)
    kinds = Table("kind", "questions", "accuracy", title="Kinds of question")
    for name, row in result["kinds"].items():
        kinds.add_row(name, str(row["questions"]), _percent(row["accuracy"]))
    large = result["large"]
    kinds.add_row(f"large pictures, longer side >= {LARGE}", str(large["questions"]), _percent(large["accuracy"]))
    console.print(kinds)
    for stage, words in result.get("weights", {}).items():
        console.print(f"{stage}: {words}")
    console.print(
        f"macro {_percent(result['recall.macro'])}, least class {_percent(result['recall.min_class'])}, "
        f"precision of yes {_percent(result['recall.precision'])}, recall of yes {_percent(result['recall.yes'])}; "
        f"large {_percent(large['presence']['balanced_accuracy'])}; "
        f"{result['questions']} questions, {result['errors']} errors, {result['qpm']} QPM"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _share(values: Iterable[bool]) -> float | None:
    return _mean([float(value) for value in values])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2) if ordered else None
