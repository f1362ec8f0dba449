"""Questions with known answers: this project's held-out set, or a labelled folder of the user's own.

A dataset is a list of :class:`Item`; whatever makes one can be measured by :mod:`tessera_evaluation.recall`.
"""

import csv
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera_wire.command_line import missing
from tessera_wire.errors import InvalidRequest

SCENE_FOLDER = Path("build", "default_model")


@dataclass(frozen=True, slots=True)
class Item:
    """One picture, one question, one right answer.

    kind: ``presence`` for a yes/no question about ``cls``, else any name; accuracy is given per kind.
    scored: whether a presence question counts towards the figures per class.
    width, height: pixels, 0 if unknown.
    """

    picture: Path
    question: str
    answer: str
    kind: str
    cls: str
    width: int = 0
    height: int = 0
    scored: bool = True


def heldout_items(
    limit: int | None,
    folder: Path,
    *,
    root: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Item]:
    """The first ``limit`` items of the held-out set (all if None), their pictures rendered into ``folder``.

    Each stretch of the set is even over classes and answers. Rendering runs in low-priority processes, one for
    each core, and is complete when this returns, so that it takes nothing from a server being measured.
    Pictures that are in the folder already, drawn by the same renderer, are kept.

    Raises InvalidRequest where the project's repository is not to be found.
    """
    scene_folder = str(find_scene_folder(root))
    sys.path.insert(0, scene_folder)
    try:
        import scene

        heldout = scene.heldout() if limit is None else scene.heldout(limit)
        folder = folder / f"heldout-{scene.fingerprint()}"
        folder.mkdir(parents=True, exist_ok=True)
        shared = ("question", "answer", "kind", "cls", "width", "height")
        items = [
            Item(
                picture=folder / f"{each.scene_seed}.jpg",
                scored=each.cls in scene.HAZARDS,
                **{name: getattr(each, name) for name in shared},
            )
            for each in heldout
        ]
        pictures = ((each.scene_seed, item.picture) for each, item in zip(heldout, items, strict=True))
        unrendered = [(seed, picture) for seed, picture in pictures if not picture.exists()]
        for done, _ in enumerate(scene.draw(unrendered, "heldout"), 1):
            if progress is not None:
                progress(done, len(unrendered))
        return items
    except ImportError as error:
        raise InvalidRequest(
            f"the renderer in {SCENE_FOLDER} cannot be imported: {error}", "pip install numpy opencv-python-headless"
        ) from error
    finally:
        sys.path.remove(scene_folder)


def find_scene_folder(root: Path | None = None) -> Path:
    """The folder that holds the package ``scene``: in ``root``, the working folder or above it, or this checkout."""
    here = Path(__file__).resolve()
    candidates = [root] if root else [Path.cwd(), *Path.cwd().parents, *here.parents]
    for candidate in candidates:
        if (candidate / SCENE_FOLDER / "scene" / "__init__.py").is_file():
            return candidate / SCENE_FOLDER
    raise InvalidRequest(
        f"the held-out set is rendered by {SCENE_FOLDER}/scene, which is not here",
        "run inside a checkout of the Tessera repository, or measure your own pictures with --folder",
    )


def folder_items(folder: Path, limit: int | None = None, *, answers: bool = True) -> list[Item]:
    """The items of a labelled folder: ``labels.csv`` with a header and the columns file, question, answer and,
    optionally, class and kind. Without ``answers`` the right answers may be missing: those are then empty.

    Questions answered by yes or no are presence questions unless ``kind`` says otherwise. With ``limit`` the items
    are picked evenly over classes and answers. Raises InvalidRequest that names the line at fault.
    """
    if not folder.exists():
        raise InvalidRequest(missing(folder))
    table = folder / "labels.csv"
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            lacking = {"file", "question", *(["answer"] if answers else [])} - set(reader.fieldnames or ())
            if lacking:
                raise InvalidRequest(
                    f"{table} lacks the column {' and '.join(sorted(lacking))}", "file,question,answer[,class][,kind]"
                )
            items = [_labelled(folder, row, f"{table}:{reader.line_num}", answers) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"cannot read {table}: {error}", "file,question,answer[,class][,kind]") from error
    if not items:
        raise InvalidRequest(f"{table} has no rows")
    return evenly(items, limit)


def _labelled(folder: Path, row: dict[str, str | None], where: str, answers: bool) -> Item:
    name, question, answer = row["file"], row["question"], row.get("answer") or ""
    if not name or not question or (answers and not answer):
        raise InvalidRequest(f"{where}: file, question{' and answer' if answers else ''} must not be empty")
    picture = folder / name
    if not picture.is_file():
        raise InvalidRequest(f"{where}: no such picture: {picture}")
    yes_no = answer.strip().lower() in ("yes", "no")
    kind = row.get("kind") or ("presence" if yes_no else "other")
    width, height = picture_size(picture)
    return Item(picture, question, answer, kind, row.get("class") or "all", width, height)


def evenly(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most ``limit`` items, taken in turn from each (kind, class, answer of a presence question), in order."""
    if limit is None or limit >= len(items):
        return list(items)
    groups: dict[tuple[str, str, str], deque[int]] = defaultdict(deque)
    for index, item in enumerate(items):
        groups[item.kind, item.cls, item.answer if item.kind == "presence" else ""].append(index)
    picked: list[int] = []
    while len(picked) < limit:
        for group in groups.values():
            if group and len(picked) < limit:
                picked.append(group.popleft())
    return [items[index] for index in sorted(picked)]


def picture_size(path: Path) -> tuple[int, int]:
    """(width, height) in pixels; (0, 0) where the file's header does not say."""
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            return image.size
    except Exception:  # a damaged header makes Pillow raise anything; the server will say what is wrong
        return 0, 0
