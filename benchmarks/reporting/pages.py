"""Pages as HTML files that load nothing: their Markdown, with the figures inside."""

import base64
import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.treeprocessors import Treeprocessor
from markupsafe import Markup

from benchmarks.reporting.templates import fill

CARDS = 4  # columns of a table that a phone shows as cards, a row each


def to_html(markdown: str, figures: Mapping[str, bytes | str]) -> str:
    """The page of a text whose first line is its title; HTML in the text is shown as it is written.

    What stands below a heading of the third level is folded.

    Args:
        figures: What stands in place of the images that are paragraphs: SVG files, or HTML.
    """
    reader = Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    reader.preprocessors.deregister("html_block")
    reader.inlinePatterns.deregister("html")
    reader.treeprocessors.register(_Tables(reader), "rows", 0)  # after the text of cells
    body = reader.convert(markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))

    def shown(image: re.Match[str]) -> str:
        figure = figures[unescape(image["name"])]
        if isinstance(figure, str):
            return figure
        content = base64.b64encode(figure).decode()  # by itself: styles do not meet others'
        source = f"data:image/svg+xml;base64,{content}"
        return f'<figure><img src="{source}" alt="{image["alt"]}"></figure>'

    body = re.sub(r'<p><img alt="(?P<alt>[^"]*)" src="(?P<name>[^"]*)" ?/></p>', shown, body)
    body = body.replace("<table", '<div class="wide"><table').replace("</table>", "</table></div>")
    folded = r"<details><summary>\1</summary>\2</details>\n"
    body = re.sub(r"<h3>(.*?)</h3>(.*?)(?=<h[123]>|\Z)", folded, body, flags=re.DOTALL)
    title = re.sub("<[^>]+>", "", body.partition("</h1>")[0])
    template = Path(__file__).with_name("page.html")
    return fill(template, title=Markup(title), body=Markup(body))


class _Tables(Treeprocessor):
    """The first cell of a row is its heading; each cell knows the name of its column, for a card's line."""

    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            head, body = table
            names = ["".join(cell.itertext()) for cell in head[0]]
            if len(names) >= CARDS:
                table.set("class", "cards")
            for row in body:
                for name, cell in zip(names, row, strict=True):
                    cell.set("data-name", name)
                row[0].tag = "th"
                row[0].set("scope", "row")
