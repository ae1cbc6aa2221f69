"""Real data sets, one a file: where it is published, how its files are read, and who its rows belong to.

A data set knows nothing of clients; `partition` deals its rows.
"""
