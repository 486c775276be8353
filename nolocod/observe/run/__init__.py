"""What an observer tells about a whole run: its state as JSON, the run's page, Prometheus metrics.

`report` has the fields, `state` fills them from the members that are known, `pages` answers, `metrics` is what is scraped.

Not here: how members become known (watch), what a node tells about itself (observe.status).
"""
