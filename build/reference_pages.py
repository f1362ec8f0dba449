"""Pages that `make docs` makes: README as the first; settings, command, HTTP, metrics and errors from the code.

A hook of mkdocs. What a user may lean on is written down in tests/contract/surface.json, which a test holds against the
code; the settings' meanings stand in the docstrings of their dataclasses.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "ServerSettings": "Of the whole server",
    "Limits": "preprocess: what one request may ask for",
    "PreprocessSettings": "preprocess",
    "VisionSettings": "vision_encoder",
    "EngineConfig": "language_model",
}
ABOUT_SETTINGS = """\
`tessera serve --set stage.name=value`, or `TESSERA_STAGE_NAME` in the environment; those marked * are one for all
stages (`--set name=value`, `TESSERA_NAME`). `--show-settings` prints what is in force and who set it."""
OF_THE_SITE = r"(?!https?:|#|\w+\.(?:md|jpg|webp|svg)\b)"
OUTSIDE = re.compile(rf"\[([^\]]+)\]\({OF_THE_SITE}[^)]+\)")
"""A link to what is no part of the site: its words stay."""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)


def pages() -> dict[str, str]:
    """Path in the site -> markdown."""
    surface = json.loads((ROOT / "tests/contract/surface.json").read_text())

    def said(section: str, beginning: str) -> list[str]:
        return [line.removeprefix(beginning) for line in surface[section] if line.startswith(beginning)]

    options = (re.fullmatch(r"(tessera(?: \w+)?) (\S.*?) \[(.*?)\]: (.*)", line) for line in surface["command line"])
    command = ["# The command"]
    for name, rows in groupby(sorted(each.groups() for each in options if each), key=lambda each: each[0]):
        command += ["", f"## {name}", "", *table(["option", "takes", "meaning"], (row[1:] for row in rows))]
    families = (line.partition(" ") for line in surface["metrics"] if not line.startswith("gateway"))
    errors = (line.split(" -> ", 1) for line in surface["statuses"] if " -> exit code" in line)
    of_errors = table(["error", "the command's exit code, and the gateway's answer"], errors)
    http = table(["path", "methods"], (line.rpartition(" ")[::2] for line in said("http", "route ")))
    fields = table(["field", "type and default"], (line.split(": ", 1) for line in said("http", "body ")))
    of_server = table(["name", "meaning", "kind"], ((*rest.split(": ", 1), kind) for kind, _, rest in families))
    of_gateway = table(["name", "meaning"], (line.split(" ", 1) for line in said("metrics", "gateway # HELP ")))
    of_status = table(["status", "error"], (line.split(" -> ") for line in said("statuses", "client: status ")))
    return {
        "index.md": (ROOT / "README.md").read_text().replace("](docs/", "]("),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(),
        "reference/settings.md": "\n".join(["# Settings", "", ABOUT_SETTINGS, *settings()]),
        "reference/command.md": "\n".join(command),
        "reference/http.md": "\n".join(["# HTTP", "", *http, "", "## Fields of a request's body", "", *fields]),
        "reference/metrics.md": "\n".join(
            ["# Metrics", "", "## Of tritonserver", "", *of_server, "", "## Of the gateway", "", *of_gateway]
        ),
        "reference/errors.md": "\n".join(["# Errors", "", *of_errors, "", "## Statuses in the SDK", "", *of_status]),
    }


def settings() -> Iterator[str]:
    """A table for each dataclass of `SETTINGS`."""
    head = ["name", "default", "on a CPU", "on a GPU", "allowed", "meaning"]
    files = sorted((ROOT / "python_backends/tessera/settings").glob("*.py"))
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    named = {node.name: node for node in classes}
    # One setting of several stages is explained where it means most.
    meanings = [_meanings(ast.get_docstring(named[name]) or "") for name in SETTINGS]
    anywhere = {setting: text for each in reversed(meanings) for setting, text in each.items()}
    for (name, title), own in zip(SETTINGS.items(), meanings, strict=True):
        yield from ("", f"## {title}", "")
        yield from table(head, (_row(field, about, anywhere | own) for field, about in _settable(named[name])))


def table(head: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Of markdown, its first column set as code."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for first, *others in rows:
        cells = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in (f"`{first}`", *others))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _settable(node: ast.ClassDef) -> Iterator[tuple[str, dict[str, str]]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.value, ast.Call):
            call = each.value
            about = {word.arg: ast.unparse(word.value).strip("'") for word in call.keywords if word.arg}
            if ast.unparse(call.func) == "setting" and about.get("settable") != "False":
                yield ast.unparse(each.target), {"default": ast.unparse(call.args[0]).strip("'"), **about}


def _row(name: str, about: dict[str, str], meanings: dict[str, str]) -> list[str]:
    bounds = [f"{sign} {about[end]}" for end, sign in (("least", "≥"), ("most", "≤")) if end in about]
    star = " *" if "common" in about else ""
    values = (about.get(key, "") for key in ("default", "cpu", "cuda"))
    shown = about.get("name", name)
    meaning = meanings.get(name) or meanings.get(shown, "")
    return [shown + star, *values, about.get("choices", ", ".join(bounds)), meaning]


def _meanings(docstring: str) -> dict[str, str]:
    """Of "``name``: what it is. ``another``: ..." in a docstring."""
    parts = re.split(r"``(\w+)``: ", " ".join(docstring.split()))
    return dict(zip(parts[1::2], parts[2::2], strict=True))
