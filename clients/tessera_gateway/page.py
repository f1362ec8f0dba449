"""The page at ``/``: its files, and POST /tessera/tiles, which tells it how a picture is cut.

The size of an encoded picture as people see it.
"""

import json
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse
from PIL import Image, UnidentifiedImageError

from tessera_client import AsyncClient, InvalidRequest
from tessera_gateway.request import read

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Everything comes from here, nothing inline; a picture is shown from the browser's memory (blob:, data:).
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again, so that a page never meets scripts of another version
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def index() -> FileResponse:
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def asset(name: str) -> FileResponse:
    if name not in {path.name for path in FOLDER.iterdir()}:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> FileResponse:
    path = FOLDER / name
    return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=HEADERS)


@router.post("/tessera/tiles")
async def tiles(request: Request, tile_policy: str | None = None) -> dict[str, Any]:
    """How a picture, the body's bytes, is cut: its ``width`` and ``height``, upright, and what PicturePlan holds.

    ``tile_policy`` (query): a policy's name or a JSON object, as in a request. The rule is the server's own: it is
    asked.
    """
    picture = await read(request)
    client: AsyncClient = request.app.state.client
    (plan,) = await client.plan(picture, tile_policy=_policy(tile_policy))
    width, height = upright_size(picture)
    return {"width": width, "height": height, **asdict(plan)}


def _policy(text: str | None) -> Any:
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"tile_policy is not valid JSON: {error}") from None


ORIENTATION = 0x0112  # EXIF's tag; from 5 on the picture lies on its side


def upright_size(picture: bytes) -> tuple[int, int]:
    """(width, height) as people see the encoded picture, from its header alone. Raises InvalidRequest."""
    try:
        with Image.open(BytesIO(picture)) as header:
            (width, height), on_its_side = header.size, _orientation(header) >= 5
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"the picture's size cannot be read: {error}") from None
    return (height, width) if on_its_side else (width, height)


def _orientation(header: Image.Image) -> int:
    """1 to 8. A PNG's own getexif would decode it."""
    try:
        return int(Image.Image.getexif(header).get(ORIENTATION, 1))
    except Exception:  # damaged metadata, which raises all sorts, turns nothing; nor does it for the server
        return 1
