"""A tiny task of videos: the direction in which a square moves, which the order of its frames shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from ports import find_free_port


@pytest.mark.slow
def test_a_tiny_model_learns_the_direction_of_moving_squares(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    program = Path(__file__).with_name("moving_shapes_program.py")
    command = [sys.executable, str(program), str(tmp_path), "240"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(900))
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before < 0.5 and after > 0.8, (before, after)  # a quarter by chance
