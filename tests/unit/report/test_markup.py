"""HTML elements escape the text that they are given."""

import json

import pytest

from equipoise.report.markup import Markup, embedded_json, raw, tag

HOSTILE = '</script><img src=x onerror="alert(1)">\u2028<!--<script>{{7*7}}&amp;\'"'


def test_markup_escapes_all_but_itself() -> None:
    assert tag("p", "<b>", tag("b", "&"), class_='a"b', hidden=True, id=None) == (
        '<p class="a&quot;b" hidden>&lt;b&gt;<b>&amp;</b></p>'
    )
    assert isinstance(tag("p"), Markup)
    assert json.loads(embedded_json({"a": HOSTILE}, "x").partition(">")[2].removesuffix("</script>")) == {
        "a": HOSTILE
    }
    with pytest.raises(ValueError, match="contains the end tag"):
        raw("script", "'</SCRIPT>'")
