"""Draws the parameters of a scene from a seed: the room, what stands and hangs in it, light and camera.

No pixel is made here. Whatever a label rests on is placed so that it can be seen: it lies inside the picture, is
large enough, differs from its surface in colour, and is not hidden by nearer things.
"""

from functools import lru_cache

from .dice import Dice
from .furnisher import Furnisher
from .geometry import LARGE, Room, smallest_extent
from .palette import CEILINGS, FLOORS, WALLS, jitter
from .parameters import Camera, Look, Scene

_ASPECTS = ((4, 3), (3, 2), (16, 9), (3, 4), (2, 3), (1, 1))
_ASPECT_WEIGHTS = (0.44, 0.12, 0.10, 0.18, 0.06, 0.10)
_COMMON = {False: (320, 480, 640, 800, 960, 1024), True: (1280, 1440, 1600, 1920)}
_WALL_PATTERNS = ("plain", "plaster", "stripes", "dots", "damask", "bricks", "concrete")
_FLOOR_PATTERNS = ("planks", "tiles", "carpet", "concrete", "plain")


@lru_cache(maxsize=256)
def sample(seed: int, split: str = "train") -> Scene:
    """The scene of a seed. `split` is "train" or "heldout"; their random streams never meet."""
    if split not in ("train", "heldout"):
        raise ValueError(f'split must be "train" or "heldout", got {split!r}')
    dice = Dice(f"tessera scene/{split}/{seed}")
    room = _room(dice, *_size(dice))
    look = _look(dice)
    furnisher = Furnisher(dice, room, look)
    furnisher.hazards()
    furnisher.furniture()
    furnisher.lookalikes()
    furnisher.decoration()
    camera = Camera(
        light=(dice.uniform(-1, 1), dice.uniform(-1, 1), dice.uniform(0.0, 0.3)),
        warmth=dice.uniform(-0.06, 0.08),
        blur=dice.uniform(0.0, 0.04) * smallest_extent(room.width, room.height),
        noise=dice.uniform(0.5, 7.0),
        quality=60 + dice.integer(36),
        seed=dice.integer(1 << 30),
    )
    return Scene(seed, split, room, look, tuple(furnisher.layout.items), camera)


def _size(dice: Dice) -> tuple[int, int]:
    a, b = dice.pick(_ASPECTS, _ASPECT_WEIGHTS)
    large = dice.chance(0.4)
    if dice.chance(0.5):
        longer = dice.pick(_COMMON[large])
    else:  # multiples of 48 keep every aspect ratio (nearly) exact
        longer = 48 * (27 + dice.integer(14)) if large else 48 * (7 + dice.integer(19))
    if a == b:
        longer = min(longer, 1440)
    shorter = max(round(longer * min(a, b) / max(a, b)), 240)
    longer = max(longer, round(shorter * max(a, b) / min(a, b)))
    return (longer, shorter) if a >= b else (shorter, longer)


def _room(dice: Dice, width: int, height: int) -> Room:
    large = max(width, height) >= LARGE
    h = height * dice.uniform(0.36 if large else 0.46, 0.70)
    w = width * dice.uniform(0.5, 0.86)
    x = width * (0.5 + dice.uniform(-0.1, 0.1))
    left, right = max(x - w / 2, width * 0.02), min(x + w / 2, width * 0.98)
    bottom = min(height * (0.46 + dice.uniform(-0.06, 0.08)) + h / 2, height * 0.84)
    top = max(bottom - h, height * 0.06)
    u0 = left + (right - left) * dice.uniform(0.3, 0.7)
    v0 = top + (bottom - top) * dice.uniform(0.3, 0.6)
    return Room(width, height, left, top, right, bottom, u0, v0, max(width, height) * dice.uniform(0.8, 1.1))


def _look(dice: Dice) -> Look:
    wall, floor, ceiling = dice.pick(tuple(WALLS)), dice.pick(tuple(FLOORS)), dice.pick(tuple(CEILINGS), (6, 2, 1))
    return Look(
        wall,
        floor,
        ceiling,
        jitter(dice, WALLS[wall], 7),
        jitter(dice, FLOORS[floor], 7),
        jitter(dice, CEILINGS[ceiling], 5),
        dice.pick(_WALL_PATTERNS, (4, 3, 2, 2, 2, 1, 2)),
        dice.pick(_FLOOR_PATTERNS, (4, 3, 2, 1, 1)),
        dice.integer(8),
        dice.chance(0.7),
    )
