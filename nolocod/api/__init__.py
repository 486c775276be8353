"""A node in somebody's own training loop: what `import nolocod` gives (docs/your-own-loop.md).

Not here: the daemon, which runs beside the loop as it does beside its own trainer, and what a replica is made of (trainer).
"""
