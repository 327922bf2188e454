"""Advantages, losses and masks as pure functions over response-aligned [B, R] tensors.

Which of them a run takes, with which numbers, stands in its `config.Objective`; their names stand in `catalogue`.
"""
