"""Where things may go: inside the picture, and never hiding what a label speaks of."""

from .dice import Dice
from .geometry import Box, Colour, Item, Room, Vector, bounds, on_plane

Paint = tuple[str, Colour]
"""The name of a colour, which labels have, and the colour itself."""

# The part of a thing's box that nearer things may cover; 0.25 for all that are not named.
_STRICT = (
    "exposed wire",
    "crack",
    "damp",
    "gas bottle",
    "burnt socket",
    "socket",
    "smoke detector",
    "fire extinguisher",
    "ornament",
    "garland",
    "wall plate",
    "vent",
    "vase",
)
_WHOLE = frozenset((*_STRICT, "door"))  # wholly inside the picture
_MOST_COVERED = dict.fromkeys(_STRICT, 0.0) | {"door": 0.02, "wardrobe": 0.1, "shadow": 1.0, "rug": 0.35}


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    tall = min(a[3], b[3]) - max(a[1], b[1])
    return wide * tall if wide > 0 and tall > 0 else 0.0


class Layout:
    """The items placed so far. `stand` and `hang` return None where an item would not be seen or would hide
    another."""

    def __init__(self, dice: Dice, room: Room) -> None:
        self.dice, self.room = dice, room
        self.items: list[Item] = []
        self.freed = False  # True: standing things may cover doors
        self._covered: dict[int, float] = {}

    def spot(self, plane: str, w: float, h: float, upper: bool) -> tuple[float, float] | None:
        """A random pixel of a plane around which w x h pixels of it are in the picture."""
        room, dice = self.room, self.dice
        if plane == "back":
            u = (max(room.left, 2) + w / 2, min(room.right, room.width - 2) - w / 2)
            v = (max(room.top, 2) + h / 2, min(room.bottom, room.height - 2) - h / 2)
        elif plane == "ceiling":
            v = (2 + h / 2, room.top - h / 2)
            if v[1] <= v[0]:
                return None
            y = dice.uniform(*v)
            z = room.ceiling_depth(y + h / 2)
            left, right = room.project(0, room.tall, z)[0], room.project(room.wide, room.tall, z)[0]
            u = (max(left, 2) + w / 2, min(right, room.width - 2) - w / 2)
            v = (y, y + 1e-6)
        else:
            u = (2 + w / 2, room.left - w / 2) if plane == "left" else (room.right + w / 2, room.width - 2 - w / 2)
            if u[1] <= u[0]:
                return None
            x = dice.uniform(*u)
            far = room.wall_depth(plane, x + w / 2 if plane == "left" else x - w / 2)
            top, bottom = room.project(0, room.tall, far)[1], room.project(0, 0, far)[1]
            u = (x, x + 1e-6)
            v = (max(top, 2) + h / 2 * 1.1, min(bottom, room.height - 2) - h / 2 * 1.1)
        if u[1] <= u[0] or v[1] <= v[0]:
            return None
        if upper:
            v = (v[0], v[0] + (v[1] - v[0]) * 0.55)
        return dice.uniform(*u), dice.uniform(*v)

    def hang(self, kind: str, plane: str, around: Box, paint: Paint, extent: float) -> Item | None:
        """Places a flat thing; ``around``: its middle's pixel (u, v), and its width and height in pixels, about."""
        return self._place(kind, plane, on_plane(self.room, plane, *around), paint, extent)

    def stand(self, kind: str, around: Box, depth: float, paint: Paint, extent: float = 0.0) -> Item | None:
        """Stands a thing on the floor; ``around``: the pixel (u, v) of its front's foot, and its width and height in
        pixels; `depth` in metres."""
        axes = on_plane(self.room, "stand", *around, depth)
        return self._place(kind, "stand", axes, paint, extent or around[2])

    def mark(self, kind: str, at: Item) -> None:
        """Adds a label without a body: the thing `at` and what stands before it make it so."""
        self.items.append(Item(kind, "mark", at.origin, at.s, at.t, at.d, at.box, extent=at.extent))

    def covered_width(self, door: Item) -> float:
        """The part of a door's width that things stand in front of."""
        x0, _, x1, _ = door.box
        spans = sorted((i.box[0], i.box[2]) for i in self.items if i.plane == "stand" and overlap(i.box, door.box))
        reached, covered = x0, 0.0
        for start, end in spans:
            start, end = max(start, reached), min(end, x1)
            covered += max(end - start, 0.0)
            reached = max(reached, end)
        return covered / (x1 - x0)

    def clear(self) -> None:
        """Removes everything."""
        self.items.clear()
        self._covered.clear()

    def _place(
        self, kind: str, plane: str, axes: tuple[Vector, Vector, Vector, Vector], paint: Paint, extent: float
    ) -> Item | None:
        width, height = float(self.room.width), float(self.room.height)
        x0, y0, x1, y1 = bounds(self.room, *axes)
        box = (x0 if x0 > 0 else 0.0, y0 if y0 > 0 else 0.0, min(x1, width), min(y1, height))
        whole = kind in _WHOLE
        if overlap(box, box) < (0.999 if whole else 0.8) * (x1 - x0) * (y1 - y0):
            return None
        dice = self.dice
        item = Item(kind, plane, *axes, box, *paint, dice.integer(4), extent, dice.integer(1 << 30))
        return item if self._admit(item) else None

    def _admit(self, item: Item) -> bool:
        """Adds the item unless that hides too much of it or of another."""
        mine, covered = 0.0, {}
        left, top, right, bottom = item.box
        size = (right - left) * (bottom - top)
        for index, other in enumerate(self.items):
            x0, y0, x1, y1 = other.box
            if x0 >= right or x1 <= left or y0 >= bottom or y1 <= top or other.plane == "mark":
                continue
            shared = overlap(item.box, other.box)
            if self.freed and other.kind in ("door", "box"):
                continue
            if item.kind in _STRICT or other.kind in _STRICT:
                return False
            if item.plane != "stand" and other.plane != "stand":
                if "shadow" not in (item.kind, other.kind):
                    return False
                continue
            if item.order > other.order:
                covered[index] = self._covered.get(index, 0.0) + shared / overlap(other.box, other.box)
                if covered[index] > _MOST_COVERED.get(other.kind, 0.25):
                    return False
            else:
                mine += shared / size
                if mine > _MOST_COVERED.get(item.kind, 0.25):
                    return False
        self._covered.update(covered)
        self._covered[len(self.items)] = mine
        self.items.append(item)
        return True
