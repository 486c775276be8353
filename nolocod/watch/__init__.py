"""An observer of a run: it asks the members who they are, and serves the run's page. It trains nothing and imports no torch.

Not here: what the page says (observe.run).
"""
