"""A server of the API over HTTP with a backend in closed form; prints its port.

usage: bigram_server.py FOLDER
"""

import sys
from pathlib import Path

from bigram_backend import BigramBackend

from mindspeed_rl.service.api_server import ServerSettings, listen, serve
from mindspeed_rl.service.ledger import Limits

OWNERS = {"tml-alice-12345": "alice", "tml-bob-1234567": "bob"}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    limits = Limits(max_sessions=1200, max_sessions_per_key=1000)
    with listen("127.0.0.1", 0) as listening:
        print(listening.getsockname()[1], flush=True)
        sys.exit(serve(ServerSettings(folder, "127.0.0.1", OWNERS, limits), listening, lambda: BigramBackend(folder)))
