"""Run files from the commands of other projects: one module per project; nothing else in the package imports this folder."""
