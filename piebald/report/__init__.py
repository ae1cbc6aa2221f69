"""What is kept of a run and how it is shown: the run folder, tables over many runs, figures, and the page."""
