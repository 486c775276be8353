"""Weights for newcomers: served, fetched whole, and fetched in parts (samples) from other donors.

Not here: exchanges between partners (exchange), which donor is believed (node.weights, trainer.compare_donors).
"""
