"""What NoLoCo is (arXiv 2506.10911): the outer step, when it is due, and how weights become bytes.

Each replica i trains its fast weights theta_i with inner steps. phi_i are its slow weights: theta_i as the last outer step
left it. Delta_i = theta_i - phi_i is what it learned since, and delta_i is its outer momentum. For an outer step two
replicas i and j, drawn at random, send each other one tensor,

    s = beta Delta + gamma phi,

and both compute, with n = 2 (a replica without a partner takes the same step alone, with n = 1),

    delta_i <- alpha delta_i + (s_i + s_j) / n - gamma phi_i    (Eq. 2, with the sign of Eq. 32)
    phi_i   <- phi_i + delta_i
    theta_i <- phi_i + what was trained since s_i was made.

So replicas stay near each other (gamma), learn from each other (beta), and no step asks more than two of them.

`step` is this arithmetic, `loop` says when it is done, `sides` what that stands between, `wasted` what partners may cost,
`codec` makes s bytes and reads them.

Not here: who is drawn as partner (p2p/membership/peer_selection), sockets (p2p), models and inner steps (trainer).
"""
