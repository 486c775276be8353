"""What NoLoCo is (arXiv 2506.10911): the outer step, when it is due and with whom, and the codecs of what partners send.

Not here: sockets, models, inner steps.
"""
