"""Processes and sandboxes for code that is not trusted, with the channel to them: rewards and tools run theirs here."""
