"""`nolocod doctor`: what stands between this machine and a run, found out before or beside a node.

`examine` runs the checks: `local` those of this machine, `training` those that need torch, `network` those that need peers
(bootstraps, the clock, the DHT), `reach` how others reach us. `findings` has their codes and texts.

Not here: any check that changes something.

The rule: it looks and changes nothing. The data directory is only read, a running node is asked and not
disturbed, and whatever goes wrong in one check is that check's finding.
"""
