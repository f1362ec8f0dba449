"""Chooses and places what is in a room: hazards, what resembles them, furniture and decoration."""

from .dice import Dice
from .geometry import LARGE, Item, Room, smallest_extent, tile_scale
from .layout import Layout, Paint
from .palette import GAS_BOTTLES, THINGS, distance, jitter
from .parameters import HAZARDS, Look

HAZARD_CHANCE = {"gas bottle": 0.31, "blocked exit": 0.34}  # some of these find no room
OTHER_CHANCE = 0.27
CONTRAST = 60  # grey levels between a hazard and its surface, before the light takes up to 40% of it

STAINS = ((112, 84, 48), (86, 92, 66), (96, 88, 82))  # what damp leaves on a wall


class Furnisher:
    """Places the items of one scene; hazards first, so that furniture has to leave them in sight."""

    def __init__(self, dice: Dice, room: Room, look: Look) -> None:
        self.dice, self.room, self.look = dice, room, look
        self.layout = Layout(dice, room)
        self.least = smallest_extent(room.width, room.height)
        self.tiles = tile_scale(room.width, room.height)
        self.large = max(room.width, room.height) >= LARGE

    def extent(self) -> float:
        """The size of a small thing in pixels; the same distribution for hazards and what resembles them."""
        short = min(self.room.width, self.room.height)
        if self.large and self.dice.chance(0.6):
            return self.dice.uniform(self.least, max(48 / self.tiles, self.least * 1.3))
        most = max(short * (0.13 if self.large else 0.18), self.least * 1.8)
        return self.dice.log_uniform(self.least * (1.2 if self.large else 1.0), most)

    # hazards

    def hazards(self) -> None:
        wanted = [hazard for hazard in HAZARDS if self.dice.chance(HAZARD_CHANCE.get(hazard, OTHER_CHANCE))]
        if len(wanted) > 3:
            wanted = self.dice.shuffled(wanted)[:3]
        if "blocked exit" in wanted:
            self.blocked_exit()
        elif self.dice.chance(0.5):
            self.door()
        for hazard in wanted:
            if hazard != "blocked exit":
                for _ in range(self.dice.pick((1, 2, 3), (8, 2, 0.6))):
                    getattr(self, hazard.replace(" ", "_"))()

    def exposed_wire(self) -> None:
        e = self.extent()
        self.on_wall("exposed wire", e * self.dice.uniform(1.0, 1.4), e * self.dice.uniform(1.0, 1.3), e)

    def burnt_socket(self) -> None:
        e = self.extent()
        paint = ("white", (240, 238, 232))
        self.on_wall("burnt socket", e * 1.3, e * self.dice.uniform(1.4, 1.7), e, paint)

    def crack(self) -> None:
        e = self.extent()
        long = e * self.dice.uniform(1.2, 2.4)
        w, h = (e, long) if self.dice.chance(0.5) else (long, e)
        self.on_wall("crack", w, h, e, planes=("back", "left", "right", "ceiling"))

    def damp(self) -> None:
        e = self.extent()
        stain = self.dice.pick(STAINS)
        w = e * self.dice.uniform(1.1, 1.9)
        self.on_wall("damp", w, e * 1.05, e, ("", stain), planes=("back", "left", "right", "ceiling"))

    def gas_bottle(self) -> None:
        names = [
            name
            for name in GAS_BOTTLES
            if min(distance(THINGS[name], self.look.wall_rgb), distance(THINGS[name], self.look.floor_rgb)) >= CONTRAST
        ]
        name = self.dice.pick(names)
        e = self.extent()
        self.standing("gas bottle", e, e * self.dice.uniform(1.35, 2.0), e, name)

    def blocked_exit(self) -> None:
        door = self.door()
        if door is None:
            return
        x0, y0, x1, y1 = door.box
        high, wide = y1 - y0, x1 - x0
        k = self.room.scale
        self.layout.freed = True  # what stands in front of this door may cover it
        middle = (x0 + x1) / 2
        front = self.room.deep * self.dice.uniform(0.86, 0.97)
        choice = self.dice.pick(("boxes", "boxes", "chest", "sofa"))
        if choice == "boxes":
            tall = high * self.dice.uniform(0.42, 0.66)
            count = 2 + self.dice.integer(2)
            span = wide * self.dice.uniform(1.0, 1.3)
            for i in range(count):
                u = middle - span / 2 + span * (i + 0.5) / count
                h = tall * self.dice.uniform(0.75, 1.0)
                w = span / count * self.dice.uniform(0.97, 1.06)
                self.block("box", u, w, h, front, self.dice.uniform(0.3, 0.5))
        elif choice == "chest":
            w = wide * self.dice.uniform(0.95, 1.3)
            self.block("chest", middle, w, high * self.dice.uniform(0.4, 0.6), front, 0.4)
        else:
            w = max(wide * self.dice.uniform(1.5, 2.2), 1.4 * k)
            self.block("sofa", middle, w, high * self.dice.uniform(0.4, 0.48), front, 0.7)
        self.layout.freed = False
        if self.layout.covered_width(door) >= 0.7:
            self.layout.mark("blocked exit", door)
        else:
            self.layout.clear()

    def block(self, kind: str, u: float, w: float, h: float, front: float, depth: float) -> None:
        """Stands a thing in front of the door; w and h are pixels on the back wall."""
        k = self.room.deep / front
        v = self.room.project(0.0, 0.0, front)[1]
        depth = min(depth, (self.room.deep - front) * 0.95)
        self.layout.stand(kind, (u, v, w * k, h * k), depth, self.paint(kind))

    def door(self) -> Item | None:
        """A door in the back wall; nothing may stand in front of it, but for `blocked_exit`."""
        dice, room = self.dice, self.room
        least = 1.3 * self.least
        h = (room.bottom - room.top) * dice.uniform(0.68, 0.86)
        w = max(h * dice.uniform(0.4, 0.5), least)
        low, high = room.left + w * 0.6, room.right - w * 0.6
        if high <= low:
            return None
        name = dice.pick(("brown", "white", "grey", "green", "blue", "red"))
        for _ in range(8):
            u = dice.uniform(low, high)
            paint = name, jitter(dice, THINGS[name])
            if item := self.layout.hang("door", "back", (u, room.bottom - h / 2, w, h), paint, extent=w):
                return item
        return None

    # ordinary small things, many of them much like a hazard

    def lookalikes(self) -> None:
        dice = self.dice
        for _ in range(dice.pick((0, 1, 2, 3, 4, 5), (3, 3, 2, 1.5, 1.2, 1))):
            e = self.extent()
            name = dice.pick(("white", "black", "grey"), (8, 1, 1))
            self.on_wall("socket", e * dice.uniform(0.95, 1.1), e, e, (name, THINGS[name]))
        if dice.chance(0.4):
            e = self.extent()
            self.on_wall("smoke detector", e * dice.uniform(1.5, 2.2), e, e, planes=("ceiling", "ceiling", "back"))
        if dice.chance(0.4):
            e = self.extent()
            self.standing("fire extinguisher", e, e * dice.uniform(2.1, 2.8), e, "red")
        if dice.chance(0.35):
            e = self.extent()
            name = dice.pick(("grey", "blue", "green", "black", "orange"))
            self.standing("bin", e * 1.1, e * dice.uniform(1.1, 1.5), e, name)
        self.doubles()
        for kind, chance in (("cable", 0.35), ("cord", 0.25), ("switch", 0.25)):
            if dice.chance(chance):
                e = self.extent()
                if kind == "switch":
                    self.on_wall(kind, e * 0.8, e * 0.8, e)
                elif kind == "cord":
                    self.on_wall(kind, e * 0.6, e * dice.uniform(3, 5), e)
                else:
                    long = e * dice.uniform(3, 8)
                    w, h = (long, e * 0.4) if dice.chance(0.5) else (e * 0.4, long)
                    self.on_wall(kind, w, h, e)
        for _ in range(dice.pick((0, 1, 2, 3), (4, 3, 2, 1))):
            e = self.extent()
            self.on_wall("shadow", e * dice.uniform(1, 3), e * dice.uniform(1, 2), e)

    def doubles(self) -> None:
        """Harmless things that are told from a hazard only by their detail: each has a hazard's size and hue."""
        dice = self.dice
        for kind in ("ornament", "garland", "wall plate", "vent", "vase"):
            if not dice.chance(0.25):
                continue
            e = min(self.extent(), 2.0 * self.least)
            if kind == "vase":
                name = dice.pick(GAS_BOTTLES)
                self.standing(kind, e, e * dice.uniform(1.35, 2.0), e, name)
            elif kind == "garland":
                self.on_wall(kind, e * dice.uniform(1.6, 2.6), e, e)
            elif kind == "wall plate":
                self.on_wall(kind, e * 1.1, e * 1.1, e, ("", dice.pick(STAINS)))
            else:
                self.on_wall(kind, e * 1.1, e * 1.15, e)

    # furniture

    def furniture(self) -> None:
        dice = self.dice
        big = [
            ("sofa", 0.45, (1.6, 2.2), (0.75, 0.95), 0.85),
            ("bed", 0.35, (1.3, 1.9), (0.8, 1.1), 1.7),
            ("wardrobe", 0.4, (0.9, 1.6), (1.7, 2.15), 0.6),
            ("table", 0.45, (0.9, 1.6), (0.68, 0.8), 0.7),
            ("lamp", 0.4, (0.35, 0.5), (1.2, 1.7), 0.35),
            ("plant", 0.3, (0.4, 0.7), (0.6, 1.3), 0.4),
            ("chest", 0.2, (0.7, 1.2), (0.6, 1.0), 0.45),
            ("box", 0.35, (0.4, 0.6), (0.3, 0.5), 0.4),
            ("radiator", 0.25, (0.8, 1.3), (0.5, 0.6), 0.1),
        ]
        for kind, chance, wide, tall, depth in dice.shuffled(big):
            if dice.chance(chance):
                for _ in range(dice.pick((1, 2, 3), (6, 2, 1)) if kind in ("plant", "box") else 1):
                    self.furnish(kind, dice.uniform(*wide), dice.uniform(*tall), depth)
        for _ in range(dice.pick((0, 1, 2, 3, 4), (4, 2, 2, 1.5, 1))):
            self.furnish("chair", dice.uniform(0.42, 0.55), dice.uniform(0.85, 1.0), 0.45)

    def decoration(self) -> None:
        """Picture frames, windows and a rug."""
        dice, k = self.dice, self.room.scale
        for _ in range(dice.pick((0, 1, 2, 3), (4, 3, 1.5, 1))):
            h = k * dice.uniform(0.35, 0.75)
            self.on_wall(
                "picture frame", max(h * dice.uniform(0.7, 1.5), self.least), max(h, self.least), h, upper=True
            )
        for _ in range(dice.pick((0, 1, 2), (4, 4, 2))):
            h = k * dice.uniform(0.8, 1.3)
            self.on_wall("window", h * dice.uniform(0.7, 1.4), h, h, upper=True)
        if dice.chance(0.35):
            self.rug()

    def furnish(self, kind: str, wide: float, tall: float, depth: float) -> None:
        dice, room = self.dice, self.room
        near = max(room.floor_depth(room.height * 0.97), room.deep * 0.35)
        against = kind in ("sofa", "bed", "wardrobe", "chest", "radiator") or dice.chance(0.5)
        paint = self.paint(kind)
        for _ in range(8):
            z = room.deep - depth if against else dice.uniform(near, room.deep - depth)
            if z < near * 0.9:
                return
            k = room.focal / z
            left, right = room.project(0, 0, z)[0], room.project(room.wide, 0, z)[0]
            w, h = wide * k, tall * k
            low, high = max(left, 0) + w * 0.5, min(right, room.width) - w * 0.5
            if high <= low or w > 0.65 * room.width:
                return
            v = room.project(0, 0, z)[1]
            if self.layout.stand(kind, (dice.uniform(low, high), v, w, h), depth, paint):
                return

    def rug(self) -> None:
        dice, room = self.dice, self.room
        low, high = room.bottom, room.height
        h = (high - low) * dice.uniform(0.3, 0.55)
        w = room.width * dice.uniform(0.25, 0.5)
        v = dice.uniform(low + h * 0.55, high - h * 0.55)
        name = dice.pick([n for n in ("red", "blue", "green", "yellow", "purple", "white") if self.clear(n)])
        u = dice.uniform(w * 0.6, room.width - w * 0.6)
        self.layout.hang("rug", "floor", (u, v, w, h), (name, jitter(dice, THINGS[name])), extent=h)

    def clear(self, name: str) -> bool:
        """Whether a named colour stands out from the floor."""
        return distance(THINGS[name], self.look.floor_rgb) >= CONTRAST

    def paint(self, kind: str) -> Paint:
        """A colour that suits the kind, as (name, rgb)."""
        fit = {
            "sofa": ("red", "blue", "green", "grey", "black", "purple", "yellow"),
            "bed": ("red", "blue", "green", "purple", "yellow", "white"),
            "wardrobe": ("brown", "white", "black", "grey"),
            "chest": ("brown", "white", "grey"),
            "table": ("brown", "black", "white"),
            "chair": ("red", "blue", "green", "brown", "black", "yellow", "white"),
            "lamp": ("red", "blue", "green", "yellow", "white"),
            "radiator": ("white",),
            "box": ("brown",),
            "plant": ("green",),
        }
        name = self.dice.pick(fit[kind])
        rgb = (178, 134, 88) if kind == "box" else THINGS[name]
        return name, jitter(self.dice, rgb)

    # placing

    def standing(self, kind: str, w: float, h: float, e: float, name: str) -> None:
        """A small thing on the floor, anywhere."""
        dice, room = self.dice, self.room
        paint = name, jitter(dice, THINGS[name])
        for _ in range(9):
            v = dice.uniform(room.bottom + 1, min(room.height * 0.97, room.bottom + (room.height - room.bottom) * 0.9))
            z = room.floor_depth(v)
            low = max(room.project(0, 0, z)[0], 3) + w * 0.55
            high = min(room.project(room.wide, 0, z)[0], room.width - 3) - w * 0.55
            if high > low and self.layout.stand(kind, (dice.uniform(low, high), v, w, h), 0.0, paint, e):
                return

    def on_wall(
        self,
        kind: str,
        w: float,
        h: float,
        e: float,
        paint: Paint = ("", (235, 235, 232)),
        planes: tuple[str, ...] = ("back", "back", "left", "right"),
        upper: bool = False,
    ) -> None:
        """A flat thing on a wall or the ceiling, anywhere (`upper`: on the upper two thirds)."""
        name, rgb = paint
        for _ in range(9):
            plane = self.dice.pick(planes)
            spot = self.layout.spot(plane, w * 1.06, h * 1.06, upper)
            if spot and self.layout.hang(kind, plane, (*spot, w, h), (name, jitter(self.dice, rgb, 5)), e):
                return
