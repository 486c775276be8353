"""What happens in a node, and who shows it: events, metrics, logs, status.

Not here: anything that decides.
"""
