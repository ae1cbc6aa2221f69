"""Gradient-boosted trees over clients whose rows stay where they are.

Here lie the trees themselves (`forest`), the ways in which they grow (with xgboost at a client, `histograms` from sums
over clients), rounds of boosting (`rounds`) and the clients of such rounds, who are asked through a runtime
(`site_clients`).  The questions that they answer are in `inference.queries`.
"""
