"""Where things may go: inside the picture, and never hiding what a label speaks of."""

from __future__ import annotations

from .dice import Dice
from .geometry import Box, Colour, Item, Room, Vector, bounds, on_plane

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
)
_MOST_COVERED = dict.fromkeys(_STRICT, 0.0) | {"door": 0.02, "wardrobe": 0.1, "shadow": 1.0, "rug": 0.35}
_UNLABELLED = ("shadow", "cable", "cord", "switch", "radiator", "box", "chest", "bin")


def area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


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

    def hang(
        self,
        kind: str,
        plane: str,
        u: float,
        v: float,
        w: float,
        h: float,
        colour: str,
        rgb: Colour,
        extent: float,
    ) -> Item | None:
        """Places a flat thing of about w x h pixels around pixel (u, v)."""
        return self._place(kind, plane, on_plane(self.room, plane, u, v, w, h), colour, rgb, extent)

    def stand(
        self,
        kind: str,
        u: float,
        v: float,
        w: float,
        h: float,
        depth: float,
        colour: str,
        rgb: Colour,
        *,
        strict: bool = False,
        extent: float = 0.0,
    ) -> Item | None:
        """Stands a thing on the floor: its front's foot is centred on pixel (u, v); `depth` in metres."""
        axes = on_plane(self.room, "stand", u, v, w, h, depth)
        return self._place(kind, "stand", axes, colour, rgb, extent or w)

    def mark(self, kind: str, at: Item) -> None:
        """Adds a label without a body: the thing `at` and what stands before it make it so."""
        self.items.append(Item(kind, "mark", at.origin, at.s, at.t, at.d, at.box, extent=at.extent))

    def _place(
        self,
        kind: str,
        plane: str,
        axes: tuple[Vector, Vector, Vector, Vector],
        colour: str,
        rgb: Colour,
        extent: float,
    ) -> Item | None:
        room = self.room
        whole = bounds(room, *axes)
        clipped = (
            max(whole[0], 0.0),
            max(whole[1], 0.0),
            min(whole[2], float(room.width)),
            min(whole[3], float(room.height)),
        )
        inside = area(clipped) / max(area(whole), 1e-9)
        if inside < (0.999 if kind in _STRICT or kind == "door" else 0.8):
            return None
        dice = self.dice
        item = Item(
            kind,
            plane,
            *axes,
            clipped,
            colour,
            rgb,
            dice.integer(4),
            extent,
            dice.integer(1 << 30),
        )
        return item if self._admit(item) else None

    def _admit(self, item: Item) -> bool:
        """Adds the item unless that hides too much of it or of another."""
        mine, covered = 0.0, {}
        size = area(item.box)
        for index, other in enumerate(self.items):
            if other.plane == "mark":
                continue
            shared = overlap(item.box, other.box)
            if not shared or "rug" in (item.kind, other.kind) and "stand" in (item.plane, other.plane):
                continue
            if self.freed and other.kind in ("door", "box"):
                continue
            if item.kind in _STRICT or other.kind in _STRICT:
                return False
            if item.plane != "stand" and other.plane != "stand":
                if "shadow" not in (item.kind, other.kind):
                    return False
                continue
            if item.order > other.order:
                covered[index] = self._covered.get(index, 0.0) + shared / area(other.box)
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
