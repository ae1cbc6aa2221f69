"""What clients are asked for statistics and trees.

Each query bounds what it tells; the answers are put together one folder up.
"""
