"""The held-out set: fixed, never trained on, one question a picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .dice import Dice
from .questions import COLOURED, COUNTED, ORDINARY, Question, questions
from .sampler import HAZARDS, sample

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
    waiting: list[tuple[int, int, int, dict[tuple[str, str], Question]]] = []
    items: list[HeldoutItem] = []
    seed = FIRST_SEED
    for slot in _slots(n)[:n]:
        while True:
            match = next(((i, q) for i, w in enumerate(waiting) if (q := _match(w[3], slot))), None)
            if match:
                break
            scene = sample.__wrapped__(seed, "heldout")
            asked = {(q.kind, q.cls): q for q in questions(scene)}
            waiting.append((seed, scene.width, scene.height, asked))
            seed += 1
        index, question = match
        scene_seed, width, height, _ = waiting.pop(index)
        items.append(
            HeldoutItem(
                len(items),
                scene_seed,
                question.text,
                question.answer,
                question.kind,
                question.cls,
                width,
                height,
            )
        )
    return items


def _match(asked: dict[tuple[str, str], Question], slot: _Slot) -> Question | None:
    """The scene's question that fills the slot."""
    kind, cls, answer = slot
    question = asked.get((kind, cls))
    return question if question and answer in (None, question.answer) else None
