"""Links from the pages to other files of the repository: on the site, which has only
the pages, they become names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for every page; a link to a file that is not there is an error."""
    here = Path(page.file.abs_src_path).parent
    root = Path(config["config_file_path"]).parent

    def named(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(
                f"{page.file.src_uri} links to {match[2]}, which does not exist"
            )
        if target.is_relative_to(config["docs_dir"]):
            return match[0]  # another page
        return f"{match[1]} (`{target.relative_to(root.resolve())}`)"

    return OUTSIDE.sub(named, markdown)
