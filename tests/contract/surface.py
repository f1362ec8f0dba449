"""What users of Tessera may lean on, as lines of text: surface.json, which test_surface.py holds against the code.

    python tests/contract/surface.py --write    # takes today's surface, where a change is meant

Nothing here depends on where something lies in the source: a module that moves changes no line.
"""

import argparse
import ast
import builtins
import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_type_hints
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "python_backends", ROOT / "clients"]
STORED = Path(__file__).with_suffix(".json")
sys.path[:0] = [str(each) for each in (*SOURCES, ROOT / "tests") if str(each) not in sys.path]

import pydantic  # noqa: E402
import torch  # noqa: E402
from fastapi.openapi.utils import get_openapi  # noqa: E402

import tessera_client  # noqa: E402
from tessera.errors import InvalidRequest, Unavailable  # noqa: E402
from tessera.launcher.settings import set_up  # noqa: E402
from tessera.settings.stages import NO_SETTINGS, STAGES  # noqa: E402
from tessera.tritonserver.engine_metrics import MetricsPage  # noqa: E402
from tessera.tritonserver.failures import error_response  # noqa: E402
from tessera.tritonserver.metrics import show_weights  # noqa: E402
from tessera.tritonserver.vision import page_of  # noqa: E402
from tessera_command.cli import exit_code, main  # noqa: E402
from tessera_gateway.app import create_app  # noqa: E402
from tessera_gateway.errors import from_wire  # noqa: E402
from tessera_gateway.settings import Settings  # noqa: E402
from tessera_wire.errors import TesseraClientError, from_server  # noqa: E402

# What has no __all__ beside it, or packages that are not everywhere: read from the source.
OTHER_NAMES = ("Ask", "TesseraVlmClient", "clear_of_letters", "mineru_client")
# What results and pages are made of: the classes that are written out field by field.
RESULT_CLASSES = ("Row", "Recipe", "Estimate", "Measurement", "Item", "Health", "StageHealth", "TokenEvent", "Usage")
STATUSES = ("ALREADY_EXISTS", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "INTERNAL", "INVALID_ARGUMENT",
            "NOT_FOUND", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN")  # fmt: skip
# Calls that say what is wrong without raising it.
SAYING = ("error", "failure", "fail", "refuse")
DUNDERS = ("__init__", "__enter__", "__aenter__", "__iter__", "__aiter__", "__next__", "__anext__", "__call__")


@cache
def walked() -> dict[type, list[tuple[Any, Any]]]:
    """Each node of the production code by its class, with the innermost function or module around it."""
    found: dict[type, list[tuple[Any, Any]]] = {}
    files = (file for source in SOURCES for file in sorted(source.rglob("*.py")))
    left: list[tuple[Any, Any]] = [(tree, tree) for tree in (ast.parse(file.read_text("utf-8")) for file in files)]
    while left:
        node, function = left.pop()
        found.setdefault(type(node), []).append((node, function))
        own = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        left += [(child, own) for child in ast.iter_child_nodes(node)]
    return found


def nodes(*kinds: type) -> Iterator[Any]:
    return (node for kind in kinds for node, _ in walked().get(kind, ()))


def sdk() -> Iterator[str]:
    for name in tessera_client.__all__:
        each = getattr(tessera_client, name)
        bases = "".join(f" < {base.__name__}" for base in each.__mro__[1:-1])
        yield f"{name}{inspect.signature(each)}{bases}"
        hints = [hint for base in reversed(each.__mro__) for hint in inspect.get_annotations(base).items()]
        yield from (f"{name}.{field}: {kind}" for field, kind in hints if not field.startswith("_"))
        for member in dir(each):
            if issubclass(each, Exception) and hasattr(Exception, member):
                continue
            if member.startswith("_") and (member not in DUNDERS or member == "__init__"):
                continue
            value = inspect.getattr_static(each, member)
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if inspect.isfunction(function):
                kind = {property: "property ", classmethod: "classmethod ", staticmethod: "staticmethod "}
                yield f"{kind.get(type(value), '')}{name}.{member}{inspect.signature(function)}"
    for node in nodes(ast.ClassDef, ast.FunctionDef):
        if node.name in OTHER_NAMES:
            for own in node.body if isinstance(node, ast.ClassDef) else [node]:
                name = getattr(own, "name", "_")
                public = own is node or name == "__init__" or not name.startswith("_")
                if public and isinstance(own, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    title = node.name if own is node else f"{node.name}.{own.name}"
                    yield f"{title}({ast.unparse(own.args)}) -> {own.returns and ast.unparse(own.returns)}"


def command_line() -> Iterator[str]:
    parsers: list[argparse.ArgumentParser] = []

    def shown(*arguments: str) -> argparse.ArgumentParser:
        with contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        return parsers[-1]

    with mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: parsers.append(self)):
        top = shown()
        yield from about_parser(top)
        (commands,) = (each for each in top._actions if isinstance(each, argparse._SubParsersAction))
        for each in commands._choices_actions:
            yield f"tessera {each.dest}: {each.help}"
        for name, parser in commands.choices.items():
            yield from about_parser(parser if parser.add_help else shown(name))


def about_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    prog = parser.prog
    yield f"{prog}, in words: {parser.description} {parser.epilog or ''}".rstrip()
    formatter = parser._get_formatter()
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            continue
        kind = each.type.__name__ if each.type in (int, float, Path) else None
        default = each.default.name if isinstance(each.default, Path) else repr(each.default)
        facts = {"type": kind, "default": default, "nargs": each.nargs, "choices": each.choices and [*each.choices]}
        facts |= {"required": each.required or None, "by": type(each).__name__.strip("_").removesuffix("Action")}
        said = ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact not in (None, "None", "Store"))
        name = f"{'/'.join(each.option_strings) or each.dest} {each.metavar or ''}".strip()
        yield f"{prog} {name} [{said}]: {formatter._expand_help(each) if each.help else ''}"


def http() -> Iterator[str]:
    app = application()
    for route in routes(app):
        yield f"route {route.path} {','.join(sorted(getattr(route, 'methods', None) or ()))}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one function serves several methods of /v1/responses/...
        schema = get_openapi(title="-", version="-", routes=app.routes)
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            told = {name: about[name] for name in ("parameters", "requestBody", "responses") if name in about}
            yield f"schema {method} {path}: {json.dumps(told, sort_keys=True)}"
    models = [*below(pydantic.BaseModel)]
    for model in models:
        if model.__module__.startswith("tessera"):
            hints = get_type_hints(model, include_extras=True)
            for name, field in model.model_fields.items():
                kind = bare(hints[name])
                alias = f" as {field.alias}" if field.alias else ""
                default = "" if field.is_required() else f" = {field.default!r}"
                yield f"body {model.__name__}.{name}{alias}: {kind}{default}"
    for node in nodes(ast.Assign):
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id == "NOT_SERVED":
            yield from (f"not served: {each.value}" for each in ast.walk(node.value) if isinstance(each, ast.Constant))


def routes(router: Any) -> Iterator[Any]:
    for each in router.routes:
        inner = getattr(each, "original_router", None)  # as later versions of FastAPI include one
        yield from [each] if inner is None else routes(inner)


@cache
def application() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return create_app(Settings(batch_folder=Path(folder)))


def below(kind: type) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def bare(kind: Any) -> str:
    """A type as text without its modules, and without what tells functions of two runs apart."""
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__origin__") else str(kind)
    text = re.sub(r"<function (?:\w+\.<locals>\.)?(\S+) at 0x\w+>", r"\1()", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def models() -> Iterator[str]:
    for file in sorted((ROOT / "model_repository").rglob("*.pbtxt")):
        text = " ".join(re.sub(r"#.*", "", file.read_text("utf-8")).split())
        parameters = ", ".join(re.findall(r'\bkey: "([^"]+)"', text))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        yield f"{file.relative_to(ROOT / 'model_repository')} {digest} ({parameters})"


class Family:
    """In place of tritonserver's."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    seen: ClassVar[list[str]] = []

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.seen.append(f"{kind} {name}: {description}")

    def Metric(self, labels: dict[str, str], **options: Any) -> Any:
        self.seen[-1] += f" {{{', '.join(labels)}}}"
        return mock.Mock()


def metrics() -> Iterator[str]:
    Family.seen = []
    server = mock.Mock(MetricFamily=Family)
    with mock.patch.dict(sys.modules, triton_python_backend_utils=server), mock.patch("threading.Thread.start"):
        MetricsPage(dict, mock.Mock())
        page_of(mock.Mock())
        show_weights("stage", "words", 1)
    yield from Family.seen
    for line in application().state.counters.page().splitlines():
        yield f"gateway {line if line.startswith('#') else line.rpartition(' ')[0]}"


def environment() -> Iterator[str]:
    found = set(NO_SETTINGS)
    for node in nodes(ast.Constant):
        if isinstance(node.value, str):
            found |= set(re.findall(r"\b(?:TESSERA|OTEL)_[A-Z0-9_]*[A-Z0-9]\b", node.value))
    for node in nodes(ast.Call, ast.Subscript):
        holder = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        holder = node.value if isinstance(node, ast.Subscript) else holder
        keys = [node.slice] if isinstance(node, ast.Subscript) else node.args[:1]
        if holder is not None and "environ" in ast.unparse(holder):
            found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    for file in (ROOT / "docker-compose.yml", ROOT / "Dockerfile", *(ROOT / "deploy").rglob("*.yaml")):
        found |= set(re.findall(r"\bTESSERA_[A-Z0-9_]*[A-Z0-9]\b", file.read_text("utf-8")))
    yield from found
    with mock.patch("torch.cuda.is_available", lambda: False):
        for each in set_up(ROOT / "model_repository", None, {"TESSERA_DEVICE": "cpu"}, {}).effective:
            stage, dot, name = each.name.rpartition(".")
            variable = f"TESSERA_{stage}_{name}" if dot else f"TESSERA_{name}"
            yield f"{variable.upper()}, --set {each.name}"
    for node in nodes(ast.AnnAssign):
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "setting":
            about = [ast.unparse(each) for each in (*call.args, *call.keywords)]
            yield f"setting {ast.unparse(node.target)}: {', '.join(about)}"


def statuses() -> Iterator[str]:
    yield from (f"stages: {each}" for each in STAGES)
    said = mock.Mock(TritonError=mock.Mock(side_effect=lambda message, code: message))
    with mock.patch.dict(sys.modules, triton_python_backend_utils=said):
        for error in (InvalidRequest("words"), Unavailable("words"), ValueError("words")):
            error_response("stage", error)
            yield f"server: {type(error).__name__} -> {said.InferenceResponse.call_args.kwargs['error']}"
    for status in (*STATUSES, ""):
        error = from_server("words", status)
        yield f"client: status {status or '(none)'} -> {type(error).__name__}: {error}"
    for kind in (TesseraClientError, *below(TesseraClientError)):
        if kind.__module__.startswith("tessera"):
            answer = from_wire(kind("words"))
            told = f"HTTP {answer.status}, {answer.body['error']['type']}, {answer.code}, {answer.headers}"
            yield f"{kind.__name__} -> exit code {exit_code(kind('words'))}; {told}"


def error_texts() -> Iterator[str]:
    """Skeletons of the words that errors are made with; a name stands for what its function assigns to it."""
    bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for node in nodes(ast.ClassDef)}

    def is_error(name: str) -> bool:
        known = getattr(builtins, name, None)
        if inspect.isclass(known) and issubclass(known, BaseException):
            return True
        return name.endswith(("Error", "Exception")) or any(map(is_error, bases.get(name, ())))

    for call, function in walked()[ast.Call]:
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if is_error(name) or name in SAYING:
            values = [*call.args, *(each.value for each in call.keywords if each.arg)]
            words = [text for each in values for text in [skeleton(each, assigned(function))] if text != "{}"]
            if words:
                yield f"{name}: {' | '.join(words)}"


@cache
def assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function) if not isinstance(function, ast.Module) else function.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def skeleton(node: ast.expr, names: dict[str, list[ast.expr]], depth: int = 3) -> str:
    def of(each: ast.expr) -> str:
        return skeleton(each, names, depth - 1)

    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(of(each) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        form = of(node.format_spec) if node.format_spec else ""
        return f"{{{'' if node.conversion < 0 else '!' + chr(node.conversion)}{form and ':' + form}}}"
    if isinstance(node, ast.Name) and depth and node.id in names:
        texts = sorted({of(each) for each in names[node.id]})
        return texts[0] if len(texts) == 1 else f"({' / '.join(texts)})" if texts != ["{}"] else "{}"
    if isinstance(node, ast.IfExp):
        return f"({of(node.body)} / {of(node.orelse)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return of(node.left) + of(node.right)
    return "{}"


def result_fields() -> Iterator[str]:
    """Names in results, pages and answers: keys that are written, and fields of classes that are written whole."""
    for node in nodes(ast.Dict, ast.Assign, ast.Call):
        keys: list[Any] = node.keys if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            keys = [ast.Constant(each.arg) for each in node.keywords]
        for key in keys:
            text = skeleton(key, {}) if isinstance(key, (ast.Constant, ast.JoinedStr)) else ""
            if re.fullmatch(r"(?=.*[a-z])[a-z_{}][\w.{}]*", text):
                yield f"key {text}"
    for node in nodes(ast.ClassDef):
        if node.name in RESULT_CLASSES:
            own = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
            if own:
                yield f"class {node.name}({', '.join(own)})"


# Of these each line stands once, however often it is met.
SETS: dict[str, Callable[[], Iterator[str]]] = {
    "sdk": sdk,
    "command line": command_line,
    "http": http,
    "models": models,
    "metrics": metrics,
    "environment": environment,
    "statuses": statuses,
    "result fields": result_fields,
}


def surface() -> dict[str, list[str]]:
    """Sorted lines by what they are about; an error text that is met several times ends in how often."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TESSERA_", "OTEL_"))}
    here = [mock.patch.dict(os.environ, mine | {"COLUMNS": "100"}, clear=True)]
    here += [mock.patch("os.cpu_count", lambda: 4), mock.patch.object(torch.cuda, "is_available", lambda: False)]
    here += [contextlib.redirect_stderr(io.StringIO())]
    with contextlib.ExitStack() as stack:
        for each in here:
            stack.enter_context(each)  # type: ignore[arg-type]
        found = {name: sorted(set(lines())) for name, lines in SETS.items()}
        times = Counter(error_texts())
    found["sdk"] = [re.sub(r" at 0x\w+", "", line) for line in found["sdk"]]
    found["error texts"] = sorted(text + f" (x{count})" * (count > 1) for text, count in times.items())
    return found


def differences(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    found = []
    for name in sorted({*before, *now}):
        old, new = set(before.get(name, ())), set(now.get(name, ()))
        found += [f"- {name}: {line}" for line in sorted(old - new)] + [
            f"+ {name}: {line}" for line in sorted(new - old)
        ]
    return found


def stored() -> dict[str, list[str]]:
    return json.loads(STORED.read_text("utf-8"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    today = surface()
    if parser.parse_args().write:
        STORED.write_text(json.dumps(today, indent=0, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    else:
        print("\n".join(differences(stored(), today)))
