"""A folder that survives a kill at any moment: the run store, its tables and tensor files, locks and backups.

What a run is and how it goes on belongs to `runs`; how its tables are shown belongs to `report`.  Nothing here
computes with models or rows.
"""
