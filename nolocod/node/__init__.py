"""One node put together: how its parts start, work and stop.

`daemon` puts the parts together, `training_session` is the time from weights to the goal, `weights` says where weights come
from, when a node is too far behind, and which donor is believed, `peers` is the network's side, `schedule` when it pauses,
`supervisor` starts a node again, `host_checks` looks at disk and memory.

Not here: what a part does (the room of its own that it has).
"""
