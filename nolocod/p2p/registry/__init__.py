"""The registry that no one owns: which runs there are, as their owners announced them, copied from node to node.

Not here: what an announcement says and who signed it (run.announcements).
"""
