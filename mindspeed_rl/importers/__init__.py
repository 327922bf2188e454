"""Run files from the commands and files of other projects: one module per project; nothing in the package imports this folder."""
