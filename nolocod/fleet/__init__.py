"""Many machines of one owner: which they are, and what is done on them over the system's ssh.

Not here: what is printed (commands/fleet.py), and the node itself, which is that of `nolocod join` on each machine.
"""
