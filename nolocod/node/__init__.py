"""One node put together: how its parts start, work and stop.

`daemon` puts them together, `training_session` is the time from weights to the goal, `weights` says where weights come from,
when a node is too far behind, and which donor is believed, `peers` serves and stores for the network, `schedule` when it
pauses, `supervisor` tells systemd of it, `autostart` has it started, `host_checks` measures disk and clock. A full disk:
`training_session`, `peers`.

Not here: what a part does (the room of its own that it has).
"""
