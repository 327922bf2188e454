"""Memory and time of a run before a device is booked: only shapes and formulas, no torch.

| file | content |
|---|---|
| run_shape.py, engine.py | models of a run on its devices; bytes of a rollout rank |
| shapes.py | elements of a rank, from the same weight tables that build and load the models |
| activations.py | bytes of activations of a micro-batch, and of the vocabulary head |
| devices.py, efficiency.py | memory, operations and links of a device; fractions that a run reaches, fitted in published.py |
| memory.py | bytes of a device, by owner and phase |
| advice.py | changes after which a run fits, nearest first |
| seconds.py, samples.py | seconds by phase; lengths, turns and tools of the samples |
| assumptions.py | every assumed number and its source |
| fit.py | layouts that fit, and the best as a run file |
| prediction.py | prediction for a run before it starts, compared with its measurements |
| promise.py, promise_check.py | what a run will need, take and cost; the check while it goes, with causes |
| published.py | published runs, and the fit of constants.json to them |
| experts.py, step_costs.py | placement of experts; counted costs of a step and their lower bounds |
| text.py | plans as text and JSON |
"""
