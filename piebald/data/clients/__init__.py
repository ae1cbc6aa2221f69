"""Clients from data of your own: arrays, tables, folders, torch data sets, and rows that stay at sites.

Each file turns one kind of source into `contracts.Clients`.  Dealing the rows of one data set to clients is the
subject of `partition`.
"""
