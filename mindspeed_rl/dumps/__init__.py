"""Tensors of a run that are written to be compared: the record, the comparison, and causes of a difference."""
