"""Requests of a client without the SDK to a training service: http.client, and the messages of passes."""

import http.client
import json

import numpy as np
from patience import patient

from mindspeed_rl.service import messages, protobuf

ALICE, BOB = "tml-alice-12345", "tml-bob-1234567"


def write_pass(model_id, seq, tokens, targets, weights=None, *, loss="cross_entropy", forward_only=False, config=(), inputs=()):
    arrays = {"target_tokens": np.array(targets, np.int64)}
    if loss == "cross_entropy":
        arrays["weights"] = np.ones(len(targets), np.float32) if weights is None else np.array(weights, np.float32)
    arrays |= dict(inputs)

    def write(array):
        kind = 1 if array.dtype == np.float32 else 2
        return {"dense": array.tobytes(), "dtype": kind, "shape": list(array.shape)}

    datum = {
        "model_input": [{"encoded_text": {"tokens": np.array(tokens, np.int32).tobytes()}}],
        "loss_fn_inputs": [{"key": name, "value": write(array)} for name, array in arrays.items()],
    }
    message = {"model_id": model_id, "seq_id": seq, "data": [datum], "loss_fn": loss, "forward_only": forward_only}
    values = [{"key": name, "value": value} for name, value in config]
    return protobuf.encode(messages._PASS_REQUEST, message | {"loss_fn_config": values})


def read_pass(content):
    message = protobuf.decode(messages._PASS_RESULT, memoryview(content))
    outputs = protobuf.read_map(message["loss_fn_outputs"][0]["fields"])
    return protobuf.read_map(message["metrics"]), np.frombuffer(outputs["logprobs"]["data"], np.float32)


class Requests:
    """Requests to a server at `port`."""

    port: int
    base_model, lora_config = "bigram", {"rank": 2}

    def send(self, method, path, body=None, key=ALICE, headers=None, connection=None):
        """Return status and content; a dict is sent as JSON."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        kind = {"content-type": "application/json"} if isinstance(body, dict) else {}
        own = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(60))
        own.request(method, f"/api/v1/{path}", content, {"x-api-key": key, **kind, **(headers or {})})
        reply = own.getresponse()
        data = reply.read()
        if connection is None:
            own.close()
        return reply.status, json.loads(data) if reply.headers["content-type"] == "application/json" else data

    def post(self, path, body, key=ALICE, **options):
        status, reply = self.send("POST", path, body, key, **options)
        assert status == 200, reply
        return reply

    def fetch(self, future, key=ALICE):
        while True:
            reply = self.post("retrieve_future", {"request_id": future["request_id"]}, key)
            if not isinstance(reply, dict) or reply.get("type") != "try_again":
                return reply

    def open_model(self, key=ALICE):
        session = self.post("create_session", {}, key)["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": self.base_model}
        return self.fetch(self.post("create_model", {**body, "lora_config": self.lora_config}, key), key)["model_id"]

    def run_pass(self, *arguments, key=ALICE, **options):
        headers = {"content-type": "application/x-protobuf"}
        return self.send("POST", "forward_backward", write_pass(*arguments, **options), key, headers)

    def step(self, model, seq, key=ALICE):
        return self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}, key)
