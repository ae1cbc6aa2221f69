"""Measures of unlikeness between clients, in inputs, labels, sizes, speeds and weights, and figures of them.

They read clients, or the statistics that sites send, and change nothing.  Scores of models belong to `core.metrics`.
"""
