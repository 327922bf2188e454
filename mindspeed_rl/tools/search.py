"""The tool `search`: BM25 over a corpus of one's own, or a retrieval server as MindSpeed-RL and verl ask it."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.python_tool import refuse_if_hung
from mindspeed_rl.tools.running import HungThreads, run_in_thread
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import (
    IGNORED_OPTIONS,
    AcceptedOptions,
    CallSettings,
    Session,
    StatelessSession,
    ToolError,
    ToolResult,
)

_SCHEMA = {
    "name": "search",
    "description": "Searches a collection of documents and returns those that fit best.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    },
}
_MAX_QUERIES, _MAX_QUERY, _MAX_REPLY_BYTES = 16, 4096, 16 << 20
_TITLES, _TEXTS = ("title", "name"), ("text", "contents", "content", "passage", "document")


class Search:
    """See the module.

    Args:
        config: documents (a jsonl file, or several) with text_key and title_key, or retrieval_service_url with timeout; topk.
        schema: None for the tool's own; else its parameters are `query`, or `query_list` for several at once.
    """

    modules: tuple[str, ...] = ()
    takes: AcceptedOptions = IGNORED_OPTIONS

    def __init__(self, config: Mapping[str, Any], schema: Any, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        documents, self._url = options.take("documents"), options.text("retrieval_service_url")
        self._keys = (options.text("title_key"), options.text("text_key"))
        self._topk = options.whole("topk", 3, 1, 100)
        options.ignore("num_workers", "rate_limit", "enable_global_rate_limit", "timeout", "type")  # see tool_file
        options.end()
        if (documents is None) == (self._url is None):
            raise ValueError(f"{where}: search needs documents, a jsonl file, or retrieval_service_url, one of them")
        if self._url is not None and urlsplit(self._url).scheme not in ("http", "https"):
            raise ValueError(f"{where}.retrieval_service_url is {self._url!r}, but must look like http://host:port/retrieve")
        self._files = (
            [Path(str(file)) for file in (documents if isinstance(documents, list) else [documents])] if documents else []
        )
        for file in self._files:
            if not file.is_file():
                raise ValueError(f"{where}.documents: there is no file '{file}'")
        self._where, self.settings = where, settings
        self._schema = validate_schema(_SCHEMA if schema is None else schema, where)
        properties = self._schema["function"]["parameters"].get("properties", {})
        if not {"query", "query_list"} & set(properties):
            raise ValueError(f"{where}: the schema of a search has a parameter 'query' or 'query_list'")
        self._threads = HungThreads(settings.max_parallel)
        self._corpus: Corpus | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`; reads the corpus."""
        if self._files:
            self._corpus = await run_in_thread(lambda: Corpus.read(self._files, *self._keys, where=self._where))

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`."""
        return _SearchSession(self)

    async def close(self) -> None:
        """See `Tool`."""
        self._corpus = None

    async def find(self, queries: Sequence[str], timeout_s: float) -> list[str]:
        """Return the text of what fits, for each query.

        Raises:
            ToolError: the server does not answer as it should.
        """
        refuse_if_hung(self._threads)
        corpus, url = self._corpus, self._url
        if corpus is not None:
            return await self._threads.run(lambda: [corpus.find(query, self._topk) for query in queries])
        assert url is not None  # one of the two is given
        return await self._threads.run(lambda: _ask(url, queries, self._topk, timeout_s))


class _SearchSession(StatelessSession):
    def __init__(self, search: Search) -> None:
        self._search = search

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        asked = call.arguments.get("query_list", call.arguments.get("query"))
        queries = asked if isinstance(asked, list) else [asked]
        if not queries or len(queries) > _MAX_QUERIES or not all(isinstance(query, str) and query.strip() for query in queries):
            raise ToolError(f"search takes from 1 to {_MAX_QUERIES} queries, texts that are not empty", "bad_arguments")
        found = await self._search.find([query[:_MAX_QUERY] for query in queries], timeout_s)
        return ToolResult("\n---\n".join(found), metrics={"queries": float(len(queries))})


class Corpus:
    """Documents with their index."""

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        """
        Args:
            documents: title, which may be empty, and text of each.
        """
        self._documents = list(documents)
        self._index = Bm25Index([f"{title} {text}" for title, text in documents])

    @classmethod
    def read(cls, files: Sequence[Path], title_key: str | None, text_key: str | None, *, where: str) -> Corpus:
        """Return the documents of jsonl files.

        Args:
            title_key: None for title or name, where a document has one.
            text_key: None for text, contents, content, passage or document.

        Raises:
            ValueError: a line is no JSON object, or has no text; names file and line.
        """
        documents = []
        for file in files:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        documents.append(_document(line, title_key, text_key, f"{where}.documents: {file}:{number}"))
        if not documents:
            raise ValueError(f"{where}.documents: {', '.join(map(str, files))} holds no document")
        return cls(documents)

    def find(self, query: str, count: int) -> str:
        """Return the documents that fit best, written for the model."""
        best = self._index.best(query, count)
        return _written([self._documents[row] for row, _ in best]) or f"nothing was found for {query!r}"


def _document(line: str, title_key: str | None, text_key: str | None, place: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no JSON object")
    text = row.get(text_key) if text_key else next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
    if not isinstance(text, str):
        raise ValueError(f"{place} has no text under {text_key or ', '.join(_TEXTS)}; but {', '.join(row)} (see text_key)")
    title = row.get(title_key) if title_key else next((row[key] for key in _TITLES if isinstance(row.get(key), str)), "")
    return str(title or ""), text


def _written(documents: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f"Doc {number}(Title: {title})\n{text}\n" if title else f"Doc {number}\n{text}\n"
        for number, (title, text) in enumerate(documents, 1)
    )


def _ask(url: str, queries: Sequence[str], count: int, timeout_s: float) -> list[str]:
    """Ask {"queries", "topk", "return_scores"}; the reply is {"result": [[{"document": {"contents"}}, ...], ...]}."""
    body = json.dumps({"queries": list(queries), "topk": count, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        # straight to the server: what the environment says of proxies is not for it
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as reply:
            found = json.loads(reply.read(_MAX_REPLY_BYTES))["result"]
        texts = [_written([_retrieved(entry) for entry in entries]) for entries in found]
        return [text or f"nothing was found for {query!r}" for query, text in zip(queries, texts)]
    except (OSError, urllib.error.URLError) as error:
        raise ToolError(f"the search server does not answer: {error}", "crashed") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ToolError(f"the search server's reply is not what it should be ({type(error).__name__})") from None


def _retrieved(entry: Mapping[str, Any]) -> tuple[str, str]:
    document = entry.get("document", entry)
    title, newline, text = str(document["contents"]).partition("\n")  # the corpora of Search-R1 begin with a quoted title
    return (title.strip('"'), text) if newline else ("", title)


# Okapi BM25

# a word, or one character of a script that has no blanks between words
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")


def words(text: str) -> list[str]:
    """Return the words of a text in small letters; each Chinese, Japanese or Korean character, and each pair of neighbours, is one."""
    found = []
    end, last = -1, ""
    for match in _WORD.finditer(text.lower()):
        word = match.group()
        found.append(word)
        spaceless = len(word) == 1 and word >= "぀"
        if spaceless and last and match.start() == end:
            found.append(last + word)
        end, last = match.end(), word if spaceless else ""
    return found


class Bm25Index:
    """score(q, d) = sum over words w of q of idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|)), f = count of w in d;
    idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)), n = documents with w. Robertson and Zaragoza 2009, Lucene's idf.

    Args:
        texts: the documents.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts: dict[str, tuple[array[int], array[int]]] = {}
        lengths = np.zeros(len(texts), dtype=np.float32)
        for number, text in enumerate(texts):
            frequencies = Counter(words(text))
            lengths[number] = sum(frequencies.values())
            for word, count in frequencies.items():
                documents, times = counts.setdefault(word, (array("i"), array("i")))
                documents.append(number)
                times.append(count)
        self._size = len(texts)
        norms = k1 * (1 - b + b * lengths / max(float(lengths.mean()) if len(texts) else 0.0, 1e-9))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word in list(counts):
            documents, times = counts.pop(word)  # one form at a time in memory
            rows, f = np.frombuffer(documents, dtype=np.intc), np.frombuffer(times, dtype=np.intc).astype(np.float32)
            idf = np.log1p((self._size - len(rows) + 0.5) / (len(rows) + 0.5))
            self._postings[word] = (rows, (idf * f * (k1 + 1) / (f + norms[rows])).astype(np.float32))

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Numbers and scores of the documents that fit best, best first, the earlier of equals; none that do not fit at all."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word, times in Counter(words(query)).items():
            if word in self._postings:
                rows, weights = self._postings[word]
                scores[rows] += times * weights
        order = np.argsort(-scores, kind="stable")[:count]
        return [(int(row), float(scores[row])) for row in order if scores[row] > 0]
