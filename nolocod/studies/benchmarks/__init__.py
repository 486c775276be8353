"""What `nolocod bench` measures of this machine: training, and a node that joins.

Not here: what learning costs (studies.lab), exchanges and contests with others (tests/bench).
"""
