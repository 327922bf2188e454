"""Run files from the commands and files of other projects: one module each; nothing in the package imports this folder."""
