"""One node put together: how its parts start, work and stop.

Not here: what a part does (the room of its own that it has).
"""
