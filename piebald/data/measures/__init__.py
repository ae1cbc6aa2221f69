"""Measures of unlikeness between clients, in inputs, labels, sizes, speeds and weights, and figures of them.

They read clients and change nothing.
"""
