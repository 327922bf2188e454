"""The pool: the right scores in the right order, and a run that goes on whatever a scorer does."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from patience import patient

from mindspeed_rl.rewards.pool import RewardFailureError, RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings

PLUGINS = (str(Path(__file__).parent / "plugins.py"),)


def settings(**changes: object) -> RewardSettings:
    defaults = {"external_plugins": PLUGINS, "num_reward_workers": 2, "reward_failure_limit": 1.0, "reward_timeout_s": 20.0}
    return RewardSettings(**{**defaults, **changes})


def samples(*responses: str, label: str = "1") -> list[RewardSample]:
    return [RewardSample(prompt="q", response=response, label=label) for response in responses]


@pytest.fixture(scope="module")
def hostile_pool():
    with RewardPool(["hostile"], settings=settings(reward_memory_gib=0.15)) as pool:
        yield pool


def test_scores_are_weighted_and_come_back_in_order() -> None:
    with RewardPool(["acc", "format"], [1.0, 0.5], settings=settings()) as pool:
        batch = samples(*(f"<think>x</think><answer>\\boxed{{{i % 3}}}</answer>" for i in range(100)))
        results = pool.score(batch)
        again = pool.score(batch)
    assert [result.total for result in results] == [1.5 if i % 3 == 1 else 0.0 for i in range(100)]
    assert results[0].parts == {"acc": -0.5, "format": 1.0}
    assert again == results


def test_a_batch_that_is_given_up_leaves_nothing_running_and_the_pool_scores_on() -> None:
    with RewardPool(["hostile"], settings=settings()) as pool:
        with pytest.raises(TimeoutError, match=r"[1-9]\d* reward calls for 9 samples are open after 0.3 s"):
            pool.score(samples("sleep", *["a"] * 8), timeout_s=0.3)
        assert [result.total for result in pool.score(samples("a", "b"))] == [1.0, 1.0]


def test_a_worker_that_dies_between_two_batches_costs_nothing() -> None:
    others = psutil.Process().children()
    with RewardPool(["hostile"], settings=settings()) as pool:
        pool.score(samples("a", "b"))
        (spawner,) = [process for process in psutil.Process().children() if process not in others]
        workers = spawner.children()
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, timeout=patient(10))
        assert [result.total for result in pool.score(samples("a", "b"))] == [1.0, 1.0]


def test_an_empty_batch_and_rows_for_the_reward_model_are_skipped() -> None:
    with RewardPool(["exact_match"], settings=settings()) as pool:
        assert pool.score([]) == []
        left = RewardSample(response="1", label="1", columns={"categories": False})
        results = pool.score([left, *samples("1")])
    assert [(result.total, result.state) for result in results] == [(None, "skipped"), (1.0, "ok")]


def test_a_pool_without_functions_leaves_everything_to_the_reward_model() -> None:
    with RewardPool([], settings=settings(num_reward_workers=1)) as pool:
        assert [result.state for result in pool.score(samples("a", "b"))] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    ("deed", "state", "words"),
    [
        ("segfault", "crashed", "SIGSEGV"),
        ("exit", "crashed", "status 3"),
        ("raise", "failed", "KeyError"),
        ("nan", "failed", "not a finite number"),
        ("text", "failed", "not a finite number"),
        ("eat", "memory", "memory"),
        ("eat in a child", "memory", "memory"),
    ],
)
def test_a_hostile_scorer_costs_one_sample_and_nothing_else(
    hostile_pool: RewardPool, deed: str, state: str, words: str
) -> None:
    before = hostile_pool.counters[state]
    results = hostile_pool.score(samples("a", "b", deed, "c", "d"))
    assert [result.total for result in results] == [1.0, 1.0, None, 1.0, 1.0]
    assert results[2].state == state and results[2].failed and words in results[2].error and "hostile" in results[2].error
    assert hostile_pool.counters[state] == before + 1


@pytest.mark.parametrize("deed", ["sleep", "spin"])
def test_a_scorer_that_never_ends_is_killed_and_the_rest_is_scored(deed: str) -> None:
    with RewardPool(["hostile"], settings=settings(reward_timeout_s=0.5)) as pool:
        results = pool.score(samples("a", deed, "b"))
        assert [result.total for result in results] == [1.0, None, 1.0]
        assert results[1].state == "timeout" and "longer than 0.5 s" in results[1].error
        assert pool.counters["timeout"] == pool.counters["workers_replaced"] == 1


def test_a_scorer_that_forks_scores_once(hostile_pool: RewardPool) -> None:
    results = hostile_pool.score(samples("a", "fork", "b"))
    assert [result.total for result in results] == [1.0, 1.0, 1.0]


def test_many_failures_of_every_kind_are_all_counted_and_the_rest_is_scored(hostile_pool: RewardPool) -> None:
    deeds = ["segfault", "exit", "raise", "a", "eat"] * 4
    results = hostile_pool.score(samples(*deeds))
    assert [result.state for result in results] == ["crashed", "crashed", "failed", "ok", "memory"] * 4


def test_what_a_scorer_leaves_behind_dies_with_the_pool() -> None:
    others = psutil.Process().children()
    with RewardPool(["hostile"], settings=settings()) as pool:
        pool.score(samples("leave a child", "leave a child"))
        (spawner,) = [process for process in psutil.Process().children() if process not in others]
        family = [spawner, *_descendants(spawner.pid)]
        assert len(family) >= 5  # spawner, two workers, two left behind
    _assert_gone(family)


def test_everything_dies_with_the_process_of_the_pool_even_when_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        from mindspeed_rl.rewards.pool import RewardPool
        from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
        pool = RewardPool(["hostile"], settings=RewardSettings(external_plugins={PLUGINS!r}, num_reward_workers=2))
        pool.score([RewardSample(response="leave a child")])
        print("ready", flush=True)
        pool.score([RewardSample(response="sleep")])
        """)
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"ready\n"
    family = _descendants(driver.pid)
    assert len(family) >= 4
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    _assert_gone(family)


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_pool_that_ends_while_it_is_told_something_leaves_nothing_either() -> None:
    program = textwrap.dedent("""
        import os, socket, subprocess, sys
        from mindspeed_rl.isolation.spawner import _Spawner
        ours, theirs = socket.socketpair()

        class Told(_Spawner):
            def _serve(self, events, woken):
                print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
                theirs.close()
                self._control.sendall(b"a worker died")

        Told(ours, os.getpid()).run()
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60), check=True)
    assert not ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))


def _assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=patient(10))
    assert not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_dict_is_logged_part_by_part_and_its_texts_become_notes() -> None:
    with RewardPool(["parts", "summed"], [2.0, 1.0], settings=settings()) as pool:
        result = pool.score(samples("abc"))[0]
    assert result.parts == {"parts": 0.5, "parts/length": 3.0, "summed": 3.0, "summed/a": 1.0, "summed/b": 2.0}
    assert result.notes == {"parts/remark": "fine"}
    assert result.total == 2.0 * 0.5 + 3.0


def test_functions_of_every_form_get_prompts_ids_labels_and_columns() -> None:
    batch = [
        RewardSample(prompt="q", response=text, response_ids=[1] * n, label="ab", columns={"difficulty": d, "colour": "ab"})
        for text, n, d in [("a", 5, 0.5), ("ab", 2, 2.0), ("abc", 9, 1.0)]
    ]
    names = ["difficulty_batch", "group_rank", "async_sample", "async_batch", "swift_style", "wants_column"]
    with RewardPool(names, settings=settings()) as pool:
        results = pool.score(batch)
    assert [result.parts for result in results] == [
        dict(zip(names, values))
        for values in [(0.5, 1.0, 0.0, 0.0, 3.0, 0.0), (4.0, 0.0, 1.0, 1.0, 4.0, 1.0), (3.0, 2.0, 0.0, 0.0, 3.0, 0.0)]
    ]


def test_an_async_function_shares_a_worker_and_a_late_or_blocking_call_fails_alone() -> None:
    with RewardPool(["async_sample"], settings=settings(reward_timeout_s=0.5)) as pool:
        results = pool.score(samples("1", "sleep", "2", "no opinion", "sleep", "1", "block", "1"))
    states = [result.state for result in results]
    assert states == ["ok", "timeout", "ok", "skipped", "timeout", "ok", "timeout", "ok"]
    assert [result.total for result in results] == [1.0, None, 0.0, None, None, 1.0, None, 1.0]


@pytest.mark.parametrize(("policy", "total", "calls"), [("drop", None, 0), ("zero", 0.0, 0), ("retry", None, 1)])
def test_the_failure_policy_decides_what_a_failed_sample_becomes(policy: str, total: float | None, calls: int) -> None:
    with RewardPool(["hostile", "exact_match"], settings=settings(reward_failure_policy=policy)) as pool:
        results = pool.score(samples("raise", "1"))
        assert pool.counters["retries"] == calls
    assert results[0].total == total and results[0].state == "failed"
    assert results[0].parts == {"exact_match": 0.0}  # what could be scored is kept
    assert results[1].total == 2.0


def test_retry_gives_a_second_chance(tmp_path: Path) -> None:
    plugin = tmp_path / "flaky.py"
    plugin.write_text(
        textwrap.dedent(f"""
        import os
        from mindspeed_rl.rewards import register

        @register("flaky")
        def flaky(response):
            try:
                os.mkdir({str(tmp_path)!r} + "/" + response)
            except FileExistsError:
                return 1.0
            os.kill(os.getpid(), 9)
        """)
    )
    changes = {"external_plugins": (str(plugin),), "reward_failure_policy": "retry"}
    with RewardPool(["flaky"], settings=settings(**changes)) as pool:
        assert [result.total for result in pool.score(samples("a", "b", "c"))] == [1.0, 1.0, 1.0]


def test_the_run_stops_when_failures_pass_the_limit_and_the_message_names_the_culprit() -> None:
    with RewardPool(["hostile"], settings=settings(reward_failure_limit=0.25)) as pool:
        pool.score(samples(*["a"] * 60, *["raise"] * 15))  # 20 %
        with pytest.raises(RewardFailureError, match="30% of the last 100 .* 15 failed; for example hostile: KeyError"):
            pool.score(samples(*["a"] * 10, *["raise"] * 15))


def test_a_batch_in_which_everything_fails_stops_the_run_at_once() -> None:
    with RewardPool(["hostile"], settings=settings(reward_failure_limit=0.1)) as pool:
        with pytest.raises(RewardFailureError, match="100% of the last 2"):
            pool.score(samples("raise", "raise"))


@pytest.mark.parametrize(
    ("functions", "changes", "message"),
    [
        (["acc", "formt"], {"external_plugins": ()}, "unknown reward function 'formt'; did you mean 'format'"),
        (["formt"], {}, "unknown reward function 'formt'"),
        (["no_such_module_at_all:score"], {}, "cannot import the module 'no_such_module_at_all'"),
        (["json:no_such_function"], {}, "the module 'json' has no 'no_such_function'"),
        (["acc"], {"external_plugins": ("/no/such/file.py",)}, "there is no file '/no/such/file.py'"),
        (["acc", "acc"], {}, "named twice"),
        (["judge"], {}, "needs rl_config.judge_url"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_anything_is_scored(
    functions: list[str], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RewardPool(functions, settings=settings(**changes))


def test_a_plugin_that_does_not_load_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text("import math\nmath.no_such_thing\n")
    with pytest.raises(ValueError, match=r"broken.py' fails to load: AttributeError.*broken.py:2"):
        RewardPool(["acc"], settings=settings(external_plugins=(str(plugin),)))


def test_weights_must_match_the_functions() -> None:
    with pytest.raises(ValueError, match="2 reward functions .* but 1 weights"):
        RewardPool(["acc", "format"], [1.0], settings=settings())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wants_column", "'wants_column' cannot score a sample .*parameter 'colour' is not a column"),
        ("too_few", "must return a list of 1|cannot score"),
        ("difficulty_batch", "its parameter 'difficulty'"),
    ],
)
def test_the_start_up_check_says_which_function_lacks_what(function: str, message: str) -> None:
    with RewardPool([function], settings=settings(num_reward_workers=1)) as pool:
        if function == "too_few":
            assert pool.check(samples("a")[0]).total == 1.0
            assert all("one for each sample" in result.error for result in pool.score(samples("a", "b")))
            return
        with pytest.raises(ValueError, match=message):
            pool.check(samples("a")[0])


def test_a_function_of_an_importable_module_is_named_by_module_and_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text("def shout(response):\n    return float(response.isupper())\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(["my_rewards:shout"], settings=settings(external_plugins=())) as pool:
        assert [result.total for result in pool.score(samples("A", "a"))] == [1.0, 0.0]


def test_columns_of_any_kind_reach_the_worker_and_a_value_that_cannot_travel_fails_its_sample_alone() -> None:
    import numpy

    batch = samples("1", "1", "1")
    batch[0].columns = {"image": b"\x00\xff", "score": numpy.float32(0.5), "ids": numpy.arange(3), "odd": "\ud800", "set": {1}}
    batch[1].columns = {"endless": []}
    batch[1].columns["endless"].append(batch[1].columns["endless"])
    batch[2].columns = {"huge": 10**30}
    with RewardPool(["exact_match"], settings=settings()) as pool:
        results: list[RewardResult] = pool.score(batch)
    assert [result.state for result in results] == ["ok", "failed", "ok"]
    assert "cannot send" in results[1].error


def test_workers_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    plugin = tmp_path / "loaded.py"
    plugin.write_text(
        "import sys\nfrom mindspeed_rl.rewards import register\n"
        "@register('loaded')\ndef loaded():\n"
        "    return float(any(name in sys.modules for name in ('torch', 'transformers', 'vllm', 'ray')))\n"
    )
    with RewardPool(
        ["acc", "code", "cosine", "loaded"], settings=settings(external_plugins=(str(plugin),), soft_cache_length=1)
    ) as pool:
        assert pool.score(samples("x"))[0].parts.get("loaded") == 0.0


def test_a_pool_whose_spawner_is_gone_raises_instead_of_waiting() -> None:
    others = psutil.Process().children()
    with RewardPool(["hostile"], settings=settings(num_reward_workers=1)) as pool:
        (spawner,) = [process for process in psutil.Process().children() if process not in others]
        family = _descendants(spawner.pid)
        with pytest.raises(RuntimeError, match="spawner process ended"):
            pool.score(samples("kill the spawner"))
        with pytest.raises(RuntimeError, match="spawner process ended"):
            pool.score(samples("a"))
    _assert_gone(family)


def test_a_closed_pool_says_so() -> None:
    pool = RewardPool(["exact_match"], settings=settings(num_reward_workers=1))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("1"))


@pytest.mark.parametrize(
    "response",
    [
        "breaks msgpack",
        *(f"writes to every descriptor {data}" for data in ("ff" * 4096, "7fffffff93", "0000000193", "00000001c1")),
    ],
)
def test_a_function_that_breaks_the_connection_costs_its_own_sample(response: str, hostile_pool: RewardPool) -> None:
    results = hostile_pool.score(samples("a", "b", response, "c", "d"))
    assert [result.total for result in results] in ([1.0, 1.0, None, 1.0, 1.0], [1.0] * 5)  # some bytes are not a message yet
    assert [result.total for result in hostile_pool.score(samples("a", "b"))] == [1.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="the log's name is found in /proc")
@pytest.mark.slow
def test_a_function_that_prints_without_bound_does_not_fill_the_disk(tmp_path: Path) -> None:
    program = f"""
import os
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
with RewardPool(["hostile"], settings=RewardSettings(external_plugins={PLUGINS!r}, num_reward_workers=1)) as pool:
    for _ in range(3):
        results = pool.score([RewardSample(response="prints much")])
    assert [result.state for result in results] == ["ok"], results
"""
    with open(tmp_path / "reward_0.log", "ab") as log:
        subprocess.run([sys.executable, "-c", program], stdout=log, stderr=log, check=True)
    sizes = {path.name: path.stat().st_size >> 20 for path in tmp_path.iterdir()}
    assert set(sizes) == {"reward_0.log", "reward_0.log.1"} and sizes["reward_0.log.1"] >= 8
    assert sum(sizes.values()) < 250  # of 300
