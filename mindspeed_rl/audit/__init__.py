"""Audits of a run before a device is claimed: of its data (`data.py`) and of its reward (`reward.py`).

They read what a run would read, through the same functions, and change nothing. Nothing below imports them.
"""
