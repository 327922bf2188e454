"""What a run says about itself: logs, metrics, timings, progress, trackers, report, timeline. Imports no torch."""
