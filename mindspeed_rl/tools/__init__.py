"""Tools for agents: what a run's tool file names, the parsers that read calls out of a turn, and environments."""
