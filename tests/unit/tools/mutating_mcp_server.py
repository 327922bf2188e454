"""An MCP server whose replies have one field changed: `python mutating_mcp_server.py PLACE SEED`.

PLACE: "call" for results of calls, "list" for the list of tools, "start" for the first reply. The last call of a session, of
the tool "sound", has a sound result.
"""

import json
import random
import sys

from spoilt_values import change_field

RESULT = {
    "content": [
        {"type": "text", "text": "ok"},
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///x", "text": "t"}},
    ],
    "structuredContent": {"a": [1, {"b": None}]},
    "isError": False,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": []}
TOOLS = {"tools": [{"name": name, "description": "d", "inputSchema": SCHEMA} for name in ("changed", "sound")]}
START = {"protocolVersion": "", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}


def main() -> None:
    place, at = sys.argv[1], random.Random(int(sys.argv[2]))
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message.get("method"), message.get("params") or {}
        if "id" not in message:
            continue
        start = START | {"protocolVersion": params.get("protocolVersion")}
        results = {"initialize": start, "tools/list": TOOLS, "tools/call": RESULT}
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": results.get(method, {})}
        kind = {"tools/call": "call", "tools/list": "list", "initialize": "start"}.get(method)
        if kind == place and params.get("name") != "sound":
            # now and then the whole message, with its id
            changed = change_field(reply, at) if at.random() < 0.1 else {**reply, "result": change_field(reply["result"], at)}
            print(json.dumps(changed), flush=True)
            continue
        print(json.dumps(reply), flush=True)


main()
