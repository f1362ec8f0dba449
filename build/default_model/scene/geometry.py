"""The room as a box seen in one-point perspective, and the items in it.

Room coordinates are metres: x to the right from the left wall, y up from the floor, z away from the camera.
Everything a label says comes from here, never from pixels, so labels are equal for every OpenCV version.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

Vector = tuple[float, float, float]
Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]

TILE = 448
SMALLEST_ON_TILES = 34.0  # pixels of the 12-tile picture: the least extent of anything a label rests on
SMALLEST_IN_SOURCE = 16.0  # pixels of the picture itself
LARGE = 1280  # a picture is large from this longer side on


@lru_cache(maxsize=4096)
def tile_grid(width: int, height: int, max_tiles: int = 12, min_tiles: int = 1) -> tuple[int, int]:
    """Columns and rows that InternVL's rule picks: the nearest aspect ratio; of equals, the last that the
    picture's area half fills."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    best, least = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        if difference < least:
            best, least = (columns, rows), difference
        elif difference == least and width * height > 0.5 * TILE * TILE * columns * rows:
            best = (columns, rows)
    return best


def tile_scale(width: int, height: int, max_tiles: int = 12) -> float:
    """Pixels of the tiled picture for one pixel of the source, in the direction that keeps fewer."""
    columns, rows = tile_grid(width, height, max_tiles)
    return min(TILE * columns / width, TILE * rows / height)


def smallest_extent(width: int, height: int) -> float:
    """The least extent, in source pixels, of anything that a label rests on."""
    return max(SMALLEST_ON_TILES / tile_scale(width, height), SMALLEST_IN_SOURCE)


@dataclass(frozen=True)
class Room:
    """Camera (pixels) and box (metres). `left`, `top`, `right`, `bottom` bound the back wall in pixels."""

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    u0: float
    v0: float
    focal: float
    tall: float = 2.6

    @cached_property
    def scale(self) -> float:
        """Pixels a metre on the back wall."""
        return (self.bottom - self.top) / self.tall

    @cached_property
    def deep(self) -> float:
        return self.focal / self.scale

    @cached_property
    def wide(self) -> float:
        return (self.right - self.left) / self.scale

    @cached_property
    def camera(self) -> tuple[float, float]:
        """The camera's x and y."""
        return (self.u0 - self.left) / self.scale, (self.bottom - self.v0) / self.scale

    def project(self, x: float, y: float, z: float) -> tuple[float, float]:
        """The pixel (u, v) that shows a point; z > 0."""
        cx, cy = self.camera
        k = self.focal / z
        return self.u0 + (x - cx) * k, self.v0 - (y - cy) * k

    def wall_depth(self, side: str, u: float) -> float:
        """The z at which pixel column `u` meets the left or right wall."""
        cx = self.camera[0]
        return self.focal * ((0.0 if side == "left" else self.wide) - cx) / (u - self.u0)

    def ceiling_depth(self, v: float) -> float:
        return self.focal * (self.tall - self.camera[1]) / (self.v0 - v)

    def floor_depth(self, v: float) -> float:
        return self.focal * self.camera[1] / (v - self.v0)


@dataclass(frozen=True)
class Item:
    """A thing in the room: a parallelepiped origin + s*S + t*T + d*D with s, t, d in 0..1.

    S runs right in the picture, T down, D away from the camera (zero for flat things on a wall).
    """

    kind: str
    plane: str  # back, left, right, ceiling, floor, stand
    origin: Vector
    s: Vector
    t: Vector
    d: Vector
    box: Box  # pixels, clipped to the picture
    colour: str = ""
    rgb: Colour = (128, 128, 128)
    variant: int = 0
    extent: float = 0.0  # the size, in source pixels, that decides whether it can be recognised
    seed: int = 0

    @property
    def depth(self) -> float:
        return self.origin[2]

    @property
    def order(self) -> tuple[int, float]:
        """Painting order: flat things first, then standing ones from far to near."""
        return (1 if self.plane == "stand" else 0, -self.origin[2])

    def point(self, s: float, t: float, d: float = 0.0) -> Vector:
        o, a, b, c = self.origin, self.s, self.t, self.d
        return (
            o[0] + s * a[0] + t * b[0] + d * c[0],
            o[1] + s * a[1] + t * b[1] + d * c[1],
            o[2] + s * a[2] + t * b[2] + d * c[2],
        )


def bounds(room: Room, origin: Vector, s: Vector, t: Vector, d: Vector) -> Box:
    """The pixel box around a parallelepiped, not clipped."""
    (cx, cy), focal = room.camera, room.focal
    x, y, z = origin[0] - cx, origin[1] - cy, origin[2]
    if d[2]:  # a standing box: S, T and D run along x, y and z
        near, far = focal / max(z, 1e-3), focal / max(z + d[2], 1e-3)
        us = (x * near, (x + s[0]) * near, x * far, (x + s[0]) * far)
        vs = (y * near, (y + t[1]) * near, y * far, (y + t[1]) * far)
    else:
        across, down = focal / max(z + s[2], 1e-3), focal / max(z + t[2], 1e-3)
        here, both = focal / max(z, 1e-3), focal / max(z + s[2] + t[2], 1e-3)
        us = (x * here, (x + s[0]) * across, (x + t[0]) * down, (x + s[0] + t[0]) * both)
        vs = (y * here, (y + s[1]) * across, (y + t[1]) * down, (y + s[1] + t[1]) * both)
    return room.u0 + min(us), room.v0 - max(vs), room.u0 + max(us), room.v0 - min(vs)


def on_plane(
    room: Room, plane: str, u: float, v: float, w: float, h: float, depth: float = 0.0
) -> tuple[Vector, Vector, Vector, Vector]:
    """Origin and axes of a thing that covers about w x h pixels around pixel (u, v) of a plane.

    For `stand`, v is the floor contact and h the height above it; `depth` is in metres.
    """
    cx, cy = room.camera
    if plane == "back":
        k = room.scale
        origin = (cx + (u - w / 2 - room.u0) / k, cy - (v - h / 2 - room.v0) / k, room.deep)
        return origin, (w / k, 0.0, 0.0), (0.0, -h / k, 0.0), (0.0, 0.0, 0.0)
    if plane in ("left", "right"):
        start, end, mid = (room.wall_depth(plane, x) for x in (u - w / 2, u + w / 2, u))
        top = cy - (v - h / 2 - room.v0) * mid / room.focal
        x = 0.0 if plane == "left" else room.wide
        return (x, top, start), (0.0, 0.0, end - start), (0.0, -h * mid / room.focal, 0.0), (0.0, 0.0, 0.0)
    if plane in ("ceiling", "floor"):
        depth_at = room.ceiling_depth if plane == "ceiling" else room.floor_depth
        start, end, mid = depth_at(v - h / 2), depth_at(v + h / 2), depth_at(v)
        y = room.tall if plane == "ceiling" else 0.0
        x = cx + (u - w / 2 - room.u0) * mid / room.focal
        return (x, y, start), (w * mid / room.focal, 0.0, 0.0), (0.0, 0.0, end - start), (0.0, 0.0, 0.0)
    z = room.floor_depth(v)
    k = room.focal / z
    x = cx + (u - w / 2 - room.u0) / k
    return ((x, h / k, z), (w / k, 0.0, 0.0), (0.0, -h / k, 0.0), (0.0, 0.0, max(min(depth, room.deep - z), 0.0)))
