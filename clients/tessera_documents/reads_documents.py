"""Whether the model that is served reads documents: it is shown a page that anyone could read."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

SIZE = (850, 1100)
HEADING = "Report of the year"
LINES = (
    "The house was built in the spring, and the garden was laid out",
    "in the summer of the same year. Its walls are of stone, and the",
    "roof was made anew after the storm. Nothing else was changed, so",
    "that visitors still find the rooms as they have always been.",
)


def known_page() -> Image.Image:
    """A heading and two paragraphs, black on white (RGB)."""
    page = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(page)
    draw.text((100, 100), HEADING, "black", ImageFont.load_default(36))
    for number, line in enumerate((*LINES, "", *LINES)):
        draw.text((100, 200 + 32 * number), line, "black", ImageFont.load_default(22))
    return page
