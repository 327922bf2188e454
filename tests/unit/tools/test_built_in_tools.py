"""The tools that come with the project."""

import asyncio
import json
import math
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from toolboxes import call, open_toolbox

from mindspeed_rl.tools.calculator import compute
from mindspeed_rl.tools.search import _Bm25Index, _split_words
from mindspeed_rl.tools.tool import ToolError


def turns(folder, entry, *calls):
    """The replies to calls that a trajectory makes one turn after the other."""

    async def run():
        async with open_toolbox(folder, entry) as box:
            tools = box.open({})
            return [(await tools.call([one]))[0] for one in calls]

    return asyncio.run(asyncio.wait_for(run(), 60))


def code(text):
    return call("code_interpreter", code=text)


# ---------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2+3)*4", "20"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-2^2", "-4"),
        ("2**0.5", "1.41421356237"),
        ("0.1+0.2", "0.3"),
        ("10**30", "1" + "0" * 30),
        ("17 % 5 + 17 // 5", "5"),
        ("sqrt(16) + round(2.567, 1)", "6.6"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("max(1, 2, gcd(12, 18))", "6"),
        ("cos(pi)", "-1"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1/0",
        "9**9**9",
        "2**99999999",
        "(-8)**0.5",
        "10.0**400",
        "__import__('os').system('true')",
        "(1).__class__",
        "'a'*9",
        "[1]*9",
        "x",
        "lcm(10**1000, 10**1000+1) ** 9",
        "(" * 900,
        "+" * 999 + "1",
        "1" * 2000,
        "round(1, 10**9)",
        "floor(1, 2)",
        "True",
        "1j",
        "1e999",
        "\x00",
        "1 if 1 else 2",
    ],
)
def test_the_calculator_says_what_it_cannot_compute_and_at_once(expression):
    begun = time.monotonic()
    try:
        said = compute(expression)
    except ToolError as error:
        said = str(error)
        assert error.problem == "bad_arguments"
    assert time.monotonic() - begun < 10 and len(said) < 2500  # some of them would never end


def test_finish_ends_the_trajectory_with_its_answer(tmp_path):
    (reply,) = turns(tmp_path, "finish", call("finish", answer="42"))
    assert reply.text == "42" and reply.ends_trajectory and not reply.failed


# ---------------------------------------------------------------------- code


def test_code_says_what_it_prints_and_its_last_value_and_keeps_its_names(tmp_path):
    replies = turns(
        tmp_path,
        "code_interpreter",
        code("import math\nx = 3\nprint('once')\nx + 1"),
        code("```python\ndef area(r):\n    return round(math.pi * r ** 2, 2)\n```"),
        code("x = area(x)"),
        code("1 / 0"),
        code("x"),
        code("import random\nprint(random.random())"),
        code("exit()"),
    )
    assert [reply.text for reply in replies[:3]] == ["once\n4", "", ""]
    assert not replies[3].failed and "ZeroDivisionError: division by zero" in replies[3].text
    assert "<call 4>" in replies[3].text and "program.py" not in replies[3].text
    assert replies[4].text == "28.27"
    import random

    assert replies[5].text == str(random.Random(0).random())
    assert replies[6].text == ""


def test_code_that_is_ended_leaves_the_names_as_they_were(tmp_path):
    entry = {"tool": "code_interpreter", "limits": {"timeout_s": 1.0}, "config": {"memory_mib": 256}}
    replies = turns(
        tmp_path,
        entry,
        code("x = 1"),
        code("x = 2\nprint('begun', flush=True)\nwhile True: pass"),
        code("x = 3\ny = bytearray(1 << 30)"),
        code("x"),
        code("import os\nos._exit(3)"),
    )
    assert (replies[1].problem, replies[4].problem) == ("timeout", "failed")
    assert "begun" in replies[1].text and "took longer than 1 s" in replies[1].text
    assert "MemoryError" in replies[2].text
    assert replies[3].text == "3"  # one that raised keeps what it did before
    assert "status 3" in replies[4].text


def test_code_that_prints_a_gigabyte_is_heard_in_part(tmp_path):
    (reply,) = turns(tmp_path, {"tool": "code_interpreter", "limits": {"timeout_s": 20}}, code("print('x' * 2**30)"))
    assert len(reply.text) < 1 << 18


def test_code_reaches_neither_network_nor_files_nor_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    (tmp_path / "secret").write_text("hidden")
    program = f"import os\nprint('SECRET_OF_THE_RUN' in os.environ)\nprint(os.path.exists({str(tmp_path / 'secret')!r}))"
    (reply,) = turns(tmp_path, "code_interpreter", code(program))
    assert reply.text == "False\nFalse"


def test_the_shipped_file_of_another_project_means_the_sandbox(tmp_path):
    entry = {
        "class_name": "mindspeed_rl.tools.retool.ReTool",
        "config": {
            "num_workers": 128,
            "enable_global_rate_limit": True,
            "rate_limit": 64,
            "default_timeout": 30,
            "default_language": "python",
            "memory_limit_mb": 1024,
            "type": "native",
        },
        "tool_schema": {
            "type": "function",
            "function": {
                "name": "code_interpreter",
                "description": "A tool for executing code.",
                "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
            },
        },
    }
    assert turns(tmp_path, entry, code("6 * 7"))[0].text == "42"


# ---------------------------------------------------------------------- search

DOCUMENTS = [
    {"title": "Rome", "text": "The capital of Italy is Rome. Rome has seven hills."},
    {"title": "Oslo", "text": "Oslo is the capital of Norway."},
    {"title": "", "text": "A hill is lower than a mountain."},
    {"title": "北京", "text": "北京是中国的首都。"},
]


def corpus(folder, documents=DOCUMENTS):
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents))
    return {"tool": "search", "config": {"documents": str(file), "topk": 2}}


def test_search_finds_the_fitting_documents_best_first(tmp_path):
    replies = turns(
        tmp_path,
        corpus(tmp_path),
        call("search", query="capital of Norway"),
        call("search", query="中国首都"),
        call("search", query="zebra"),
        call("search", query="  "),
    )
    assert replies[0].text.startswith("Doc 1(Title: Oslo)\nOslo is the capital of Norway.\n")
    assert "Doc 2(Title: Rome)" in replies[0].text
    assert replies[1].text == "Doc 1(Title: 北京)\n北京是中国的首都。\n"
    assert replies[2].text == "nothing was found for 'zebra'"
    assert replies[3].problem == "bad_arguments"


def test_bm25_scores_are_those_of_the_formula():
    texts = ["a b c a", "b c d", "a", "", "e f g a a a a b"]
    k1, b = 1.2, 0.75
    mean = sum(len(text.split()) for text in texts) / len(texts)

    def score(query, text):
        total, counts = 0.0, Counter(text.split())
        for word in query.split():
            n = sum(word in other.split() for other in texts)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            f = counts[word]
            total += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(text.split()) / mean))
        return total

    for query in ("a", "a b", "d g", "a a c", "z"):
        wanted = sorted(((score(query, text), -row) for row, text in enumerate(texts)), reverse=True)
        found = _Bm25Index(texts).find_best(query, 5)
        assert [row for row, _ in found] == [-row for value, row in wanted if value > 0]
        assert [value for _, value in found] == pytest.approx([value for value, _ in wanted if value > 0], rel=1e-5)


def test_words_of_scripts_without_blanks_are_characters_and_pairs():
    assert _split_words("GPT-4, 北京!ok") == ["gpt", "4", "北", "京", "北京", "ok"]


def test_a_corpus_that_cannot_be_read_is_told_with_its_line(tmp_path):
    for line, said in (("{", "documents.jsonl:2 is not JSON"), ("[1]", "not a JSON"), ('{"body": "x"}', "no text under")):
        entry = corpus(tmp_path)
        with open(entry["config"]["documents"], "w") as file:
            file.write(json.dumps(DOCUMENTS[0]) + "\n" + line + "\n")
        with pytest.raises(ValueError, match=said):
            turns(tmp_path, entry, call("search", query="x"))


def test_search_asks_a_retrieval_server_as_other_projects_do(tmp_path):
    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found = [[{"document": {"contents": f'"{query}"\nbody'}, "score": 1.0}] for query in asked[-1]["queries"]]
            body = json.dumps({"result": found}).encode() if len(asked) == 1 else b"nonsense"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    asked = []
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        schema = {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query_list": {"type": "array", "items": {"type": "string"}}},
                "required": ["query_list"],
            },
        }
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        config = {"retrieval_service_url": url, "topk": 1, "num_workers": 8, "rate_limit": 8, "timeout": 30, "type": "native"}
        entry = {"class_name": "mindspeed_rl.tools.search_tool.SearchTool", "config": config, "tool_schema": schema}
        question = call("search", query_list=["one", "two"])
        good, bad = turns(tmp_path, entry, question, question)
    finally:
        server.shutdown()
        server.server_close()
    assert asked[0] == {"queries": ["one", "two"], "topk": 1, "return_scores": True}
    assert good.text == "Doc 1(Title: one)\nbody\n\n---\nDoc 1(Title: two)\nbody\n"
    assert bad.problem == "failed" and "not what it should be" in bad.text
    (gone,) = turns(tmp_path, entry, question)
    assert gone.problem == "crashed"
