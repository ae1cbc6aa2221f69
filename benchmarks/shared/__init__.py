"""What several benchmarks need: blocks and tables of their pages, intervals, and processes that carry out their runs.

A benchmark's program puts the folder above itself on the path: `sys.path.append(str(Path(__file__).parents[1]))`.
Settings, runs and sentences of one benchmark stay in its folder.
"""
