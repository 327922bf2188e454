"""Memory and time of a run before a device is booked: shapes and formulas alone, no torch.

| file | what it has |
|---|---|
| shapes.py | elements that a rank holds, from the same weight tables that build and load the models |
| activations.py | what a micro-batch keeps for backward, and the vocabulary head |
| chips.py | memory, operations and links of the device kinds |
| memory.py | bytes of a die, by owner and phase |
| advice.py | changes after which a run fits, nearest first |
"""
