"""What the two pages of an audit share, the coordinator's and a site's letter:
escaping templates, one stylesheet, and one script that the browser checks by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fednoro.core.wording import one_line, percent
from fednoro.report.web.palette import DARK, LIGHT

# Beside the report's colours:
# the edges of controls (3:1 on paper), and the ground of a row that was changed.
THEMES = {
    "light": {**LIGHT, "edge": "#7d868d", "wash": "#e2eef1"},
    "dark": {**DARK, "edge": "#7c868e", "wash": "#1d333b"},
}


def render(template: str, **values: Any) -> bytes:
    """A self-contained HTML file; every value is escaped."""
    script = _text("audit.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser then runs this script alone and asks nobody for anything,
    # whatever a name may contain.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    style = Markup(_colours() + _text("audit.css"))
    html = (
        _environment()
        .get_template(template)
        .render(policy=policy, style=style, script=Markup(script), **values)
    )
    return html.encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fednoro.report.web", "templates/audit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "count": lambda n: f"{n:,}", "plain": plain}
    return environment


@cache
def _colours() -> str:
    """Both themes as custom properties: as the system prefers, or as chosen;
    print is always light.
    """
    light, dark = (
        f"color-scheme:{name};" + "".join(f"--{key}:{value};" for key, value in theme.items())
        for name, theme in THEMES.items()
    )
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=light]{{{light}}}:root[data-theme=dark]{{{dark}}}}}\n"
    )


@cache
def _text(name: str) -> str:
    return (files("fednoro.report.web") / "templates" / "audit" / name).read_text(encoding="utf-8")


def plain(text: str) -> str:
    """A name on one line,
    without what would steer a terminal or turn the direction of writing round.
    """
    return one_line(text) or "(no name)"
