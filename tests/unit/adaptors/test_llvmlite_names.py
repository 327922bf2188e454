"""vLLM's CPU worker may look at everything that is loaded, numba's library included."""

from __future__ import annotations

import subprocess
import sys

_APPLY = "from mindspeed_rl.adaptors import llvmlite_names; llvmlite_names.apply()"
_LOOK = "from llvmlite.binding import ffi; print(hasattr(ffi.lib, '__dict__'), callable(ffi.lib.LLVMPY_InitializeAllTargets))"


def _said(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_the_patch_is_needed() -> None:
    assert _said(_LOOK) == "True True"


def test_the_handle_has_no_dictionary_and_still_has_its_functions() -> None:
    assert _said(f"import llvmlite.binding; {_APPLY}; {_APPLY}; {_LOOK}") == "False True"


def test_a_library_that_is_not_there_is_not_brought() -> None:
    assert _said(f"{_APPLY}; import sys; print('llvmlite' in sys.modules)") == "False"
