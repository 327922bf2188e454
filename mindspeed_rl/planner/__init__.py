"""Memory and time of a run before a device is booked: shapes and formulas alone, no torch.

| file | what it has |
|---|---|
| run_shape.py, engine.py | models of a run and how they lie; bytes of a rollout rank |
| shapes.py | elements that a rank holds, from the same weight tables that build and load the models |
| activations.py | what a micro-batch keeps for backward, and the vocabulary head |
| devices.py | memory, operations and links of the device kinds |
| memory.py, communicators.py | bytes of a device, by owner and phase |
| advice.py | changes after which a run fits, nearest first |
| seconds.py, traffic.py, samples.py, lengths.py | seconds by phase; constants in efficiency.py, fitted in published.py |
| assumptions.py | every number that is taken as given, and where it comes from |
| fit.py, run_file.py | layouts that fit, and the best as a run file |
| prediction.py | what is predicted for a run before it begins, beside what it measured |
| calibration.py | what a run measured, to correct plans of others |
"""
