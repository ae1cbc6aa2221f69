"""Questions before training, over clients whose rows stay where they are.

Here lie descriptive statistics, generalised linear models, survival analysis and boosted trees, each of rows on
this machine and of rows at the sites of a federation, and the questions (`queries`) that sites answer.  Nothing here
trains a model by a recipe, and nothing below `cli` and `experiments` knows this room.
"""
