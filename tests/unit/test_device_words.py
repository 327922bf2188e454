"""Device libraries are spoken to in two places only."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mindspeed_rl"
ALLOWED = ("platform", "adaptors")
DEVICE_WORDS = re.compile(r"torch\.cuda|torch\.npu|torch_npu|\.cuda\(|\.npu\(|torch\s+import\s+(cuda|npu)\b")

SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ALLOWED]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_platform_and_adaptors_name_a_device_library(path):
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if DEVICE_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_words_are_found_where_they_are_allowed():
    assert any(DEVICE_WORDS.search(path.read_text(encoding="utf-8")) for path in (PACKAGE / "platform").rglob("*.py"))
