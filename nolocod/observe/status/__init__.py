"""What a node tells about itself: its state as JSON, the HTTP pages, and tables for the terminal.

Not here: what Prometheus reads (observe.metrics).
"""
