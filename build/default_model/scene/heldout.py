"""The held-out set: fixed, never trained on, one question a picture."""

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache

from .dice import Dice
from .parameters import HAZARDS
from .questions import COLOURED, COUNTED, ORDINARY, Question, questions
from .sampler import sample

PICTURES = 4524
FIRST_SEED = 7_000_000

# (kind, class, answer); an answer of None is left open. Rounds of 18 slots, 12 of them a hazard's presence.
_Slot = tuple[str, str, "str | None"]


@dataclass(frozen=True)
class HeldoutItem:
    """One picture (`sample(scene_seed, "heldout")`) with one question."""

    index: int
    scene_seed: int
    question: str
    answer: str
    kind: str
    cls: str
    width: int
    height: int


def _slots(count: int) -> list[_Slot]:
    """What each picture is asked, in order, so that every stretch of the set is balanced."""
    dice = Dice("tessera heldout slots")
    slots: list[_Slot] = []
    turn = 0
    while len(slots) < count:
        counted = COUNTED[turn % len(COUNTED)]
        most = 6 if counted == "socket" else 3
        named = HAZARDS + ORDINARY
        others: list[_Slot] = [
            ("presence", ORDINARY[turn % len(ORDINARY)], "yes" if turn // len(ORDINARY) % 2 else "no"),
            ("hazard", "", (*HAZARDS, "none")[turn % 7]),
            ("count", counted, str(turn // len(COUNTED) % most)),
            ("colour", (*COLOURED, "floor", "wall")[turn % (len(COLOURED) + 2)], None),
            ("position", named[turn % len(named)], ("left", "middle", "right")[turn % 3]),
            ("description", "", None),
        ]
        hazards: list[_Slot] = [("presence", name, answer) for name in HAZARDS for answer in ("yes", "no")]
        slots += dice.shuffled(hazards + others)
        turn += 1
    return slots


@lru_cache(maxsize=2)
def heldout(n: int = PICTURES) -> list[HeldoutItem]:
    """The first n pictures of the set. Slots are filled from scenes in seed order; a scene serves once."""
    waiting: dict[_Slot, deque[tuple[int, int, int, Question]]] = defaultdict(deque)
    served: set[int] = set()
    items: list[HeldoutItem] = []
    seed = FIRST_SEED
    for slot in _slots(n)[:n]:
        queue = waiting[slot]
        while not queue or queue[0][0] in served:
            if queue:
                queue.popleft()
                continue
            scene = sample.__wrapped__(seed, "heldout")
            for question in questions(scene):
                for answer in (question.answer, None):
                    entry = (seed, scene.width, scene.height, question)
                    waiting[question.kind, question.cls, answer].append(entry)
            seed += 1
        scene_seed, width, height, question = queue.popleft()
        served.add(scene_seed)
        asked = (question.text, question.answer, question.kind, question.cls)
        items.append(HeldoutItem(len(items), scene_seed, *asked, width, height))
    return items
