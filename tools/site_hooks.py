"""Hooks of mkdocs: notebooks as pages, and formulas as MathML, so that the site loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

NOTEBOOKS = Path("examples")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every notebook, and its pictures."""
    from mkdocs.structure.files import File

    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = as_markdown(json.loads(notebook.read_text(encoding="utf-8")), notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files


def as_markdown(notebook: dict[str, Any], path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page of Markdown, with its outputs, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![figure of the code above]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.insert(1, f"The notebook is `{path.as_posix()}`.")
    return "\n\n".join(parts) + "\n", pictures


UNIT = re.compile("(?<=[0-9]) (?=[±%×])|(?<=[0-9] ±) (?=[0-9])")


def on_page_content(content: str, **_: Any) -> str:
    """Prepare a page for browsers and phones.

    Formulas in TeX become MathML, which needs no script. A picture links to its file, where a phone can enlarge it. A
    number and its unit stay on one line.
    """
    content = re.sub(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>', r'<p><a href="\2">\1</a></p>', content)
    content = re.sub(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', _formula, content, flags=re.DOTALL)
    parts = re.split("(<(?:pre|code)[ >].*?</(?:pre|code)>)", content, flags=re.DOTALL)  # code as it is
    return "".join(part if i % 2 else UNIT.sub("\N{NO-BREAK SPACE}", part) for i, part in enumerate(parts))


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = "block" if match[2] == "[" else "inline"
    return f'<{match[1]} class="formula">{convert(html.unescape(match[3]).strip(), display=display)}</{match[1]}>'
