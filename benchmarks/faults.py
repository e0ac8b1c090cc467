"""Do the tests notice a fault? Faults are drawn by a seed and put into the code one at a time, until a test fails.

    python benchmarks/faults.py --draw                        # what is drawn
    python benchmarks/faults.py --tree CLONE --only 0-19      # tries these in a clone of the repository
    python benchmarks/faults.py --table                       # what was noticed, of all that was tried

Sixty faults: 30 in methods, 15 in parts, 15 in the engine and the deployment. A file is drawn, then a place in the body
of one of its functions: an operator or a comparison that becomes its neighbour, a number that grows by one, a truth
that is turned around, arms that are exchanged, a statement that goes. Messages, annotations and docstrings stay.

A fault meets the tests as `.ci/run` would choose them at a commit that has it: those that are near to it first, then
all fast ones, then all slow ones, and the first that fails ends it. What no test notices meets those too whose turn
is at another commit: what is noticed there alone is what turns cost. A fault that changes nothing that can be seen
is listed with why; nothing is drawn in its stead.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "faults.json"
SEED = 20261125
GROUPS = {
    "methods": (30, ("methods",)),
    "parts": (15, ("parts",)),
    "engine and deployment": (15, ("engine", "flower")),
}
NEIGHBOURS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
}
ENDLESS = 900  # seconds after which tests that should take a few are taken to hang


@dataclass(frozen=True)
class Fault:
    """A change of the code.

    Attributes:
        group: of `GROUPS`.
        file: within src/potluck.
        line: of its first character, from 1.
        start: offset of its first byte in the file.
        before: what stands there.
        after: what shall.
    """

    group: str
    file: str
    line: int
    start: int
    before: str
    after: str

    def put_into(self, tree: Path) -> None:
        """Change the file of a checkout."""
        path = tree / "src/potluck" / self.file
        code, old = path.read_bytes(), self.before.encode()
        if code[self.start : self.start + len(old)] != old:
            raise SystemExit(f"{path}: expected {self.before!r} at byte {self.start}; draw again from this tree")
        path.write_bytes(code[: self.start] + self.after.encode() + code[self.start + len(old) :])


def drawn() -> list[Fault]:
    """The faults of the seed."""
    draw = random.Random(SEED)
    faults: list[Fault] = []
    for group, (count, folders) in GROUPS.items():
        files = [path for folder in folders for path in sorted((ROOT / "src/potluck" / folder).rglob("*.py"))]
        places = {path: list(places_in(path)) for path in files}
        files = [path for path in files if places[path]]
        for _ in range(count):
            path = draw.choice(files)
            place = draw.choice(places[path])
            places[path].remove(place)
            faults.append(Fault(group, path.relative_to(ROOT / "src/potluck").as_posix(), *place))
    return faults


def places_in(path: Path) -> Iterator[tuple[int, int, str, str]]:
    """Line, byte, text and new text of every fault that a file could have."""
    code = path.read_bytes()
    starts = [0]
    for text in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column

    functions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef))
    for node in dict.fromkeys(inner for function in functions for inner in computed_in(function)):
        for start, stop, after in changes(node, span, code):
            yield code.count(b"\n", 0, start) + 1, start, code[start:stop].decode(), after


def computed_in(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What a function's body computes: no docstring, no annotation, no message of an error."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.FunctionDef):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        annotation = getattr(node, "annotation", None)
        pending += [inner for inner in ast.iter_child_nodes(node) if inner is not annotation]


def changes(node: ast.AST, span: Callable[..., tuple[int, int]], code: bytes) -> Iterator[tuple[int, int, str]]:
    """Start, stop and new text of each fault that a piece of code could have."""
    if isinstance(node, ast.BinOp) and type(node.op) in NEIGHBOURS:
        yield from between(span(node.left)[1], span(node.right)[0], type(node.op), code)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in NEIGHBOURS:
        yield from between(span(node.left)[1], span(node.comparators[0])[0], type(node.ops[0]), code)
    elif isinstance(node, ast.BoolOp):
        yield from between(span(node.values[0])[1], span(node.values[1])[0], type(node.op), code)
    elif isinstance(node, ast.AugAssign) and type(node.op) in NEIGHBOURS:
        yield from between(span(node.target)[1], span(node.value)[0], type(node.op), code)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (*span(node), f"({code[slice(*span(node.operand))].decode()})")
    elif isinstance(node, ast.IfExp):
        body, test, orelse = (code[slice(*span(part))].decode() for part in (node.body, node.test, node.orelse))
        yield (*span(node), f"{orelse} if {test} else {body}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield (*span(node), str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield (*span(node), str(node.value + 1))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield (*span(node), "pass")


def between(start: int, stop: int, operator: type[ast.AST], code: bytes) -> Iterator[tuple[int, int, str]]:
    """An operator's place between its operands, and its neighbour, where the two stand on one line without brackets."""
    old, new = NEIGHBOURS[operator]
    if code[start:stop].decode().strip() == old.strip():
        yield start, stop, code[start:stop].decode().replace(old.strip(), new.strip())


def stages(fault: Fault) -> Iterator[tuple[str, list[str]]]:
    """What is run for a fault, in order: a name for it, and pytest's arguments."""
    for place, near in near_to(fault):
        for speed in ("not slow", "slow"):
            yield f"{place}, {speed.replace('not slow', 'fast')}", [*near, "-m", speed]
    yield "all fast", ["-n", "2", "-m", "not slow"]
    yield "all slow", ["-n", "2", "-m", "slow"]
    yield "another turn's, fast", ["-n", "2", "-m", "not slow", "--all-turns"]
    yield "another turn's, slow", ["-n", "2", "-m", "slow", "--all-turns"]


def near_to(fault: Fault) -> Iterator[tuple[str, list[str]]]:
    """The tests that mirror the file and those that name its module; then those of who has it, or of its room."""
    path, tests = Path(fault.file), ROOT / "tests"
    module = f"potluck.{'.'.join(path.with_suffix('').parts)}"
    naming = [file for file in sorted(tests.rglob("test_*.py")) if module in file.read_text(encoding="utf-8")]
    mirrored = tests / path.with_name(f"test_{path.name}")
    files = [str(file.relative_to(ROOT)) for file in dict.fromkeys([mirrored, *naming]) if file.exists()]
    if files:
        yield "near", files
    if users := users_of(path):
        names = " or ".join(f"{name}:" for name in users)
        evidence = [f"tests/test_evidence.py::test_a_method_is_what_its_second_computation_comes_to[{users[0]}]"]
        chosen = evidence if (ROOT / "evidence" / f"{users[0]}.py").exists() else []
        yield "its methods", [*chosen, "tests/test_conformance.py", "-k", f"{names} or second_computation"]
    else:
        yield "its room", [f"tests/{path.parts[0]}"]


def users_of(path: Path) -> list[str]:
    """The method of a file, or five methods that say a part's name."""
    if path.parent.name == "methods":
        return [path.stem]
    if path.parent.name != "parts":
        return []
    methods = sorted((ROOT / "src/potluck/methods").glob("[a-z]*.py"))
    return [one.stem for one in methods if f"fl.{path.stem}." in one.read_text(encoding="utf-8")][:5]


def tried(fault: Fault, tree: Path, until: str | None) -> dict[str, object]:
    """Who notices a fault, in a clone of the repository, and after how many seconds."""
    fault.put_into(tree)
    begun = time.monotonic()
    try:
        for stage, arguments in stages(fault):
            if noticed := first_failure(arguments, tree):
                return {"stage": stage, "test": noticed, "seconds": round(time.monotonic() - begun)}
            if stage == until:
                break
    finally:
        subprocess.run(["git", "-C", str(tree), "checkout", "-q", "--", "src"], check=True)
    return {"stage": f"nobody, up to {until}" if until else "nobody", "test": None}


def commit(tree: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def first_failure(arguments: list[str], tree: Path) -> str | None:
    """The test that fails first."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join(str(tree / place) for place in ("src", "docs", "."))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    limit = None if "-n" in arguments else ENDLESS
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "the tests do not end"
    if done.returncode in (0, 5):  # 5: no test was chosen
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.*?|\S+)(?: - |$)", done.stdout, flags=re.MULTILINE)
    return found[1] if found else "pytest cannot begin"


def tabled() -> str:
    """The table of what was tried."""
    results = json.loads(RESULTS.read_text())
    lines = [
        "# Faults that were put into the code",
        "",
        *summary(list(results.values())),
        "",
        "| | fault | noticed by | among | at |",
        "|--:|---|---|---|---|",
    ]
    for number, one in sorted(results.items(), key=lambda item: int(item[0])):
        place = f"`{one['file']}:{one['line']}` `{shown(one['before'])}` → `{shown(one['after'])}`"
        who = f"`{one['test']}`" if one["test"] else one.get("why", "nobody")
        lines.append(f"| {number} | {place} | {who} | {one['stage']} | {one['commit']} |")
    return "\n".join(lines) + "\n"


def summary(results: list[dict[str, Any]]) -> list[str]:
    """How many of them tests noticed, and how the others were."""
    turns = [one for one in results if one["stage"].startswith("another turn's")]
    unseen = [one for one in results if not one["test"]]
    noticed = len(results) - len(turns) - len(unseen)
    by_hand = sum(one.get("by_hand", False) for one in results)
    return [
        f"{len(results)} faults, drawn by `python benchmarks/faults.py` with the seed {SEED}, each alone in the",
        f"code of the commit beside it: {noticed} are noticed by tests that `.ci/run` chose there for a commit",
        f"that has them, {len(turns)} only by tests whose turn is at another commit. {len(unseen)} are noticed by",
        f"none that was run, and the code was read to see why. {by_hand} were tried by hand against the one",
        "test that is named: it, or the rule that chooses it, came after the others were tried.",
    ]


def shown(code: str) -> str:
    """Code in a cell of a table."""
    return re.sub(r"\s+", " ", code).strip().replace("|", "\\|")[:60]


def main() -> None:
    """Draw, try, or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--only", default="0-59", help="numbers, such as 3 or 0-19")
    parser.add_argument("--until", help="the last stage that is run, such as 'near, slow'")
    given = parser.parse_args()
    if given.table:
        print(tabled(), end="")
        return
    first, _, last = given.only.partition("-")
    for number, fault in list(enumerate(drawn()))[int(first) : int(last or first) + 1]:
        outcome = {} if given.draw else tried(fault, given.tree.resolve(), given.until)
        print(number, json.dumps(asdict(fault) | outcome | {"commit": commit(ROOT)}), flush=True)


if __name__ == "__main__":
    main()
