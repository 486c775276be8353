"""Exchanges between two partners: offers, answers, bytes both ways, receipts.

Not here: the protocol's states (proto.exchange_states).
"""
