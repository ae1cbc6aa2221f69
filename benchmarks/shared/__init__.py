"""The harness of all benchmarks.

`options` reads command lines, `jobs` carries out runs in processes, `measured` times works in turns and reads memory,
`stored` has what lies outside the code (results of runs, figures of papers, texts of pages), `conditions`, `verdicts`
and `intervals` say how a figure compares, `markdown` and `pictures` write pages, `capture` sees what would be run.

A benchmark's program puts the folder above itself on the path: `sys.path.append(str(Path(__file__).parents[1]))`.
Settings, runs and sentences of one benchmark stay in its folder.
"""
