"""`nolocod soak`: real daemons for hours under kills, freezes and rate limits that a seed decides; what grew, what broke.

Not here: virtual time (studies.sim).
"""
