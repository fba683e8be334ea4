"""Sphinx settings of the site that `make docs` builds: Markdown by MyST, the theme Furo, Mermaid as SVG."""

import base64
import html

import mermaidx
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

project = "Graftwork"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Graftwork"
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]


class Mermaid(SphinxDirective):
    """Draw a Mermaid diagram when the page is built, so that the site needs no JavaScript for it."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the diagram as an image inside the page."""
        source = "\n".join(self.content)
        data = base64.b64encode(mermaidx.render(source).svg().encode()).decode()
        image = f'<img alt="{html.escape(source)}" src="data:image/svg+xml;base64,{data}">'
        return [nodes.raw("", image, format="html")]


def setup(app: Sphinx) -> None:
    """Register the directive of ```mermaid blocks."""
    app.add_directive("mermaid", Mermaid)
