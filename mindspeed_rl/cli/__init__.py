"""The commands of the suite; see `main`."""

import _signal  # pyrefly: ignore[missing-import]  (part of the interpreter: it imports nothing)
import sys

# a command that is still importing ends at Ctrl-C as a program in C does, without a traceback; `main` then handles it
if sys.argv[:1] == ["-m"] or (sys.argv and sys.argv[0].endswith("/mindspeed-rl")):
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
