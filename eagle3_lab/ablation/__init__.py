"""Ablations: one file asks a question, its cells are trained and measured, and the results are compared."""
