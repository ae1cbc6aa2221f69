"""Hooks of the documentation site: pages that lie beside `docs` belong to it as well."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
RESULTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/*/RESULTS.md"))
# Files of the repository, and where they are in the site.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    **{path: f"results/{Path(path).parent.name}.md" for path in RESULTS},
}
SOURCES = {page: path for path, page in PAGES.items() if path != "README.md"}
_LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside `docs`, and the pictures of results."""
    for page, path in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text("utf-8")))
        if page.startswith("results/"):
            for picture in (ROOT / path).parent.glob("*.png"):
                place = f"results/{Path(path).parent.name}/{picture.name}"
                files.append(File.generated(config, place, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links between the files of the repository to the pages of the site."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        target = os.path.normpath(f"{os.path.dirname(source)}/{found[1]}")
        if source.startswith("benchmarks/") and target.endswith(".png"):
            target = f"docs/results/{Path(source).parent.name}/{Path(target).name}"
        inside = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside is None:  # a file of the repository that is no page
            return f'](# "{target} in the repository")'
        return f"]({os.path.relpath(inside, os.path.dirname(here) or '.')}{found[2] or ''})"

    return _LINK.sub(link, markdown)
