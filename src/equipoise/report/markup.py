"""HTML elements. Text is escaped unless it is known to be markup."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

VOID = frozenset({"meta", "br", "hr"})


class Markup(str):
    """Text that is HTML already. Only the functions of this module make it."""

    __slots__ = ()


def tag(name: str, /, *children: str | Iterable[str], **attributes: str | int | bool | None) -> Markup:
    """Return an element.

    Args:
        name: The tag.
        children: Elements and texts, possibly nested. Texts are escaped.
        attributes: `class_` is written as `class` and `data_x` as `data-x`. `True` writes the name alone; `None` and
            `False` omit the attribute.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name in VOID else f"{start}{join(children)}</{name}>")


def join(children: Iterable[str | Iterable[str]]) -> Markup:
    """Concatenate elements and texts."""
    return Markup("".join(_escaped(child) for child in children))


def _escaped(child: str | Iterable[str]) -> str:
    if isinstance(child, Markup):
        return str(child)
    return html.escape(child) if isinstance(child, str) else join(child)


def raw(name: str, text: str, /, **attributes: str | None) -> Markup:
    """Return a style or script element around trusted text, which must not contain the end tag."""
    if f"</{name}" in text.lower():
        raise ValueError(f"the text contains the end tag of its {name} element")
    return Markup(f"{tag(name, **attributes).removesuffix(f'</{name}>')}{text}</{name}>")


def embedded_json(value: Any, id_: str) -> Markup:
    """Return a script element with data; characters that could be markup are written as \\u escapes."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return raw("script", text, type="application/json", id=id_)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Markup:
    """Return a title and a table that scrolls on a narrow screen; the first column names the rows."""
    head = tag("tr", [tag("th", column, scope="col") for column in columns])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    content = tag("table", tag("thead", head), tag("tbody", body))
    return join([tag("h3", title), tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=title)])
