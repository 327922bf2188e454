"""Calls of tools: results, failures and limits; no process is left at the end."""

import asyncio
import json
import os
import time

import psutil
import pytest
import sample_tools
from toolboxes import COUNTER_SCHEMA, call, open_toolbox

from mindspeed_rl.tools.interface import BrokenCall
from mindspeed_rl.tools.toolbox import CallLimits

ADD = {"function": "sample_tools:add"}
BAD = {"function": "sample_tools:misbehave", "limits": {"timeout_s": 0.5}}
COUNT = {"class_name": "sample_tools.Counter", "config": {"times": 2}, "tool_schema": COUNTER_SCHEMA}


def run_calls(folder, entry, *calls, limits=None, columns=None):
    """The replies to the calls of one turn of a new trajectory."""

    async def run():
        async with open_toolbox(folder, *(entry if isinstance(entry, tuple) else (entry,)), limits=limits) as box:
            tools = box.open(columns or {})
            return await tools.call(calls)

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_functions_answer_in_the_order_of_the_calls(tmp_path):
    replies = run_calls(
        tmp_path, (ADD, "sample_tools:add_later"), call("add", a=1, b=2), call("add_later", a=3, b=4), call("add", a=-1, b=0)
    )
    assert [reply.text for reply in replies] == ["3", "sum 7", "-1"]
    assert not any(reply.failed or reply.problem for reply in replies) and all(reply.seconds > 0 for reply in replies)


@pytest.mark.parametrize(
    ("how", "problem", "said"),
    [
        ("hang", "timeout", "took longer than 0.5 s"),
        ("crash", "crashed", "exited with status 7"),
        ("raise", "failed", "KeyError: 'no such thing'"),
        ("exit", "failed", "SystemExit: bye"),
        ("eat memory", "failed", "memory"),
    ],
)
def test_a_function_that_fails_is_a_message_to_the_model_and_the_tool_goes_on(tmp_path, how, problem, said):
    async def run():
        async with open_toolbox(tmp_path, BAD) as box:
            tools = box.open({})
            (bad,) = await tools.call([call("misbehave", how=how)])
            (good,) = await tools.call([call("misbehave", how="")])
            return bad, good

    bad, good = asyncio.run(run())
    assert bad.failed and bad.problem == problem and said in bad.text and bad.text.startswith("Error: ")
    assert not good.failed and good.text == "fine"


def test_a_function_that_prints_a_gigabyte_does_so_nowhere(tmp_path, capfd):
    (reply,) = run_calls(tmp_path, {**BAD, "limits": {"timeout_s": 20}}, call("misbehave", how="print much"))
    assert reply.text == "fine"
    assert len(capfd.readouterr().out) == 0


def test_what_is_returned_becomes_text_and_is_cut_from_the_named_side(tmp_path):
    entry = {**BAD, "limits": {"timeout_s": 20}}
    assert json.loads(run_calls(tmp_path, entry, call("misbehave", how="return rows"))[0].text) == {"rows": [1, 2.5, None, "ü"]}
    assert run_calls(tmp_path, entry, call("misbehave", how="return nothing"))[0].text == ""
    assert "object" in run_calls(tmp_path, entry, call("misbehave", how="return an object"))[0].text
    much = call("misbehave", how="return much")
    left, right, middle = (
        run_calls(tmp_path, entry, much, limits=CallLimits(max_response_tokens=40, truncate_side=side))[0].text
        for side in ("left", "right", "middle")
    )
    assert left == "begin" + "x" * 21 + "...(truncated)"
    assert right == "(truncated)..." + "x" * 23 + "end"
    assert middle == "begin" + "x" * 7 + "...(truncated)..." + "x" * 8 + "end"


def test_a_hanging_function_is_ended_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    (reply,) = run_calls(tmp_path, BAD, call("misbehave", how="hang with a child", detail=str(pid)))
    assert reply.problem == "timeout"
    assert not psutil.pid_exists(int(pid.read_text()))


def test_broken_and_unknown_calls_and_wrong_arguments_are_told_and_not_made(tmp_path):
    replies = run_calls(
        tmp_path,
        ADD,
        BrokenCall("{", "it is not JSON"),
        call("ad", a=1, b=2),
        call("add", a="one", b=2),
        call("add", a=1),
        call("add", a={"deep": [1] * 1000}, b=1),
        call("add", a=1, b=1),
    )
    assert [reply.problem for reply in replies] == ["broken_call", "unknown_tool", *["bad_arguments"] * 3, None]
    assert "it is not JSON" in replies[0].text
    assert "did you mean 'add'" in replies[1].text
    assert replies[2].text == "Error: argument a: 'one' is not of type 'integer'"
    assert replies[3].text == "Error: 'b' is a required property"
    assert len(replies[4].text) < 400


def test_broken_and_wrong_calls_use_up_the_calls_but_are_not_counted_as_made(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, ADD, limits=CallLimits(max_calls=3)) as box:
            tools = box.open({})
            replies = await tools.call([BrokenCall("{", "x"), call("sub", a=1), call("add", a=1, b=1), call("add", a=1, b=1)])
            return [reply.problem for reply in replies], tools.num_calls

    assert asyncio.run(run()) == (["broken_call", "unknown_tool", None, "too_many_calls"], 1)


def test_coroutines_that_never_stop_are_left_even_if_they_do_not_let_go(tmp_path):
    entry = {"function": "sample_tools:never_stop", "limits": {"timeout_s": 0.1}}

    async def run():
        async with open_toolbox(tmp_path, entry) as box:
            begun = time.monotonic()
            replies = await box.open({}).call([call("never_stop", stubborn=True), call("never_stop", stubborn=False)])
            return replies, time.monotonic() - begun

    loop = asyncio.new_event_loop()  # asyncio.run would wait for the stubborn one
    try:
        replies, took = loop.run_until_complete(run())
    finally:
        loop.close()
    assert [reply.problem for reply in replies] == ["timeout", "timeout"] and took < 5


def test_a_failed_call_is_tried_again_as_often_as_the_file_says(tmp_path):
    entry = {"function": "sample_tools:flaky", "limits": {"retries": 2}}
    sample_tools.FLAKY["left"] = 1
    assert run_calls(tmp_path, entry, call("flaky"))[0].text == "at last"
    sample_tools.FLAKY["left"] = 3
    assert run_calls(tmp_path, entry, call("flaky"))[0].text == "Error: ConnectionError: try again"
    assert sample_tools.FLAKY["left"] == 0


def test_calls_beyond_those_of_a_turn_or_of_the_trajectory_are_refused(tmp_path):
    async def run():
        limits = CallLimits(max_calls=3, max_parallel_calls=2)
        async with open_toolbox(tmp_path, "sample_tools:add_later", limits=limits) as box:
            tools = box.open({})
            turns = [await tools.call([call("add_later", a=turn, b=0)] * 3) for turn in range(2)]
            other = await box.open({}).call([call("add_later", a=9, b=0)])
            return turns, tools.num_calls, other

    (first, second), num_calls, other = asyncio.run(run())
    assert [reply.text for reply in first[:2]] == ["sum 0"] * 2 and "at most 2 calls" in first[2].text
    assert second[0].text == "sum 1" and "no calls are left" in second[1].text
    assert [reply.problem for reply in (first[2], *second[1:])] == ["too_many_calls"] * 3
    assert num_calls == 3 and other[0].text == "sum 9"


def test_a_tool_runs_as_often_at_once_as_its_file_says(tmp_path):
    entry = {"function": "sample_tools:misbehave", "limits": {"timeout_s": 0.3, "max_parallel": 2}}
    begun = time.monotonic()
    replies = run_calls(tmp_path, entry, *[call("misbehave", how="hang")] * 4)
    assert [reply.problem for reply in replies] == ["timeout"] * 4
    assert sorted(reply.seconds > 0.55 for reply in replies) == [False, False, True, True]
    assert time.monotonic() - begun < 15


def test_classes_have_an_instance_a_trajectory_that_is_released_at_its_end(tmp_path):
    sample_tools.Counter.made.clear()
    sample_tools.Counter.released.clear()

    async def run():
        async with open_toolbox(tmp_path, COUNT) as box:
            options = {"count": {"create_kwargs": {"start": 100}}}
            one, two, idle = box.open({}), box.open({"tools_kwargs": options}), box.open({})
            texts = []
            for tools in (one, one, two):
                (reply,) = await tools.call([call("count", by=3)])
                texts.append(reply.text)
                assert reply.reward == 0.5 and reply.metrics == {"by": 3.0}
            assert await idle.close() is None  # was never made
            return texts, await one.close(), await one.close()

    texts, reward, again = asyncio.run(run())
    assert texts == ["6", "12", "106"]
    assert reward == 12.0 and again is None
    assert sorted(sample_tools.Counter.released) == sorted(sample_tools.Counter.made) and len(sample_tools.Counter.made) == 2


def test_a_class_in_processes_keeps_its_state_there_and_a_hang_costs_one_trajectory_only(tmp_path):
    entry = {**COUNT, "run_in": "process", "limits": {"timeout_s": 1.0}}

    async def run():
        async with open_toolbox(tmp_path, entry) as box:
            one, two = box.open({}), box.open({})
            first = [(await tools.call([call("count", by=by)]))[0].text for tools, by in ((one, 1), (two, 5), (one, 1))]
            (hung,) = await one.call([call("count", by=1, hang=True)])
            (after,) = await one.call([call("count", by=1)])
            (other,) = await two.call([call("count", by=1)])
            return first, hung, after, other, await two.close()

    first, hung, after, other, reward = asyncio.run(run())
    assert first == ["2", "10", "4"]
    assert (hung.problem, after.problem) == ("timeout", "crashed")
    assert other.text == "12" and reward == 12.0


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_what_a_row_gives_for_the_reward_reaches_the_tool_wherever_it_runs(tmp_path, run_in):
    async def run():
        async with open_toolbox(tmp_path, {**COUNT, "run_in": run_in}) as box:
            tools = box.open(
                {"tools_kwargs": {"count": {"calc_reward_kwargs": {"weight": 10}, "release_kwargs": {"why": "end"}}}}
            )
            await tools.call([call("count", by=1)])
            return await tools.close()

    assert asyncio.run(run()) == 20.0


def test_a_class_of_coroutines_answers_with_its_own_schema(tmp_path):
    columns = {"tools_kwargs": json.dumps({"greet": {"create_kwargs": {"word": "ciao"}}})}
    assert (
        run_calls(tmp_path, {"class_name": "sample_tools:Greeter"}, call("greet", name="Rome"), columns=columns)[0].text
        == "ciao Rome"
    )


def test_threads_that_hang_take_no_more_than_their_places(tmp_path):
    entry = {**COUNT, "limits": {"timeout_s": 0.1, "max_parallel": 2}}

    async def run():
        async with open_toolbox(tmp_path, entry) as box:
            tools = box.open({})
            hung = await tools.call([call("count", by=1, hang=True)] * 2)
            return hung, await tools.call([call("count", by=1)])

    loop = asyncio.new_event_loop()
    replies, (refused,) = loop.run_until_complete(asyncio.wait_for(run(), 40))
    assert [reply.problem for reply in replies] == ["timeout", "timeout"]
    assert refused.problem == "crashed" and "hangs" in refused.text


def test_a_row_chooses_among_the_tools_and_a_wrong_name_is_an_error(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, "calculator", "finish") as box:
            chosen = box.open({"tool_selection": ["finish"]})
            assert [schema["function"]["name"] for schema in chosen.schemas] == ["finish"]
            (reply,) = await chosen.call([call("calculator", expression="1")])
            assert reply.problem == "unknown_tool"
            info = {"extra_info": {"tool_selection": ["calculator"]}}
            assert [schema["function"]["name"] for schema in box.open(info).schemas] == ["calculator"]
            with pytest.raises(ValueError, match="'calculater'.*did you mean 'calculator'"):
                box.open({"tool_selection": ["calculater"]})
            with pytest.raises(ValueError, match="tools_kwargs is text, but no JSON"):
                box.open({"tools_kwargs": "{"})

    asyncio.run(run())


def test_two_tools_of_one_name_are_an_error_before_any_call(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, "calculator", "calculator"):
            pass

    with pytest.raises(ValueError, match="two tools are called 'calculator'"):
        asyncio.run(run())


def test_a_cancelled_call_ends_its_process_and_the_box_goes_on(tmp_path):
    async def run():
        async with open_toolbox(tmp_path, {**BAD, "limits": {"timeout_s": 60}}) as box:
            me = psutil.Process()
            tools = box.open({})
            await tools.call([call("misbehave", how="")])  # its process is there
            asked = asyncio.create_task(tools.call([call("misbehave", how="hang")]))
            await asyncio.sleep(1.0)
            before = {process.pid for process in me.children(recursive=True)}
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await tools.close()
            (reply,) = await box.open({}).call([call("misbehave", how="")])
            after = {process.pid for process in me.children(recursive=True)}
            return reply, before, after

    reply, before, after = asyncio.run(run())
    assert reply.text == "fine"
    assert len(before - after) == 1  # the process of the cancelled call


def test_nothing_is_left_of_a_closed_box(tmp_path):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    descriptors = len(os.listdir("/proc/self/fd"))
    run_calls(tmp_path, (ADD, {**COUNT, "run_in": "process"}, "code_interpreter"), call("add", a=1, b=1), call("count", by=1))
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
