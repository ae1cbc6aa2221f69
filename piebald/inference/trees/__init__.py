"""Gradient-boosted trees over clients whose rows stay where they are.

Here lie the trees themselves and their settings (`forest`), what one client grows with xgboost (`client_rows`), rounds
of boosting, with trees that grow from sums over clients (`rounds`), the clients of such rounds, who are asked through a
runtime (`site_clients`), and the result (`boosted_trees`).  The questions that they answer are in
`inference.queries`.
"""
