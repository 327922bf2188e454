"""Hooks of the site: links to files of the repository stay within it, and every page leads to its other language.

A page links to `../benchmarks/README.md` or `../examples/agent.sh` as on disk. Such Markdown files become pages of the site,
and other files are copied into it, all below `repository/`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
#: folder of the site for files of the repository that are not guides
_FOLDER = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside of docs/ that a page, or one of those files, links to."""
    known, waiting = set[str](), [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        uri = waiting.pop()
        for target in _list_outside(uri):
            added = f"{_FOLDER}/{target}"
            if added in known or not (ROOT / target).is_file():
                continue
            known.add(added)
            files.append(File.generated(config, added, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at their copies, and name the other language at the top of an English page."""
    uri = page.file.src_uri
    text = _LINK.sub(lambda match: match[1] + _rewrite(uri, match[2]) + match[3], markdown)
    if uri.startswith((f"{_FOLDER}/", "zh/")) or files.get_file_from_path(f"zh/{uri}") is None:
        return text
    head, _, rest = text.partition("\n")
    return f"{head}\n\n[中文](zh/{uri})\n{rest}"


def _locate(uri: str) -> PurePosixPath:
    """Return the place of a page in the repository."""
    return PurePosixPath(uri.removeprefix(f"{_FOLDER}/") if uri.startswith(f"{_FOLDER}/") else f"docs/{uri}")


def _resolve(uri: str, link: str) -> str | None:
    """Return the place of a link of a page in the repository; None for an address."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    return os.path.normpath(_locate(uri).parent / link)


def _list_outside(uri: str) -> list[str]:
    text = (ROOT / _locate(uri)).read_text(encoding="utf-8")
    targets = (_resolve(uri, match[2]) for match in _LINK.finditer(text))
    return [target for target in targets if target is not None and not target.startswith(("docs/", ".."))]


def _rewrite(uri: str, link: str) -> str:
    target = _resolve(uri, link)
    if target is None or target.startswith(".."):
        return link
    place = target.removeprefix("docs/") if target.startswith("docs/") else f"{_FOLDER}/{target}"
    if not target.startswith("docs/") and not (ROOT / target).is_file():
        return link
    return os.path.relpath(place, PurePosixPath(uri).parent)
