"""The page in a browser, as the tests use it: by the ids and roles that people's tools see."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image

WAIT_SECONDS = 10
MOST_SCREENSHOT_BYTES = 150_000
SCREENSHOTS = Path(__file__).resolve().parents[2] / "docs" / "page"

# Text whose contrast to its ground is below WCAG AA: 4.5, or 3 for large text. Grounds behind are blended.
CONTRAST = """
const pixel = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
const canvas = pixel.getContext("2d", {willReadFrequently: true});
const blend = (...colours) => {
  canvas.clearRect(0, 0, 1, 1);
  for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const poor = [];
let seen = 0;
for (const element of document.querySelectorAll("body *")) {
  const holdsText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const text = holdsText || element.matches("input, textarea, select");
  const style = getComputedStyle(element);
  if (!text || !element.checkVisibility() || element.closest(".unseen, :disabled") || style.opacity === "0") continue;
  const grounds = [];
  for (let at = element; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
  const [a, b] = [light(blend(...grounds, style.color)), light(blend(...grounds))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
  seen += 1;
  if (contrast < (large ? 3 : 4.5)) poor.push(`${contrast.toFixed(2)}: ${element.outerHTML.slice(0, 80)}`);
}
return {poor, seen};
"""


class Browser:
    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str = "/", forget: bool = True) -> None:
        """The page again; ``forget``: without what it kept."""
        self.system_theme("light")
        self.driver.set_window_size(1240, 900)
        script = {"source": "localStorage.clear(); sessionStorage.clear()" if forget else ""}
        added = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
        self.driver.get(f"{self.url}{path}")
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        self.until(lambda: self("model").text or self.shows("problem"))

    def __call__(self, identifier: str) -> Any:
        return self.driver.find_element("id", identifier)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Any) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.02).until(lambda _: condition())

    def shows(self, identifier: str) -> bool:
        return self(identifier).is_displayed()

    def choose(self, picture: Path) -> None:
        self("file").send_keys(str(picture))
        self.until(lambda: self.all("#grid path"))

    def ask(self, question: str, labels: str = "") -> None:
        for identifier, text in (("question", question), ("labels", labels)):
            self(identifier).clear()
            self(identifier).send_keys(text)
        self("ask").click()

    def until_answered(self) -> str:
        self.until(lambda: self("answer").get_attribute("aria-busy") == "false" and not self.shows("stop"))
        return self("answer").text

    def keys(self, *keys: str, shift: bool = False) -> None:
        """To whatever has the focus."""
        from selenium.webdriver import ActionChains, Keys

        chain = ActionChains(self.driver, duration=0)
        if shift:
            chain.key_down(Keys.SHIFT).send_keys(*keys).key_up(Keys.SHIFT).perform()
        else:
            chain.send_keys(*keys).perform()

    def focused(self) -> str:
        return self.run("return document.activeElement.id || document.activeElement.value")

    def system_theme(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def servers(self) -> list[dict[str, str]]:
        """The status tab's cards, read at once, for they are renewed: their title, and each number by its name."""
        return self.run(
            "return [...document.querySelectorAll('.server')].map((card) => Object.fromEntries(["
            "['title', card.querySelector('h2').textContent], ...[...card.querySelectorAll('.number')].map((number) =>"
            " [number.querySelector('dt').textContent, number.querySelector('.value').textContent])]))"
        )

    def contrast(self) -> dict[str, Any]:
        return self.run(CONTRAST)

    def keep_screenshot(self, name: str) -> None:
        """docs/page/NAME.webp, of the whole page, where PAGE_SCREENSHOTS is set."""
        if not os.environ.get("PAGE_SCREENSHOTS"):
            return
        self.run("document.activeElement.blur()")
        self.driver.set_window_size(1140, 900)  # to which the picture fits itself
        height = "return outerHeight - innerHeight + document.querySelector('main').getBoundingClientRect().bottom"
        self.driver.set_window_size(1140, int(self.run(height)))
        shot = PIL.Image.open(BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        file = SCREENSHOTS / f"{name}.webp"
        few_colours(shot).convert("RGB").save(file, lossless=True, quality=100, method=6)
        assert file.stat().st_size < MOST_SCREENSHOT_BYTES

    def complaints(self) -> list[str]:
        """The console's errors, the Content-Security-Policy's among them; refusals that a test asks for are none."""
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] == "SEVERE" and "the server responded" not in e["message"]]


def few_colours(shot: PIL.Image.Image) -> PIL.Image.Image:
    """The screenshot with a palette: the page's own colours as they are, those of the picture in it about so."""
    counted: Any = shot.getcolors(shot.width * shot.height)
    own = [colour for _, colour in sorted(counted, reverse=True)[:96]]
    palette = PIL.Image.new("P", (1, 1))
    palette.putpalette([*(value for colour in own for value in colour), *shot.quantize(160).getpalette()[:480]])
    return shot.quantize(palette=palette, dither=PIL.Image.Dither.NONE)
