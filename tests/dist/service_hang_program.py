"""`mindspeed-rl` on a disk that does not answer while a file `stuck` is in the current folder: writes wait."""

from __future__ import annotations

import time
from pathlib import Path

from mindspeed_rl.cli.main import run
from mindspeed_rl.service import model_folder

_sync = model_folder._sync


def wait_for_disk(path: Path) -> None:
    while Path("stuck").exists():
        time.sleep(0.1)
    _sync(path)


if __name__ == "__main__":
    model_folder._sync = wait_for_disk
    run()
