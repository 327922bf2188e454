"""What the documents name exists: links, files of this repository, commands, run files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from patience import patient

from mindspeed_rl.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
FOLDERS = ("mindspeed_rl", "configs", "envs", "examples", "tools", "tests", "benchmarks", "docs")

#: the default of prompt_type_path, a file of MindSpeed-RL's that is read where a user has it
NOT_SHIPPED = ("configs/model/templates.json",)

LINK = re.compile(r"\]\(([^)\s]+)\)")
#: a path from the root; one that goes on with a wildcard, a placeholder or a brace is a pattern, no path
ROOT_PATH = re.compile(rf"(?<![\w./~-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w(?![\w./-]*[*<{{\[])/?")
#: a Python file below the package's folder, as the guides abbreviate it: `isolation/sandbox.py`
PACKAGE_FILE = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)*/[a-z_0-9]+\.py)`")
COMMAND = re.compile(r"\bmindspeed-rl +([a-z]\w*(?:-\w+)*)\b")
RUN_FILE = re.compile(r"--config-name[ =]([a-z][\w-]+)")  # NAME and X are placeholders


def anchors(document: Path) -> set[str]:
    """The names that a link into a document may have after "#"."""
    text = document.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)"></a>', text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}.union(named)


def dead_links(document: Path) -> list[str]:
    dead = []
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    return dead


def missing_files(text: str) -> list[str]:
    missing = [path for path in ROOT_PATH.findall(text) if not (ROOT / path).exists() and path not in NOT_SHIPPED]
    abbreviated = [path for path in PACKAGE_FILE.findall(text) if not path.startswith(tuple(f"{name}/" for name in FOLDERS))]
    return missing + [path for path in abbreviated if not (ROOT / "mindspeed_rl" / path).exists()]


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_named_files_exist(document: Path) -> None:
    assert missing_files(document.read_text(encoding="utf-8")) == []


def test_named_commands_exist(document: Path) -> None:
    assert set(COMMAND.findall(document.read_text(encoding="utf-8"))) <= set(COMMANDS)


def test_named_run_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    known = {path.stem for path in ROOT.glob("configs/**/*.yaml")}
    made_there = set(re.findall(r"^# file: (\S+)\.yaml$", text, re.MULTILINE))
    assert set(RUN_FILE.findall(text)) <= known | made_there


def test_every_chinese_page_has_its_english_one() -> None:
    english = {path.name for path in ROOT.glob("docs/*.md")} | {path.name.lower() for path in ROOT.glob("*.md")}
    assert {path.name for path in ROOT.glob("docs/zh/*.md")} <= english


def test_every_english_page_has_its_chinese_one() -> None:
    english = {path.name for path in ROOT.glob("docs/*.md")}
    assert english <= {path.name for path in ROOT.glob("docs/zh/*.md")}


def pages_of(nav: object) -> list[str]:
    """The files that a site's navigation names."""
    if isinstance(nav, str):
        return [nav]
    branches = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [page for branch in branches for page in pages_of(branch)]


def test_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = pages_of(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    assert sorted(pages) == sorted(str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md"))


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed: pip install mkdocs-material")
def test_the_site_is_built_and_can_be_searched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any(entry["location"].startswith("zh/observability/") for entry in result)
    assert any("init_kl_coef" in entry["text"] for entry in result)


def test_what_is_missing_is_found() -> None:
    text = "see `mindspeed_rl/nowhere.py`, tests/gone/, `rewards/gone.py`, docs/*.md, examples/mcore/<model>/, envs/{a,b}/x"
    assert missing_files(text) == ["mindspeed_rl/nowhere.py", "tests/gone/", "rewards/gone.py"]
    assert COMMAND.findall("mindspeed-rl traim --help; mindspeed-rl <command>; mindspeed-rl   plan") == ["traim", "plan"]
