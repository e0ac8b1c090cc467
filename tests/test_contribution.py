"""A new method's file and its test are all that its author touches: the guide's method, put into a copy of the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.methods import list_methods

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs/guides/add-a-method.md"
AUTHOR = ("-c", "user.name=Me", "-c", "user.email=me@example.org")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "runs")
TEST = '''"""The guide's method."""

from potluck.methods import get_method


def test_it_is_of_the_family_of_averages():
    assert get_method("mine").family == "weights"
'''


def guides_method():
    """The last whole file of the guide, whose method is called as its new file."""
    blocks = GUIDE.read_text(encoding="utf-8").split("```python\n")[1:]
    whole = [code for block in blocks if (code := block.split("```")[0]).startswith('"""')][-1]
    return whole.replace("class LGFedAvg(", "class Mine(")


def of_other_methods():
    """What the names of cases hold that are about one of the methods that were there before."""
    forms = ("[{}]", "[{}-", "-{}-", "-{}]", "[{}:")
    return " or ".join(form.format(name) for name in list_methods() for form in forms)


@pytest.fixture
def tree(tmp_path):
    """A copy of the repository's files that has one method more."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    (copy / "src/potluck/methods/mine.py").write_text(guides_method(), encoding="utf-8")
    (copy / "tests/methods/test_mine.py").write_text(TEST, encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], [*AUTHOR, "commit", "-q", "-m", "A method more"]):
        subprocess.run(["git", *words], cwd=copy, check=True)
    return copy


@pytest.mark.slow
def test_the_guides_method_in_the_tree_touches_its_file_and_its_test_alone(tree):
    """Everything that lists, counts, documents or checks methods takes it up; the README's table is made anew."""
    paths = os.pathsep.join(str(tree / place) for place in ("src", "docs", "."))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}

    def python(*words):
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)

    made = python("-m", "sitegen.readme")
    assert made.returncode == 0, made.stderr
    files = [str(path) for path in (tree / "tests").rglob("test_*.py") if "list_methods" in path.read_text()]
    chosen = f"not ({of_other_methods()}) and not the_page_says_what_clients_keep"
    done = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--all-turns", "--deselect", "tests/test_contribution.py"),
        *("-m", "not slow", "-k", chosen, "tests/methods/test_mine.py", *files),
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert (
        "mine: declares_its_replies"
        in python(
            *("-m", "pytest", "-q", "--collect-only", "--all-turns", "-k", "mine:", "tests/test_conformance.py"),
        ).stdout
    )
