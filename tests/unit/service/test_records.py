"""Records of a service's calls: what a backend cannot do is refused where it enters, in a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rl.service.backend import (
    AdamParams,
    AdapterSpec,
    CallError,
    Capabilities,
    Datum,
    LossCall,
    SampleCall,
    check_data,
)
from mindspeed_rl.service.model_folder import ModelRecord, building

OFFERED = Capabilities("tiny", Path("model"), 100, 16, 8, 4, unembed=True, full_weights=False)


def datum(**changes: Any) -> Datum:
    inputs: dict[str, Any] = {
        "target_tokens": np.array([5, 6, 7]),
        "logprobs": np.zeros(3, np.float32),
        "advantages": np.ones(3, np.float32),
    }
    tokens = changes.pop("tokens", [4, 5, 6])
    return Datum(tokens, {name: value for name, value in (inputs | changes).items() if value is not None})


def check(loss: str = "ppo", **changes: Any) -> Callable[[], None]:
    return lambda: check_data([datum(), datum(**changes)], LossCall(loss), OFFERED)  # pyrefly: ignore[bad-argument-type]


def sample(prompt: Any = (5, 6), **settings: Any) -> Callable[[], None]:
    return lambda: SampleCall(prompt, **settings).check(OFFERED)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: LossCall("stable_reinforce"), "'stable_reinforce' is not offered; it can be cross_entropy, importance_sampling"),  # pyrefly: ignore[bad-argument-type]
    (lambda: LossCall("ppo", {"clip_low": 0.8}), "'ppo' has no 'clip_low'; it takes clip_low_threshold, clip_high_threshold"),
    (lambda: LossCall("ppo", {"clip_low_threshold": 1.5}), "clip_low_threshold 1.5 is above clip_high_threshold 1.2"),
    (lambda: LossCall("dro", {"beta": float("nan")}), "loss_fn_config.beta: nan is not a finite number of at least 0"),
    (lambda: LossCall("dro", {"beta": "0.1"}), "loss_fn_config.beta: '0.1' is not a number"),  # pyrefly: ignore[bad-argument-type]
    (lambda: AdapterSpec(0), "rank: 0 is not positive"),
    (lambda: AdapterSpec(4, train_attn=False, train_mlp=False, train_unembed=False), "nothing would be trained"),
    (lambda: AdamParams(learning_rate=float("inf")), "adam_params.learning_rate: inf is not a finite number"),
    (lambda: AdamParams(beta2=1.0), "adam_params.beta2: 1.0 is not from 0 to below 1"),
    (lambda: AdamParams(eps=0.0), "adam_params.eps: 0.0 is not above 0"),
    (lambda: check_data([], LossCall("ppo"), OFFERED), "at least one datum"),
    (check(tokens=[]), "data[1].model_input has 0 tokens; it must have 1 to 16"),
    (check(tokens=[1] * 17), "has 17 tokens"),
    (check(tokens=[4, 5, 100]), "data[1].model_input: token id 100 is not in the vocabulary of 100"),
    (check(target_tokens=np.array([5, 6, -1])), "target_tokens: token id -1 is not in the vocabulary"),
    (check(target_tokens=np.array([5.0, 6.0, 7.0])), "token ids are integers, not float64"),
    (check(advantages=None), "'advantages' is missing; ppo needs target_tokens, logprobs, advantages"),
    (check(target_tokens=None), "'target_tokens' is missing"),
    (check(mask=np.ones(3)), "ppo has no 'mask'; it takes"),
    (check(advantages=np.ones(2)), "advantages has shape (2,); expected (3,)"),
    (
        check(advantages=np.array([1.0, np.nan, 1.0])),
        "data[1].loss_fn_inputs.advantages has a value that is not a finite number",
    ),
    (check(target_tokens=np.ones((3, 2), int)), "target_tokens has shape (3, 2); expected (3,)"),
    (check("gspo", sequence_ratio_mask=np.zeros(3)), "sequence_ratio_mask marks no token"),
    (check(clip_low_threshold=np.full(3, -0.5)), "clip_low_threshold has a value below 0"),
    (check(clip_low_threshold=np.full(3, 2.0)), "clip_low_threshold is above clip_high_threshold at token 0 (2.0 and 1.2)"),
    (
        lambda: check_data([datum(clip_low_threshold=np.ones(3)), datum()], LossCall("ppo"), OFFERED),
        "data[1].loss_fn_inputs: 'clip_low_threshold' is missing, which others of the data have; give it to all or to none",
    ),
    (sample(()), "prompt has 0 tokens; it must have 1 to 15"),
    (sample([5] * 16), "prompt has 16 tokens"),
    (sample([5, 200]), "prompt: token id 200"),
    (sample(max_tokens=15), "max_tokens: 15 is not from 0 to 14"),
    (sample(max_tokens=-1), "max_tokens: -1"),
    (sample(num_samples=0), "num_samples: 0 is not positive"),
    (sample(temperature=-1.0), "temperature: -1 must be 0 (greedy) or from 0.01 to 2"),
    # which vLLM would raise to 0.01
    (sample(temperature=0.005), "temperature: 0.005 must be 0 (greedy) or from 0.01 to 2"),
    (sample(temperature=float("nan")), "temperature: nan must be 0"),
    (sample(top_p=0.0), "top_p: 0.0 is not above 0"),
    (sample(top_k=-2), "top_k: -2"),
    (sample(stop_tokens=(500,)), "sampling_params.stop: token id 500"),
    (sample(stop_strings=("",)), "an empty text would end every sample"),
    (sample(top_log_probs=101), "topk_sample_logprobs: 101"),
    (sample(target_log_probs=np.zeros((2, 1), int)), "target_prompt_logprobs has shape (2, 1); expected (1, K)"),
    (lambda: ModelRecord.read(Path("/nothing"), "tiny"), "/nothing is no saved model"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_a_wrong_call_is_refused_with_what_is_wrong(make: Callable[[], object], text: str) -> None:
    with pytest.raises(CallError) as error:
        make()
    assert text in str(error.value)


def test_sound_calls_pass_and_have_complete_thresholds() -> None:
    check()()
    marked = datum(sequence_ratio_mask=np.array([0, 1, 1]))
    check_data([marked, marked], LossCall("gspo"), OFFERED)
    sample(temperature=0.0)()
    sample(temperature=0.01)()
    sample(max_tokens=14, stop_tokens=(3,), target_log_probs=np.array([[6, -1]]))()
    wide = {"target_tokens": np.ones((3, 2), int), "weights": np.ones((3, 2)), "logprobs": None, "advantages": None}
    check_data([datum(**wide)], LossCall("cross_entropy"), OFFERED)
    assert LossCall("cispo", {"clip_high_threshold": 5.0}).config == {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    record = ModelRecord(AdapterSpec(4, seed=1, train_mlp=False), "tiny", 7, has_optimizer=True)
    with pytest.raises(RuntimeError), building(tmp_path / "one") as folder:
        record.write(folder)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with building(tmp_path / "one") as folder:
        record.write(folder)
        assert not (tmp_path / "one").exists()
    assert ModelRecord.read(tmp_path / "one", "tiny") == record
    with pytest.raises(CallError, match="is of the base tiny, not other"):
        ModelRecord.read(tmp_path / "one", "other")
    with pytest.raises(CallError, match="exists already"), building(tmp_path / "one"):
        pass
