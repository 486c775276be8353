"""The trainer: a child process that holds the replica, and the parent's handle on it.

`process` is the handle, `pipe` what goes over the pipe, `boxes` the shared memory, `worker` the child, with the loop of inner
steps. In it, `replica` holds the model and its outer state: `model` builds it, `inner` is one inner step, `capture` is our side
of an exchange, `clipping` bounds what a partner may do, `compare_donors` looks at fetched weights, `checkpoint` writes files.
`source` opens the text: local files by `data` and `windows`, or a stream. `offline`, `estimate` and `measure`
serve commands; `memory` says what is free.

Not here: the outer step's arithmetic (outer.step) and anything of the network.
"""
