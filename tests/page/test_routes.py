"""The page's routes without a browser: files and their headers, tiles, sizes, status."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from gateway.gateway_doubles import gateway
from stand_in import TWO_TILES

from tessera_client import InvalidRequest, PicturePlan
from tessera_gateway.page import FOLDER, upright_size
from tessera_gateway.service import numbers


def files() -> Iterator[str]:
    yield "/"
    yield from sorted(f"/page/{file.name}" for file in FOLDER.iterdir())


@pytest.mark.parametrize("path", files())
def test_every_file_is_served_under_a_strict_policy(path: str) -> None:
    response = gateway()("GET", path)
    assert response.status_code == 200 and response.content == (FOLDER / (path[6:] or "index.html")).read_bytes()
    policy = dict(each.strip().split(" ", 1) for each in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["page.py", "..%2Fpage.py", "%2e%2e/page.py", "nothing.js", "", "."])
def test_nothing_else_is_served(name: str) -> None:
    assert gateway()("GET", f"/page/{name}").status_code == 404


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_page_asks_nobody_but_its_gateway(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text


def encoded(width: int, height: int, form: str = "JPEG", orientation: int = 1) -> bytes:
    file, exif = BytesIO(), PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.new("RGB", (width, height)).save(file, form, exif=exif)
    return file.getvalue()


def test_tiles_are_asked_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, door, picture = [], gateway(), encoded(40, 20)

    async def plan(image: bytes, *, tile_policy: Any) -> tuple[PicturePlan, ...]:
        asked.append((image, tile_policy))
        return (TWO_TILES,)

    monkeypatch.setattr(door.app.state.client, "plan", plan)
    answer = door("POST", "/tessera/tiles", content=picture)
    views = [{"width": 896, "height": 448, "rows": 1, "columns": 2}]
    cut = {"tokens": 512, "unit": "tiles", "policies": ["reference", "two-tile"], "views": views}
    assert answer.json() == {"width": 40, "height": 20, **cut}
    for policy in ("native", '{"max_tiles": 2}'):
        door("POST", "/tessera/tiles", content=picture, params={"tile_policy": policy})
    assert asked == [(picture, None), (picture, "native"), (picture, {"max_tiles": 2})]

    answer = door("POST", "/tessera/tiles", content=picture, params={"tile_policy": "{max"})
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]


def test_what_a_metrics_page_lacks_is_not_zero() -> None:
    empty = numbers(
        '# TYPE x counter\nx{a="b c",d="\\"}"} 1e3\nnot a sample\nno sample\ntessera_device_busy_fraction NaN\n'
    )
    assert empty["kv_blocks"] == {"used": None, "total": None}
    assert empty["queue"] == {} and empty["device_busy"] is empty["first_token_seconds"] is None


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_size_is_that_of_the_upright_picture(form: str) -> None:
    sizes = [upright_size(encoded(30, 20, form, orientation)) for orientation in range(1, 9)]
    assert sizes == [(30, 20)] * 4 + [(20, 30)] * 4


def test_damaged_metadata_turns_nothing() -> None:
    assert upright_size(encoded(30, 20, orientation=6).replace(b"MM\0*", b"MM\0?")) == (30, 20)


def test_no_pixel_is_decoded() -> None:
    without_pixels = encoded(30, 20, "PNG").partition(b"IDAT")[0] + b"IDAT"
    assert upright_size(without_pixels) == (30, 20)


@pytest.mark.parametrize("data", [b"", b"no picture", encoded(30, 20)[:20]])
def test_what_has_no_size_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="size cannot be read"):
        upright_size(data)
