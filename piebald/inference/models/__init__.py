"""Regression models and survival curves of all clients' rows, from sums that each client makes of its own rows.

`rows` says what is modelled and takes a client's rows apart, `likelihood` and `sums` make its sums, `fitting` puts the
sums of all clients together, and `clients` reaches them on this machine or at sites.
"""
