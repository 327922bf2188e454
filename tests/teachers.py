"""Distillation in tests: a term of the objective, and HTTP handlers of teachers on servers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from mindspeed_rl.catalogue.objective import Distillation

TERM = Distillation(
    loss_mode="forward_kl_topk",
    topk=3,
    topk_rest="drop",
    beta=0.5,
    use_task_rewards=False,
    coef=1.0,
    loss_max_clamp=None,
    log_prob_min_clamp=None,
    use_policy_gradient=False,
    weights=(1.0,),
    estimator=None,
)


class TeacherHandler(BaseHTTPRequestHandler):
    """Requests to a server with one model, in vLLM's form; `complete` has its log-probs."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entries = self.complete(body["prompt"], body["prompt_logprobs"])
        if entries is None:
            self.send_error(503)
        else:
            self.answer({"choices": [{"prompt_logprobs": entries}]})

    def complete(self, ids: list[int], count: int) -> list[dict[str, Any] | None] | None:
        """Return the `prompt_logprobs` of the tokens, `count` of the most probable ones in each; None: busy."""
        raise NotImplementedError

    def answer(self, value: object) -> None:
        """Send a value as JSON."""
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass
