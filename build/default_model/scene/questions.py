"""Questions whose answers follow from a scene's geometry."""

from dataclasses import dataclass

from .dice import Dice
from .geometry import Item
from .parameters import HAZARDS, Scene
from .phrasings import COLOUR, COUNT, DESCRIPTION, HAZARD, POSITION, PRESENCE, article, plural

KINDS = ("presence", "hazard", "count", "colour", "position", "description")
ORDINARY = (
    "sofa",
    "table",
    "chair",
    "bed",
    "wardrobe",
    "lamp",
    "door",
    "window",
    "picture frame",
    "plant",
    "rug",
    "socket",
    "smoke detector",
    "fire extinguisher",
)
COUNTED = ("socket", "chair", "window", "picture frame", "plant", "gas bottle")
COLOURED = ("sofa", "chair", "bed", "wardrobe", "door", "lamp", "rug", "gas bottle")
_FURNITURE = ("sofa", "bed", "wardrobe", "table", "chair", "lamp", "plant", "rug", "door", "window")
_NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Question:
    """A question and its only right answer. `cls` is the class asked about ("" for the whole picture)."""

    text: str
    answer: str
    kind: str
    cls: str


def boxes(scene: Scene) -> list[tuple[str, float, float, float, float]]:
    """(class, x0, y0, x1, y1) of all things but shadows, in pixels; a blocked exit has the box of its door."""
    return [(item.kind, *item.box) for item in scene.items if item.kind != "shadow"]


def questions(scene: Scene) -> list[Question]:
    """All questions with one clear answer, each in one phrasing that the scene's seed picks."""
    return [question for kind in KINDS for question in _of_kind(scene, kind)]


def ask(scene: Scene, kind: str, cls: str = "") -> Question | None:
    """The question of a kind about a class, or None where its answer would not be clear."""
    return next((q for q in _of_kind(scene, kind) if q.cls == cls), None)


def describe(scene: Scene) -> str:
    """What the picture shows in 30 to 80 tokens."""
    look = scene.look
    parts = [f"The picture shows a room with {look.wall} walls, a {look.floor} floor and a {look.ceiling} ceiling."]
    hazards = [_mention(scene, name, found) for name in HAZARDS if (found := _found(scene, name))]
    things = [_mention(scene, name, found) for name in _FURNITURE if (found := _found(scene, name))]
    things = things[: 3 if len(hazards) > 1 else 4]
    if things:
        verb = "are" if things[0].split()[0] in _NUMBERS[2:] else "is"
        parts.append(f"There {verb} {_listed(things)}.")
    else:
        parts.append("There is no furniture in the room.")
    extinguisher, detector = (
        f"{'a' if _found(scene, name) else 'no'} {name}" for name in ("fire extinguisher", "smoke detector")
    )
    parts.append(f"It has {extinguisher} and {detector}.")
    parts.append(f"Hazards: {_listed(hazards)}." if hazards else "No hazard is visible in the room.")
    return " ".join(parts)


def side(scene: Scene, item: Item) -> str | None:
    """left, middle or right, where that is clear."""
    x0, _, x1, _ = item.box
    if x1 - x0 > 0.45 * scene.width:
        return None
    middle = (x0 + x1) / 2 / scene.width
    for name, low, high in (("left", 0.0, 0.29), ("middle", 0.39, 0.61), ("right", 0.71, 1.0)):
        if low <= middle <= high:
            return name
    return None


def _of_kind(scene: Scene, kind: str) -> list[Question]:
    dice = Dice(f"questions/{scene.split}/{scene.seed}/{kind}")

    def make(wordings: tuple[str, ...], answer: str, cls: str = "") -> Question:
        text = dice.pick(wordings)
        if cls:
            text = text.format(a=article(cls), s=cls, p=plural(cls))
        return Question(text, answer, kind, cls)

    if kind == "presence":
        return [
            make(PRESENCE, "yes" if _found(scene, name) else "no", name)
            for name in HAZARDS + ORDINARY
            if not _unclear(scene, name)
        ]
    if kind == "hazard":
        present = [name for name in HAZARDS if _found(scene, name)]
        return [make(HAZARD, present[0] if present else "none")] if len(present) <= 1 else []
    if kind == "count":
        counts = [(name, len(_found(scene, name))) for name in COUNTED if not _unclear(scene, name)]
        return [make(COUNT, str(count), name) for name, count in counts if count <= 5]
    if kind == "colour":
        single = [(name, found[0].colour) for name in COLOURED if len(found := _found(scene, name)) == 1]
        surfaces = [("floor", scene.look.floor), ("wall", scene.look.wall)]
        return [make(COLOUR, colour, name) for name, colour in single + surfaces]
    if kind == "position":
        asked = []
        for name in HAZARDS + ORDINARY:
            found = _found(scene, name)
            where = side(scene, found[0]) if len(found) == 1 and not _unclear(scene, name) else None
            if where:
                asked.append(make(POSITION, where, name))
        return asked
    if kind == "description":
        return [make(DESCRIPTION, describe(scene))]
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def _found(scene: Scene, name: str) -> list[Item]:
    return [item for item in scene.items if item.kind == name]


def _unclear(scene: Scene, name: str) -> bool:
    """A burnt socket is a socket to some and not to others: then sockets are not asked about."""
    return name == "socket" and bool(_found(scene, "burnt socket"))


def _mention(scene: Scene, name: str, found: list[Item]) -> str:
    if len(found) > 1:
        return f"{_NUMBERS[min(len(found), 5)]} {name if name == 'damp' else plural(name)}"
    colour = found[0].colour if name in COLOURED else ""
    words = article(f"{colour} {name}".strip()) if name != "damp" else name
    where = side(scene, found[0])
    if where is None:
        return words
    return f"{words} in the middle" if where == "middle" else f"{words} on the {where}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
