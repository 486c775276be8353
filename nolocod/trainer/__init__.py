"""The trainer: a child process that holds the replica, and the parent's handle on it."""
