"""The HTML page of runs: its sections, charts, markup and wording.

Figures for papers and the tables behind all of them lie one folder up.
"""
