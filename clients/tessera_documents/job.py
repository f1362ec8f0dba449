"""Many documents through one server: pages are rendered as they are needed, their requests are under way together."""

import asyncio
import contextvars
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger
from PIL import Image

from tessera_client.messages import ServedModel
from tessera_documents.engine import Mineru, PaddleOcrVl
from tessera_documents.results import OutputFolder, PageFiles
from tessera_documents.sources import BadDocument, Document, PageRanges, Source, digest, find, open_document
from tessera_documents.text_layer import TextLayer
from tessera_documents.vlm_client import TesseraVlmClient
from tessera_jobs.asker import Asker, ServersUnavailable, described, for_each, run_job
from tessera_wire.errors import InvalidRequest

Rendered = tuple[PageFiles, int, Image.Image, TextLayer | None]
"""A page: where its results go, its number, its picture, and its text where it has any."""
REQUESTS_PER_PAGE = 4  # that are under way, over a page's life: its layout alone, then a dozen crops at once


@dataclass(slots=True)
class Tally:
    """What became of the pages; a file that cannot be opened counts as one that failed."""

    made: int = 0
    kept: int = 0
    """Complete from an earlier run."""
    failed: int = 0
    warned: int = 0
    """Of those made, the ones with a warning of MinerU's in their JSON."""
    first_error: str = ""
    first_warning: str = ""
    seconds: float = 0.0


class _Threads(ThreadPoolExecutor):
    """Works in the context of the caller that submits, so that loguru knows the page."""

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        return super().submit(contextvars.copy_context().run, function, *arguments, **named)


@dataclass
class Job:
    """One run over ``paths`` into ``out``.

    engine: what finds blocks and reads them. dpi: dots per inch at which a PDF's pages are rendered. concurrency:
    requests at a time; a quarter as many pages are in memory. priority: of all requests; lower ones are served first.
    pages: which of each document's are read, as :class:`PageRanges` has it; None: all. password: of the PDFs that want
    one. force: reads pages again that another model has read. patience: seconds to wait for a server at the start.
    drafts: sends what a PDF says of a block along, and proposes what the job's earlier answers had.
    notice: called with what the user should know at once. progress: called with the number of pages that are over, of
    pages in all, and how fast they are made.
    """

    paths: Sequence[Path]
    out: Path
    engine: Mineru | PaddleOcrVl
    dpi: int
    concurrency: int
    priority: int
    pages: str | None
    password: str | None
    force: bool
    patience: float
    notice: Callable[[str], None]
    progress: Callable[[int, int, str], None]
    drafts: bool = True

    def __post_init__(self) -> None:
        self._sources = find(self.paths, self.out)
        self._ranges = PageRanges(self.pages or "1-")
        self._total = 0
        self._pool = uuid.uuid4().hex if self.drafts else None
        self.tally = Tally()

    def run(self) -> Tally:
        """Raises ConnectionFailed or Unavailable where the server is gone, OSError where results cannot be written,
        InvalidRequest where another run writes them, where another model has read pages, and where the one that is
        served reads none; what is complete then stays and is not done again by the next run."""
        return run_job(self._run())

    async def _run(self) -> Tally:
        served = [await self._begin(vlm) for vlm in self.engine.servers]
        pruned = {"prune": list(self.engine.prune)} if self.engine.prune else {}
        self._served, self._made_from = served, self.engine.made_from(served) | pruned
        with closing(OutputFolder(self.out)) as self._output:
            return await self._read()

    async def _begin(self, vlm: TesseraVlmClient) -> ServedModel:
        vlm.pool = self._pool
        vlm.asker = asker = Asker(vlm.impatient, self.patience, one_model=True)
        await asker.begin(self.notice)
        return await asker.model()

    async def _read(self) -> Tally:
        self._started = time.monotonic()
        handler = logger.add(_note, level="WARNING", filter=lambda record: "warnings" in record["extra"])
        try:
            with _Threads() as threads, ThreadPoolExecutor(1, "tessera-pages") as self._opener:
                self.engine.use(threads)
                self._slots = asyncio.Semaphore(self.concurrency)
                models: Counter[str | None] = Counter()
                openable = [source for source in self._sources if await self._look(source, models)]
                self._hold_against(models)
                await self.engine.check(self._served, self.priority, self._slots)
                self._started = time.monotonic()
                await for_each(self._pages(openable), self._work, max(1, self.concurrency // REQUESTS_PER_PAGE))
        finally:
            logger.remove(handler)
        self.tally.seconds = time.monotonic() - self._started
        return self.tally

    async def _in_order(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """In the one thread that opens, renders and closes."""
        return await asyncio.get_running_loop().run_in_executor(self._opener, partial(function, *arguments))

    async def _look(self, source: Source, models: Counter[str | None]) -> bool:
        """Adds a file's pages to those in all, and what has read them to the ``models``, unless that does not matter.
        Whether it can be opened and has some of the pages that are wanted."""
        try:
            count = await self._in_order(_pages_of, source.path, self.password)
            if not (pages := self._ranges.of(count)):
                raise BadDocument(f"it has {count} pages, and none of --pages")
        except (BadDocument, OSError) as error:
            self._total += 1
            self._fail(source.path, None, str(error))
            return False
        self._total += len(pages)
        if not self.force and (self.out / source.folder).is_dir():
            with suppress(OSError, BadDocument):  # said when its turn comes
                models.update(map(self._files(source).checkpoint_of, pages))
        return True

    def _files(self, source: Source) -> PageFiles:
        """Raises OSError and BadDocument."""
        made_from = {"digest": digest(source.path), "dpi": self.dpi, "max_tokens": self.engine.vlm.max_tokens}
        folder = self.out / source.folder
        return PageFiles(source.path, folder, made_from | self._made_from, self._served[0].checkpoint)

    def _hold_against(self, models: Counter[str | None]) -> None:
        """Raises InvalidRequest where another model has read some of the pages."""
        unknown = models.pop("", 0)
        others = sum(models.values()) - models[None] - models[self._served[0].checkpoint]
        if others:
            words = f"another model than {described(self._served[0])} has read {others} of the pages in {self.out}"
            raise InvalidRequest(words, "--force reads these again; or give another -o")
        if unknown:
            words = f"{unknown} pages in {self.out} do not say which model has read them (an earlier version's)"
            self.notice(f"{words}: they are kept; --force reads them again")

    async def _pages(self, sources: Sequence[Source]) -> AsyncGenerator[Rendered, None]:
        """Every page that is not complete."""
        for source in sources:
            try:
                files = await asyncio.to_thread(self._files, source)
                document: Document = await self._in_order(open_document, source.path, self.password)
            except (BadDocument, OSError) as error:  # it could be opened a while ago
                self._fail(source.path, None, str(error))
                continue
            try:
                wanted = self._ranges.of(document.pages)
                missing = await asyncio.to_thread(files.take_up, wanted, document.pages, not self.force)
                self.tally.kept += len(wanted) - len(missing)
                self._report()
                if not missing:
                    await asyncio.to_thread(files.join)
                for page in missing:
                    try:
                        image = await self._in_order(document.render, page, self.dpi)
                        text = await self._in_order(document.text, page) if self.drafts else None
                    except Exception as error:  # PDFium's, Pillow's or a decoder's
                        await self._end(files, page, f"cannot be rendered: {error or type(error).__name__}")
                    else:
                        yield files, page, image, text
            finally:
                await self._in_order(document.close)

    async def _work(self, rendered: Rendered) -> None:
        files, page, image, text = rendered
        warnings: list[str] = []
        try:
            with logger.contextualize(warnings=warnings):
                blocks = await self.engine.read(image, text, self.priority, self._slots)
        except ServersUnavailable:
            raise
        except Exception as error:  # the server's refusal, or a fault of MinerU's on odd answers
            await self._end(files, page, str(error) or type(error).__name__)
            return
        self._output.check(self.out)
        await asyncio.to_thread(files.write, page, image, blocks, warnings)
        self.tally.made += 1
        if warnings:
            self.tally.warned += 1
            self.tally.first_warning = self.tally.first_warning or _line(files.source, page, warnings[0])
        await self._end(files, page)

    async def _end(self, files: PageFiles, page: int, error: str = "") -> None:
        if error:
            self._fail(files.source, page, error)
        self._report()
        if files.end(page, bool(error)):
            await asyncio.to_thread(files.join)

    def _fail(self, file: Path, page: int | None, error: str) -> None:
        self._output.add_error(file, page, " ".join(error.split()))
        self.tally.failed += 1
        self.tally.first_error = self.tally.first_error or _line(file, page, error)

    def _report(self) -> None:
        tally = self.tally
        rate = tally.made / (time.monotonic() - self._started)
        self.progress(tally.made + tally.kept + tally.failed, self._total, f"{rate:.2f} pages/s")


def quiet() -> None:
    """Keeps mineru-vl-utils' log off standard error, for all of this process. Its warnings are in the pages' JSON."""
    logger.remove()


def _pages_of(path: Path, password: str | None) -> int:
    document = open_document(path, password)
    document.close()
    return document.pages


def _line(file: Path, page: int | None, words: str) -> str:
    where = str(file) if page is None else f"{file}, page {page + 1}"
    return f"{where}: {' '.join(words.split())}"


def _note(message: Any) -> None:
    """A record of loguru's, into the list of the page that it is about."""
    message.record["extra"]["warnings"].append(message.record["message"])
