"""The fixed list of mutants of issue 33: made from the production code of one commit, found again wherever it moves.

    python tests/baseline/make_mutants.py make                       # writes mutants.json from bf03052
    python tests/baseline/make_mutants.py cover DATA... --times FILE # gives each its tests (map_tests.py does)
    python tests/baseline/make_mutants.py find [--tree DIR]          # which of them a tree still has

A mutant names no line: it is a statement (of a compound one the header alone) in a function or class, and what stands
there instead.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MUTANTS = HERE / "mutants.json"
COMMIT, SEED, MADE, LISTED = "bf03052", 33, 280, 200
PRODUCTION = ("python_backends", "clients")
GPU_FILES = {"cuda_graphs.py", "hopper_attention.py", "w4a16.py", "early_launch.py"}  # no CPU runs any of it
SPEECH = {"help", "description", "epilog", "metavar", "doc", "message", "title"}  # keywords that hold words
LOGGING = {"log", "logger", "logging", "_log", "_logger", "LOG", "LOGGER", "print", "warnings"}
NEGATED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPOUND = (
    *FUNCTIONS,
    ast.ClassDef,
    ast.If,
    ast.While,
    ast.For,
    ast.AsyncFor,
    ast.With,
    ast.AsyncWith,
    ast.Match,
    ast.Try,
)


def header(node: ast.stmt) -> ast.stmt:
    """A compound statement without what it holds; any other as it is."""
    if not isinstance(node, COMPOUND):
        return node
    bare = copy.copy(node)
    for field in ("body", "orelse", "finalbody", "handlers", "decorator_list", "cases"):
        if hasattr(node, field):
            setattr(bare, field, [ast.Pass()] if field == "body" else [])
    return bare


def text(node: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(header(node))).removesuffix("\n    pass")


def parsed(statement: str) -> ast.stmt:
    """What `text` wrote, as a tree; `elif` counts as `if`. A `return` alone parses too."""
    return ast.parse(statement + ("\n    pass" if statement.endswith(":") else "")).body[0]


@dataclass(frozen=True)
class Place:
    path: str
    scope: str
    node: ast.stmt
    index: int  # among the equal statements of this scope
    before: str  # the statement before it in this scope


def statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each statement with the qualified name of the function or class around it ('' is the module)."""

    def walk(body: list, scope: str) -> Iterator[tuple[str, ast.stmt]]:
        for node in body:
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.Match, ast.Try)):
                yield scope, node
            named = isinstance(node, (*FUNCTIONS, ast.ClassDef))
            within = f"{scope}.{node.name}".strip(".") if named else scope
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from walk(getattr(node, field, []), within)

    yield from walk(tree.body, "")


def places(path: str, source: str) -> Iterator[tuple[str, Place]]:
    """(the statement as ast.dump writes it, where it stands)"""
    seen: Counter[tuple[str, str]] = Counter()
    last: dict[str, str] = {}
    for scope, node in statements(ast.parse(source)):
        dumped = ast.dump(header(node))
        yield dumped, Place(path, scope, node, seen[scope, dumped], last.get(scope, ""))
        seen[scope, dumped] += 1
        last[scope] = text(node)


class Tree:
    """The production code of a folder; finds a mutant's statement in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {
            p.relative_to(root).as_posix(): p.read_text()
            for top in PRODUCTION
            for p in sorted((root / top).rglob("*.py"))
        }
        self._places: dict[str, list[Place]] = defaultdict(list)
        for path, source in self.sources.items():
            for dumped, place in places(path, source):
                self._places[dumped].append(place)

    def find(self, mutant: dict) -> Place | None:
        """The statement, or None: it is gone, or stands in several places and nothing tells which. By qualified name;
        else by the function's own name, if one place has it; else by the statement alone, if it is long enough."""
        equal = self._places.get(ast.dump(header(parsed(mutant["original"]))), [])
        same = [p for p in equal if p.scope == mutant["scope"] and p.index == mutant["index"]]
        if same:
            for alike in (
                lambda p: p.path == mutant["path"],
                lambda p: Path(p.path).name == Path(mutant["path"]).name,
                lambda p: p.before == mutant["before"],
            ):
                if len(near := [p for p in same if alike(p)]) == 1:
                    return near[0]
            return same[0] if len(same) == 1 else None
        last = mutant["scope"].rpartition(".")[2]
        named = [p for p in equal if last and p.scope.rpartition(".")[2] == last and p.index == mutant["index"]]
        if len(named) == 1:
            return named[0]
        return equal[0] if len(equal) == 1 and len(mutant["original"]) >= 24 else None

    def in_function(self, place: Place) -> bool:
        for scope, node in statements(ast.parse(self.sources[place.path])):
            if f"{scope}.{getattr(node, 'name', '')}".strip(".") == place.scope and isinstance(node, FUNCTIONS):
                return True
        return False

    def mutated(self, mutant: dict) -> tuple[str, str] | None:
        """(path, its source with the mutant in it)"""
        place = self.find(mutant)
        if place is None:
            return None
        lines = self.sources[place.path].splitlines(keepends=True)
        node = place.node
        begin, end = node.lineno - 1, lines_end(node)
        new = mutant["mutated"]
        indent = lines[begin][: node.col_offset]
        if isinstance(node, ast.If) and lines[begin].lstrip().startswith("elif"):
            new = "el" + new
        # a statement of one line, for its strings hold no line break of their own once unparsed
        source = "".join([*lines[:begin], indent, new, "\n", *lines[end:]])
        ast.parse(source)
        return place.path, source


def lines_end(node: ast.stmt) -> int:
    """The last line of a statement, of a compound one of its header."""
    if not isinstance(node, COMPOUND):
        return node.end_lineno
    first = node.body[0]
    return min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))]) - 1


def variants(node: ast.stmt, in_class: bool) -> Iterator[tuple[str, ast.stmt]]:
    """(operator, the statement with one thing changed)"""
    bare = header(node)
    call = isinstance(bare, ast.Expr) and isinstance(bare.value, (ast.Call, ast.Await))
    targets = bare.targets if isinstance(bare, ast.Assign) else [getattr(bare, "target", None)]
    assigned = isinstance(bare, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and isinstance(targets[0], ast.Attribute)
    if call or (assigned and getattr(bare, "value", None)):
        yield "removed", ast.Pass()
    if (
        isinstance(bare, ast.Return)
        and bare.value
        and not (isinstance(bare.value, ast.Constant) and bare.value.value is None)
    ):
        yield "return None", ast.Return(ast.Constant(None))
    if isinstance(bare, ast.If):
        negated = copy.copy(bare)
        bare_not = isinstance(bare.test, ast.UnaryOp) and isinstance(bare.test.op, ast.Not)
        negated.test = bare.test.operand if bare_not else ast.UnaryOp(ast.Not(), bare.test)
        yield "if negated", negated
    for path, found in expressions(bare, ()):
        for operator, new in changes(found, isinstance(bare, FUNCTIONS)):
            yield operator, replaced(bare, path, new)


def expressions(node: ast.AST, path: tuple) -> Iterator[tuple[tuple, ast.AST]]:
    """Each expression of a statement and the way to it; no types, no words, no text."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "bases", "decorator_list", "type_params", "names"):
            continue
        if isinstance(node, (*FUNCTIONS, ast.arguments)) and field not in ("args", "defaults", "kw_defaults"):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.arg, ast.Lambda)):
                continue
            if isinstance(child, ast.keyword) and child.arg in SPEECH:
                continue
            here = (*path, (field, at))
            yield here, child
            yield from expressions(child, here)


def changes(node: ast.AST, default: bool) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for operator, table in (("comparison", NEGATED), ("boundary", BOUNDARY)):
                if type(op) in table:
                    new = copy.copy(node)
                    new.ops = [*node.ops[:at], table[type(op)](), *node.ops[at + 1 :]]
                    yield operator, new
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        words = [
            c
            for c in ast.walk(node)
            if isinstance(c, ast.JoinedStr) or (isinstance(c, ast.Constant) and isinstance(c.value, (str, bytes)))
        ]
        if not words:
            yield "+/-", ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ("default" if default else "True/False"), ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ("default" if default else "constant"), ast.Constant(node.value + 1)


def replaced(node: ast.AST, path: tuple, new: ast.AST) -> ast.AST:
    (field, at), *rest = path
    whole = copy.copy(node)
    value = getattr(node, field)
    old = value if at is None else value[at]
    changed = replaced(old, tuple(rest), new) if rest else new
    setattr(whole, field, changed if at is None else [*value[:at], changed, *value[at + 1 :]])
    return whole


def _skipped(scope: str, node: ast.stmt, device_functions: set[str]) -> bool:
    """What only a GPU executes, what is said and not done, and what no test can see."""
    if any(scope == f or scope.startswith(f + ".") for f in device_functions):
        return True
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.ClassDef)):
        return True
    written = text(node)
    if "torch.cuda" in written or "TYPE_CHECKING" in written or "__name__" in written or "__all__" in written:
        return True
    if isinstance(node, FUNCTIONS) and any(
        d in ast.unparse(ast.Module(node.decorator_list, [])) for d in ("jit", "overload")
    ):
        return True
    if isinstance(node, FUNCTIONS) and all(
        isinstance(s, (ast.Raise, ast.Pass)) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in node.body
    ):
        return True  # abstract: its defaults are its overrides' own
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        first: ast.AST = node.value.func
        while isinstance(first, ast.Attribute):
            if first.attr in LOGGING:
                return True
            first = first.value
        return isinstance(first, ast.Name) and first.id in LOGGING
    return False


def package(path: str) -> str:
    """`tessera/engine`, `tessera_client`, ...: what the mutants are spread over."""
    parts = path.split("/")[1:-1]
    return "/".join(parts[:2]) if parts[0] == "tessera" else parts[0]


def candidates(path: str, source: str) -> Iterator[dict]:
    tree = ast.parse(source)
    kernels = set()
    for scope, node in statements(tree):
        if isinstance(node, FUNCTIONS) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            kernels.add(f"{scope}.{node.name}".strip("."))
    classes = {f"{s}.{n.name}".strip(".") for s, n in statements(tree) if isinstance(n, ast.ClassDef)}
    for _, place in places(path, source):
        if _skipped(place.scope, place.node, kernels):
            continue
        original = text(place.node)
        for operator, new in variants(place.node, place.scope in classes):
            mutated = text(ast.parse(ast.unparse(ast.fix_missing_locations(new))).body[0])
            if mutated != original and "\n" not in original + mutated:
                yield {
                    "path": path, "scope": place.scope, "operator": operator, "index": place.index,
                    "before": place.before, "original": original, "mutated": mutated,
                }  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that statements stand on, kernels left out."""
    lines: set[int] = set()
    for scope, node in statements(ast.parse(source)):
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not words and not scope.endswith("_kernel"):
            lines.update(range(node.lineno, max(lines_end(node), node.lineno) + 1))
    return len(lines)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, check=True, capture_output=True, text=True).stdout


def make() -> list[dict]:
    """MADE mutants in a seeded order, spread over packages by their lines and over operators evenly."""
    draw = random.Random(SEED)
    found: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    lines: Counter[str] = Counter()
    for path in _git("ls-tree", "-r", "--name-only", "--full-tree", COMMIT).splitlines():
        if not path.endswith(".py") or not path.startswith(tuple(f"{p}/" for p in PRODUCTION)):
            continue
        if path.rsplit("/", 1)[1] in GPU_FILES:
            continue
        source = _git("show", f"{COMMIT}:{path}")
        lines[package(path)] += code_lines(source)
        for mutant in candidates(path, source):
            found[package(path)][mutant["operator"]].append(mutant)
    chosen: list[dict] = []
    for name, count in sorted(lines.items()):
        taken: set[tuple] = set()
        pools = found[name]
        for _ in range(round(MADE * count / lines.total())):
            if not any(pools.values()):
                break
            pool = pools[draw.choice(sorted(o for o, p in pools.items() if p))]
            mutant = pool.pop(draw.randrange(len(pool)))
            while (at := (mutant["path"], mutant["scope"], mutant["original"], mutant["index"])) in taken and pool:
                mutant = pool.pop(draw.randrange(len(pool)))
            if at not in taken:  # one of a statement
                taken.add(at)
                chosen.append({"package": name, **mutant})
    draw.shuffle(chosen)
    return [{"id": f"m{number:03}", **mutant} for number, mutant in enumerate(chosen)]


def write(mutants: list[dict], path: Path = MUTANTS) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(m) for m in mutants) + "\n]\n")


def read(path: Path = MUTANTS) -> list[dict]:
    return json.loads(path.read_text())


def listed(mutants: list[dict], tree: Tree) -> list[dict]:
    """The first 200 that the tree of the baseline had."""
    return [m for m in mutants if tree.mutated(m)][:LISTED]


# --- which tests execute a mutant -----------------------------------------------------------------------------------

BUDGET_S, FILES, TESTS, QUICK_S = 12.0, 8, 24, 5.0


def cover(mutants: list[dict], tree: Tree, data: list[Path], times: Path, slower: float = 1.0) -> None:
    """Gives each mutant `tests`: {file: [function, ...]}, of those that execute its statement the ones that execute
    least beside it, for at most BUDGET_S seconds of a machine `slower` times as fast as the one that measured."""
    from coverage import CoverageData
    from coverage.exceptions import CoverageException

    seconds: Counter[str] = Counter()
    bad: set[str] = set()
    for line in times.read_text().splitlines():
        row = json.loads(line)
        seconds[row["test"]] += row["seconds"] / slower
        if row["outcome"] in ("failed", "skipped"):
            bad.add(row["test"])
    quick = {t for t in seconds if seconds[t] <= QUICK_S and t not in bad}
    by_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    breadth: Counter[str] = Counter()
    for file in data:
        measured = CoverageData(str(file))
        try:
            measured.read()
        except CoverageException as error:  # its process was killed
            print(f"{file}: {error}")
            continue
        known = quick & measured.measured_contexts()
        if not known:
            continue
        for name in measured.measured_files():
            path = Path(name).relative_to(tree.root).as_posix()
            for line, contexts in measured.contexts_by_lineno(name).items():
                for test in known.intersection(contexts):
                    by_line[path][line].add(test)
                    breadth[test] += 1

    def executing(path: str, lines: range) -> set[str]:
        return set().union(*(by_line[path][n] for n in lines if n in by_line[path]))

    for mutant in mutants:
        place = tree.find(mutant)
        mutant["tests"] = {}
        if place is None:
            continue
        tests = executing(place.path, range(place.node.lineno, lines_end(place.node) + 1))
        if isinstance(place.node, FUNCTIONS):
            first = place.node.body[0].lineno
            tests = executing(place.path, range(first, place.node.end_lineno + 1))
        elif not tests and not tree.in_function(place):
            # executed when it is imported: the tests of what mentions the name
            tests = set().union(*mentions(tree, place, executing))
        spent, chosen = 0.0, defaultdict(list)
        for test in sorted(tests, key=lambda t: (breadth[t], t)):
            file, _, function = test.partition("::")
            if spent + seconds[test] > BUDGET_S or (file not in chosen and len(chosen) == FILES):
                continue
            spent += seconds[test]
            chosen[file].append(function)
            if sum(map(len, chosen.values())) == TESTS:
                break
        order = sorted(chosen, key=lambda f: sum(seconds[f"{f}::{t}"] for t in chosen[f]))
        mutant["tests"] = {f: sorted(chosen[f]) for f in order}


def mentions(tree: Tree, place: Place, executing: Callable[[str, range], set[str]]) -> Iterator[set[str]]:
    """Of a statement that assigns at import, or a class's field: the tests of each statement that uses the name."""
    node = place.node
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = {t.id for t in targets if isinstance(t, ast.Name)}
    for path, source in tree.sources.items():
        if not any(n in source for n in names):
            continue
        for _, other in statements(ast.parse(source)):
            used = {getattr(n, "id", getattr(n, "attr", getattr(n, "arg", None))) for n in ast.walk(header(other))}
            if used & names:
                yield executing(path, range(other.lineno, lines_end(other) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("make", "cover", "find"))
    parser.add_argument("data", nargs="*", type=Path)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1])
    options = parser.parse_args()
    tree = Tree(options.tree.resolve())
    if options.what == "make":
        made = make()
        kept = listed(made, tree)
        keep = {m["id"] for m in kept}
        last = max(int(m["id"][1:]) for m in kept)
        gone = [m["id"] for m in made[: last + 1] if m["id"] not in keep]
        print(f"{len(made)} made at {COMMIT}; {len(kept)} listed; gone before the {len(kept)}th: {len(gone)} {gone}")
        write(kept)
        mutants = kept
    else:
        mutants = read()
        if options.what == "cover":
            cover(mutants, tree, options.data, options.times, options.slower)
            write(mutants)
    lost = [m["id"] for m in mutants if not tree.mutated(m)]
    print(f"{len(mutants)} mutants, {len(lost)} not in {tree.root}: {lost}")
    for key in ("package", "operator"):
        print(json.dumps(dict(sorted(Counter(m[key] for m in mutants).items()))))
    if any("tests" in m for m in mutants):
        print("covered by no quick test:", sum(not m["tests"] for m in mutants))


if __name__ == "__main__":
    main()
