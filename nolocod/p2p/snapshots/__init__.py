"""Weights for newcomers: served, fetched whole, and fetched in parts from other donors.

Not here: exchanges between partners (exchange), what is compared (trainer.compare_donors).
"""
