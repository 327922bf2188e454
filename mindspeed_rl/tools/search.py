"""The tool `search`: BM25 over your own documents, or a retrieval server with the interface of MindSpeed-RL and verl."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from mindspeed_rl.files import describe_missing
from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.tools.interface import JsonObject, ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.running import HungThreads, run_in_thread
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Config, RowOptions, Session, Tool, ToolError, ToolResult

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


class Search(Tool):
    """Searches documents or a retrieval server.

    Args:
        config: documents (a jsonl file, or several) with text_key and title_key, or retrieval_service_url with timeout; topk.
        schema: None for the tool's own; otherwise with a parameter `query`, or `query_list` for several queries.
    """

    def __init__(self, config: Config, schema: object, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        documents, self._url = options.read("documents"), options.read_text("retrieval_service_url")
        self._keys = (options.read_text("title_key"), options.read_text("text_key"))
        self._topk = options.read_integer("topk", 3, 1, 100)
        options.discard("num_workers", "rate_limit", "enable_global_rate_limit", "timeout", "type")  # see tool_file
        options.reject_unknown()
        if (documents is None) == (self._url is None):
            raise ValueError(f"{where}: search needs documents, a jsonl file, or retrieval_service_url, one of them")
        if self._url is not None and urlsplit(self._url).scheme not in ("http", "https"):
            raise ValueError(f"{where}.retrieval_service_url is {self._url!r}, but must look like http://host:port/retrieve")
        files = documents if isinstance(documents, list) else [documents] if documents else []
        self._files = [Path(str(file)) for file in files]
        for file in self._files:
            if not file.is_file():
                raise ValueError(f"{where}.documents: there is no file '{file}': {describe_missing(file)}")
        self._where = where
        super().__init__(settings, [validate_schema(_SCHEMA if schema is None else schema, where)])
        properties = self.schemas[0]["function"]["parameters"].get("properties", {})
        if not {"query", "query_list"} & set(properties):
            raise ValueError(f"{where}: the schema of a search has a parameter 'query' or 'query_list'")
        self._threads = HungThreads(settings.max_parallel)
        self._corpus: _Corpus | None = None

    async def start(self, processes: WorkerPool) -> None:
        """See `Tool`; reads the corpus."""
        if self._files:
            self._corpus = await run_in_thread(partial(_Corpus.read, self._files, *self._keys, where=self._where))

    def open(self, options: RowOptions) -> Session:
        """See `Tool`."""

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            query = call.arguments.get("query_list", call.arguments.get("query"))
            queries = query if isinstance(query, list) else [query]
            if not 0 < len(queries) <= _MAX_QUERIES or not all(isinstance(text, str) and text.strip() for text in queries):
                raise ToolError(f"search takes from 1 to {_MAX_QUERIES} queries, texts that are not empty", "bad_arguments")
            found = await self._search([text[:_MAX_QUERY] for text in queries], timeout_s)
            return ToolResult("\n---\n".join(found), metrics={"queries": float(len(queries))})

        return Session(run)

    async def close(self) -> None:
        """See `Tool`."""
        self._corpus = None

    async def _search(self, queries: Sequence[str], timeout_s: float) -> list[str]:
        if (corpus := self._corpus) is not None:
            self._threads.check()
            return await self._threads.run(lambda: [corpus.find(query, self._topk) for query in queries])
        assert self._url is not None  # one of the two is set
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        async with HttpClient(_MAX_REPLY_BYTES, follows_redirects=True) as client:
            try:
                texts = await client.request("POST", self._url, _read_results, json=body, timeout_s=timeout_s)
            except HttpError as error:
                raise ToolError(f"the search server does not answer: {error}", "crashed") from None
        return [text or f"nothing was found for {query!r}" for query, text in zip(queries, texts)]


class _Corpus:
    """Documents with their index.

    Args:
        documents: title, which may be empty, and text of each one.
    """

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        self._documents = list(documents)
        self._index = _Bm25Index([f"{title} {text}" for title, text in documents])

    @classmethod
    def read(cls, files: Sequence[Path], title_key: str | None, text_key: str | None, *, where: str) -> _Corpus:
        """Read the documents of jsonl files.

        Args:
            title_key: None for title or name, if a document has one.
            text_key: None for text, contents, content, passage or document.

        Raises:
            ValueError: a line is not a JSON object, or has no text; the message has file and line.
        """
        documents = []
        for file in files:
            with file.open(encoding="utf-8") as lines:
                for index, line in enumerate(lines, 1):
                    if line.strip():
                        documents.append(_read_document(line, title_key, text_key, f"{where}.documents: {file}:{index}"))
        if not documents:
            raise ValueError(f"{where}.documents: {', '.join(map(str, files))} holds no document")
        return cls(documents)

    def find(self, query: str, count: int) -> str:
        """Return the best documents as text for the model."""
        best = self._index.find_best(query, count)
        return _write_documents([self._documents[row] for row, _ in best]) or f"nothing was found for {query!r}"


def _read_document(line: str, title_key: str | None, text_key: str | None, location: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{location} is not a JSON object")
    text = row.get(text_key) if text_key else next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
    if not isinstance(text, str):
        raise ValueError(f"{location} has no text under {text_key or ', '.join(_TEXTS)}; but {', '.join(row)} (see text_key)")
    title = row.get(title_key) if title_key else next((row[key] for key in _TITLES if isinstance(row.get(key), str)), "")
    return str(title or ""), text


def _write_documents(documents: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f"Doc {index}(Title: {title})\n{text}\n" if title else f"Doc {index}\n{text}\n"
        for index, (title, text) in enumerate(documents, 1)
    )


def _read_results(reply: HttpReply) -> list[str]:
    """Read the documents of each query: {"result": [[{"document": {"contents"}}, ...], ...]}."""
    if not 200 <= reply.status < 300:
        raise HttpError(f"HTTP Error {reply.status}: {reply.text[:200]}")
    try:
        results = reply.read_json()["result"]
        return [_write_documents([_split_title(entry) for entry in entries]) for entries in results]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolError(f"the search server's reply is not what it should be ({type(error).__name__})") from None


def _split_title(entry: JsonObject) -> tuple[str, str]:
    document = entry.get("document", entry)
    title, newline, text = str(document["contents"]).partition("\n")  # the corpora of Search-R1 start with a quoted title
    return (title.strip('"'), text) if newline else ("", title)


# a word, or one character of a script without blanks between words
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")


def _split_words(text: str) -> list[str]:
    """Return the lower-case words of a text; each Chinese, Japanese or Korean character, and each pair of neighbors, is one."""
    words = []
    end, previous = -1, ""
    for match in _WORD.finditer(text.lower()):
        word = match.group()
        words.append(word)
        spaceless = len(word) == 1 and word >= "぀"
        if spaceless and previous and match.start() == end:
            words.append(previous + word)
        end, previous = match.end(), word if spaceless else ""
    return words


class _Bm25Index:
    """Okapi BM25 over a list of texts: an inverted index in arrays; thread-safe.

    score(q, d) = sum over words w of q of idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|)), f = count of w in d;
    idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)), n = documents with w. Robertson and Zaragoza 2009, Lucene's idf.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts: dict[str, tuple[array[int], array[int]]] = {}
        lengths = np.zeros(len(texts), dtype=np.float32)
        for index, text in enumerate(texts):
            frequencies = Counter(_split_words(text))
            lengths[index] = sum(frequencies.values())
            for word, count in frequencies.items():
                documents, times = counts.setdefault(word, (array("i"), array("i")))
                documents.append(index)
                times.append(count)
        self._size = len(texts)
        norms = k1 * (1 - b + b * lengths / max(float(lengths.mean()) if len(texts) else 0.0, 1e-9))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word in list(counts):
            documents, times = counts.pop(word)  # one form at a time in memory
            rows, f = np.frombuffer(documents, dtype=np.intc), np.frombuffer(times, dtype=np.intc).astype(np.float32)
            idf = np.log1p((self._size - len(rows) + 0.5) / (len(rows) + 0.5))
            self._postings[word] = (rows, (idf * f * (k1 + 1) / (f + norms[rows])).astype(np.float32))

    def find_best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return (row, score) of the best documents, best first, in order of rows if equal; none with a score of 0."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word, times in Counter(_split_words(query)).items():
            if word in self._postings:
                rows, weights = self._postings[word]
                scores[rows] += times * weights
        order = np.argsort(-scores, kind="stable")[:count]
        return [(int(row), float(scores[row])) for row in order if scores[row] > 0]
