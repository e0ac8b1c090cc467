"""Sphinx's settings for the site. Nothing is fetched over the network, neither now nor by a reader's browser."""

import inspect
from pathlib import Path
from typing import Any

from sphinx.addnodes import desc

from potluck._version import __version__
from sitegen.docstrings import as_rst
from sitegen.links import CodeLinks

project = "Potluck"
author = "The Potluck developers"
copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["files/**"]  # what pages link to, for download
suppress_warnings = ["myst.header"]  # tables that benchmarks write begin at the third level
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_use_rtype = False

smartquotes = False  # quotation marks in docstrings are often code

html_theme = "furo"
html_title = "Potluck"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Any) -> None:
    """Connect what is Potluck's own."""
    app.add_post_transform(CodeLinks)
    app.connect("missing-reference", _without_page)
    app.connect("autodoc-process-docstring", _convert, priority=100)  # before napoleon reads the sections
    app.connect("html-page-context", _collapse, priority=100)  # before the theme asks for the side bar


def _without_page(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Types in signatures that have no page, of other libraries or of Potluck's inside, stand there without a link.

    What a page links to in its own text must exist.
    """
    above = node.parent
    while above is not None and not isinstance(above, desc):
        above = above.parent
    return content if above is not None and node.get("refdomain") == "py" else None


def _convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are Markdown; what an alias such as `Weights` has is that of `dict`, and left out."""
    of_the_type = isinstance(obj.__doc__, str) and lines[:1] == inspect.cleandoc(obj.__doc__).split("\n")[:1]
    lines[:] = [] if what == "data" and of_the_type else as_rst(lines)


def _collapse(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Show in the side bar the branch of the page alone; with all methods everywhere, a build takes twice as long."""
    whole = context["toctree"]
    context["toctree"] = lambda **options: whole(**{**options, "collapse": True})
