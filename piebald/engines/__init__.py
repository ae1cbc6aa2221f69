"""Engines: training and scoring of a stack of clients on one device.

Here are the loops over steps, the passes through a model, and everything that makes them fast.  An engine knows no
recipe and no trainer, and nothing here speaks with a server or another process.
"""
