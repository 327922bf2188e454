"""Code that may hang, crash or take too much: processes that are killed with all they started, and sandboxes for programs."""
