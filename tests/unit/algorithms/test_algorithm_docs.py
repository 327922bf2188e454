from pathlib import Path

import pytest

from mindspeed_rl.catalogue import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["algorithms.md", "zh/algorithms.md"])
def test_the_page_describes_every_registered_name(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    names = [*ADVANTAGES, *POLICY_LOSSES, *KL_ESTIMATORS, *CORRECTIONS]
    assert [name for name in names if f"`{name}`" not in text] == []
