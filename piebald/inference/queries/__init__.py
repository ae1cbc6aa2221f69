"""The questions that sites answer for statistics and trees.

Each query bounds what its answers show of a client's rows.  The answers are put together in `inference` and
`inference.trees`.
"""
