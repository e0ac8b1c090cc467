"""Is Potluck ready for PyPI? Builds it, installs it in an empty environment, and uses it there.

    python .ci/package.py [--all]

Dependencies are resolved and installed as pip does it for a user, from where pip is configured to look, but within
constraints.txt: the newest torch brings gigabytes of CUDA. That happens with one Python at a commit, in turn, of those
that the metadata name and this machine has, and with --all with each; for those that are not here dependencies are
only resolved. Needs the extra `release` and git.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
MEGABYTES = {".whl": 2, ".gz": 4}  # at most
USED = {  # in an empty folder, by the installed commands; what the output must show
    "potluck --version": "potluck {version}",
    "python -m potluck --version": "potluck {version}",
    "potluck show fedin": "method.store_capacity=5000",
    "potluck run federation.clients=5 run.rounds=2 run.workers=1": "after 2 rounds",
    "potluck report runs": "report.html",
    "potluck new method mine": "test_mine.py",
}
IMPORTED = """
import ast, importlib.util, pathlib, sys
from importlib.metadata import packages_distributions, requires
import potluck
from packaging.requirements import Requirement

folder = pathlib.Path(potluck.__file__).parent
assert folder.is_relative_to(sys.prefix), f"{folder} is not in the environment"
used = {}
for path in folder.rglob("*.py"):
    if "templates" not in path.parts:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            used |= {name.partition(".")[0]: path for name in names}
plain = lambda name: name.lower().replace("_", "-")
declared = [Requirement(text) for text in requires("potluck")]
needed = {plain(one.name) for one in declared if one.marker is None}
extra = {plain(one.name) for one in declared} - needed
called = {"google": "protobuf"}  # packages that are imported by another name
owners = packages_distributions()
wrong = []
for name, path in sorted(used.items()):
    if name in sys.stdlib_module_names or name in ("potluck", "IPython"):  # a notebook has the latter already
        continue
    owned = {plain(owner) for owner in owners.get(name, [])}
    known = called.get(name, plain(name))
    if not owned & needed and not any(known in (one, one.removesuffix("-skinny")) for one in extra):
        wrong.append(f"{path} imports {name}, of {owned or 'a package that is not installed'}")
assert not wrong, "not declared: " + "; ".join(wrong)
"""


def main() -> None:
    """Check everything; end with a line that says what is wrong."""
    with tempfile.TemporaryDirectory(prefix="potluck-package-") as scratch:
        place = Path(scratch)
        sdist, wheel = timed("build", build, place / "dist")
        timed("contents and metadata", check_contents, sdist, wheel)
        here = {version: path for version in supported(wheel) if (path := found(version)) is not None}
        for version in supported(wheel):
            if version not in here:
                timed(f"dependencies for Python {version}, which is not here", check_resolution, version)
        for version, interpreter in here.items() if "--all" in sys.argv else [in_turn(here)]:
            python = timed(f"install on Python {version}", install, interpreter, place / version, wheel)
            timed(f"use on Python {version}", use, python, place / f"empty-{version}", metadata(wheel)["Version"])


def in_turn(here: dict[str, Path]) -> tuple[str, Path]:
    """The Python whose turn it is at this commit, and where it is."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return list(here.items())[int(commit, 16) % len(here)]


def timed(what, step, *given):
    """What a step returns; prints how long it took."""
    begun = time.monotonic()
    result = step(*given)
    print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)
    return result


def build(to: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    ran([sys.executable, "-m", "build", "--outdir", to, ROOT])
    (sdist,), (wheel,) = to.glob("*.tar.gz"), to.glob("*.whl")
    ran([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Both hold the files that git knows and no others, and describe what is inside."""
    for file in (sdist, wheel):
        expect(file.stat().st_size < MEGABYTES[file.suffix] * 1e6, f"{file.name} has {file.stat().st_size:,} bytes")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    tops = (*included["only-include"], "pyproject.toml", ".gitignore")
    same(f"{sdist.name}", in_sdist(sdist), {name for name in tracked if name.split("/")[0] in tops} | {"PKG-INFO"})
    packaged = {name.removeprefix("src/"): name for name in tracked if name.startswith("src/potluck/")}
    with zipfile.ZipFile(wheel) as files:
        same(wheel.name, {name for name in files.namelist() if ".dist-info/" not in name}, set(packaged))
        for inside, outside in packaged.items():
            expect(files.read(inside) == (ROOT / outside).read_bytes(), f"{inside} in the wheel is not {outside}")
        licence = next(name for name in files.namelist() if name.endswith("licenses/LICENSE"))
        expect(files.read(licence) == (ROOT / "LICENSE").read_bytes(), "the wheel has another licence")
    check_metadata(metadata(wheel))


def in_sdist(sdist: Path) -> set[str]:
    """Names of the files, without the leading folder."""
    with tarfile.open(sdist) as files:
        return {member.name.partition("/")[2] for member in files if member.isfile()}


def check_metadata(facts: Message) -> None:
    """Version, licence and description are right, and the description stands without the files around it."""
    text = str(facts.get_payload())
    expect(facts["License-Expression"] == "Apache-2.0", f"the licence is {facts['License-Expression']}")
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    expect(citation is not None and citation[1] == facts["Version"], "CITATION.cff has another version")
    links = re.findall(r"\]\((?!https?://)[^)]*\)", text)
    expect(not links, f"the description has links that lead nowhere on PyPI: {', '.join(links)}")
    named = re.findall(r"\(`((?:docs|examples|benchmarks)/[^`]+|[A-Z]+\.md)`\)", text)
    expect(len(named) > 10, "the description does not name the files that the README links to")
    lost = [name for name in named if not (ROOT / name).exists()]
    expect(not lost, f"the description names files that are not there: {', '.join(lost)}")


def metadata(wheel: Path) -> Message:
    """The metadata in a wheel."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(files.read(name))


def supported(wheel: Path) -> list[str]:
    """The Pythons that the metadata name, such as 3.11; the one that runs this is among them."""
    lines = metadata(wheel).get_all("Classifier") or []
    versions = [line.rpartition(" ")[2] for line in lines if re.search(r"Python :: 3\.\d+$", line)]
    ours = "{}.{}".format(*sys.version_info)
    expect(ours in versions, f"this Python is not one of {', '.join(versions)}")
    return versions


def found(version: str) -> Path | None:
    """An interpreter of this version on this machine: the one that runs this, on the path, or one of pyenv's."""
    if version == "{}.{}".format(*sys.version_info):
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    asked = "import ensurepip, sys; print('{}.{}'.format(*sys.version_info))"
    for candidate in filter(None, candidates):  # pyenv also puts names on the path that lead nowhere
        answer = subprocess.run([candidate, "-c", asked], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return Path(candidate)
    return None


def check_resolution(version: str) -> None:
    """For this Python there are ready-made wheels of all dependencies that go together."""
    command = [uv(), "pip", "compile", "--no-config", "--quiet", "--python-version", version]
    ran([*command, "--only-binary", ":all:", "--constraint", CONSTRAINTS, ROOT / "pyproject.toml"])


def uv() -> Path:
    """The program that the extra `release` installs beside Python."""
    return Path(sys.executable).with_name("uv")


def install(interpreter: Path, environment: Path, wheel: Path) -> Path:
    """The Python of a new environment that holds the wheel and what it declares."""
    ran([interpreter, "-m", "venv", environment])
    python = environment / "bin" / "python"
    ran([python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, wheel])
    return python


def use(python: Path, folder: Path, version: str) -> None:
    """Each command works in an empty folder, and so does the test that `potluck new` writes."""
    folder.mkdir()
    ran([python, "-c", IMPORTED], folder)
    for line, expected in USED.items():
        program, *words = line.split()
        output = ran([python.with_name(program), *words], folder)
        expect(expected.format(version=version) in output, f"{line}: found no {expected!r} in\n{output}")
    page = (folder / "runs" / "report.html").read_text(encoding="utf-8")
    expect("<script" in page and "<style" in page, "report.html lacks its script or style")
    ran([python, "-m", "pip", "install", "--quiet", "--no-compile", "pytest"])
    ran([python, "-m", "pytest", "-q", "test_mine.py"], folder)


def ran(command: Sequence[str | Path], folder: Path = ROOT) -> str:
    """The output of a command that succeeds; the checkout is not on its path."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "POTLUCK_DATA")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env={**outside, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", "NO_COLOR": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, f"{' '.join(words)[:200]} exits with {done.returncode}:\n{done.stdout}")
    return done.stdout


def same(name: str, found: set[str], expected: set[str]) -> None:
    """Both are equal; what is missing or should not be there is named."""
    for title, names in (("lacks", expected - found), ("should not hold", found - expected)):
        expect(not names, f"{name} {title} {', '.join(sorted(names))}")


def expect(holds: bool, otherwise: str) -> None:
    """End with a message unless something holds."""
    if not holds:
        sys.exit(f"package: {otherwise}")


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("package: git was not found; the check compares with the files that git knows")
    main()
