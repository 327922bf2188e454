"""Advantages, losses and masks as pure functions over response-aligned [B, R] tensors.

The `config.Objective` of a run selects them and has their numbers; their names are in `catalogue`.
"""
