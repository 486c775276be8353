"""Weights for newcomers: served, fetched, and compared between donors.

Not here: exchanges between partners (exchange).
"""
