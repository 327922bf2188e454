"""Observation of a run: logs, metrics, timings, progress, trackers, report, timeline. Imports no torch."""
