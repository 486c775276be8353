"""What a node tells about itself: its state as JSON, the HTTP pages, and tables for the terminal.

`report` has the fields, `state` fills them, `server` answers over `http`, `access` says whom, `terminal_table` prints.

Not here: what Prometheus reads (observe.metrics).
"""
