"""`make demo`: a real tritonserver answers questions about real JPEG files, over gRPC streaming and over HTTP.

Prints a table of picture, question, answer, expected answer and milliseconds per stage, then the line
``demo: {json}`` and how to ask it oneself, in the browser and with curl. Exits 0 only if the server started, every
question was answered, at least `PASS` of the answers were right, and the server stopped. `--default documents` shows
the document model instead (demo_documents.py).
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import answer_sheet
import demo_documents
from answer_sheet import RIGHT, WRONG
from PIL import Image
from rich.console import Console
from rich.table import Table

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera.settings.gpu import DEFAULT_MODELS
from tessera_client import Answer, Client
from tessera_evaluation.datasets import Item, heldout_items

ROOT = Path(__file__).resolve().parent.parent
PASS = 0.75
SHOWN = 48  # characters of an answer
PORT = 9000  # of the gateway, where `tessera serve` is not told another
STAGES = ("preprocess", "vision_queue", "vision", "queue", "first_token", "decode")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--default", choices=DEFAULT_MODELS, default="rooms", help="which model (%(default)s)")
    parser.add_argument("--pictures", type=int, default=24, help="how many pictures of the held-out set")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--sheet", type=Path, help="write a picture of the first pictures and answers, as JPEG")
    arguments = parser.parse_args()
    if arguments.default == "documents":
        return demo_documents.main([])
    console = Console(width=170)
    with tempfile.TemporaryDirectory(prefix="tessera-demo-") as folder:
        items = heldout_items(arguments.pictures, Path(folder), root=ROOT)
        console.print(f"{len(items)} pictures rendered from the held-out set")
        options = ServerOptions(model_repository=ROOT / "model_repository", http_port=0, grpc_port=0, metrics_port=0)
        with Server(options) as server, Client(server.grpc_url) as grpc, Client(server.http_url) as http:
            version = grpc.status().version
            console.print(f"tritonserver {version} is ready: gRPC {server.grpc_url}, HTTP {server.http_url}")

            def ask(job: tuple[int, Item]) -> tuple[str, Answer]:
                index, item = job
                if index % 2:
                    return "HTTP", http.ask(item.picture, item.question)
                with grpc.stream(item.picture, item.question) as stream:
                    return "gRPC", stream.answer()

            ask((0, items[0]))  # the first request grows shared memory
            started = time.perf_counter()
            with ThreadPoolExecutor(arguments.concurrency) as pool:
                answers = list(pool.map(ask, enumerate(items)))
            seconds = time.perf_counter() - started
        if arguments.sheet:
            entries = [
                answer_sheet.Entry(
                    Image.open(item.picture),
                    [(item.question, "black"), (answer.text, RIGHT if is_right(item, answer) else WRONG)],
                )
                for item, (_, answer) in zip(items[:9], answers)
            ]
            answer_sheet.write(arguments.sheet, entries)
    console.print(table(items, answers))
    correct = sum(is_right(item, answer) for item, (_, answer) in zip(items, answers))
    summary = {
        "answers": len(answers),
        "correct": correct,
        "req_per_s": round(len(answers) / seconds, 2),
        "server_version": version,
    }
    print(f"demo: {json.dumps(summary)}", flush=True)
    print(
        f"\nAsk it yourself: `make serve` keeps it up; then open http://localhost:{PORT}/ (another port: "
        f'make serve ARGS="--openai-port {PORT + 1}"), or any client of OpenAI\'s with the address '
        f"http://localhost:{PORT}/v1:\n\n{curl(PORT)}"
    )
    return 0 if len(answers) == len(items) and correct >= PASS * len(items) else 1


def curl(port: int) -> str:
    """A question about a picture, for the shell; base64 text is too long for an argument."""
    ask = '{"type": "text", "text": "How many pictures are there?"}'
    return (
        """{ printf '{"model": "vlm", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": """
        f"""{{"url": "data:image/webp;base64,'; base64 -w0 docs/answers.webp; printf '"}}}}, {ask}]}}]}}'; }} \\\n"""
        f"""    | curl -s http://localhost:{port}/v1/chat/completions -H "Content-Type: application/json" -d @-"""
    )


def is_right(item: Item, answer: Answer) -> bool:
    """Word for word; the held-out answers are unambiguous."""
    return answer.text.strip() == item.answer


def table(items: list[Item], answers: list[tuple[str, Answer]]) -> Table:
    """The demo's picture of itself."""
    view = Table(title="Questions about pictures the model has never seen; milliseconds per stage")
    for name, width in (("picture", 14), ("over", 4), ("question", 40), ("answer", 16), ("expected", 16), ("", 1)):
        view.add_column(name, min_width=width)
    for stage in STAGES:
        view.add_column(stage.replace("_", " "), justify="right")
    for item, (transport, answer) in zip(items, answers):
        text = answer.text.strip()
        mark = "[green]✓" if is_right(item, answer) else "[red]✗"
        spent = [f"{getattr(answer.timings, stage):.0f}" for stage in STAGES]
        view.add_row(item.picture.stem, transport, item.question, shown(text), shown(item.answer), mark, *spent)
    return view


def shown(text: str) -> str:
    """A description's beginning; everything else whole."""
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


if __name__ == "__main__":
    raise SystemExit(main())
