"""The statements of the guide docs/rewards.md hold."""

import re
from pathlib import Path

import pytest

from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("page", ["rewards.md", "zh/rewards.md"])
def test_every_scorer_has_its_row(page: str) -> None:
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert set(REWARDS) <= set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows)))


@pytest.mark.parametrize("page", ["rewards.md", "zh/rewards.md"])
def test_the_example_plugin_works(page: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(# my_rewards.py.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    plugin = tmp_path / "my_rewards.py"
    plugin.write_text(example)
    sample = RewardSample(response="please", columns={"difficulty": 1})
    with RewardPool(["polite", "rank", "code"], settings=RewardSettings(external_plugins=(str(plugin),))) as pool:
        tested = RewardSample(response="```python\na = 1\n```", columns={"difficulty": 2, "tests": ["assert a == 1"]})
        results = pool.score([tested, tested])
        with pytest.raises(ValueError, match="'code' cannot score"):
            pool.check(sample)
    assert results[0].parts == {"polite": 0.0, "polite/shouts": 0.0, "rank": 19.0, "code": 1.0, "code/all_passed": 1.0}
