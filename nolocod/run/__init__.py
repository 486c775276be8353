"""What the nodes of one run agree on, and who may be one: manifest, presets, invitations, credentials.

Not here: what is the node's own choice (node.config).
"""
