"""Judges of the product's runs: a server of chat completions whose replies follow from the letters of a response."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: model of the server -> its score of a text, out of 10
JUDGES: dict[str, Callable[[str], int]] = {
    "capitals": lambda text: min(10, 3 * sum("A" <= letter <= "Z" for letter in text)),
    "digits": lambda text: min(10, 4 * sum("0" <= letter <= "9" for letter in text)),
    "early": lambda text: 10 * ("A" <= text[:1] <= "Z"),
}
#: the prompt of a judge
PROMPT = "Judge <<{response}>>"


def score(response_ids: list[int]) -> float:
    """The median of the scores of all judges, from 0 to 1, of tokens of which printable ones are their characters."""
    text = "".join(chr(token) for token in response_ids if 32 <= token < 127)
    return sorted(judge(text) for judge in JUDGES.values())[1] / 10


class _Handler(BaseHTTPRequestHandler):
    """Replies as the judge of the request's model."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].removeprefix("Judge <<").removesuffix(">>")
        message = {"content": f"Score: {JUDGES[body['model']](text)}"}
        content = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """The address of a server of all judges."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
