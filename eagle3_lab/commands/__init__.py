"""The verbs: glue between parts, each one a function that a notebook can call."""
