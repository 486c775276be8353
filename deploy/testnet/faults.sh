#!/bin/sh
# Spoils the node whose namespaces it shares, one fault after the other, and says what it does. EVERY and LASTS: seconds.
set -eu
trap 'mend; exit 0' TERM INT

# The daemon is the first process of its namespace, which can be asked to end but not killed or stopped from inside it;
# the trainer is its child and can.
trainer() { grep -l -s 'nolocod.trainer.worker' /proc/[0-9]*/cmdline | cut -d/ -f3 | head -n 1; }
tell() { kill "-$1" "$(trainer)" || say "it has no trainer now"; }
mend() { iptables -F; tell CONT; }
peace() { sleep "$1" & wait $!; }
say() { echo "$(date -u +%H:%M:%S) $*"; }
spoilt() {
    iptables -A INPUT "$@"
    iptables -A OUTPUT "$@"
}

while :; do
    for fault in killed frozen slow dead restarted; do
        peace "$EVERY"
        say "$fault"
        case $fault in
            killed) tell KILL ;;
            frozen) tell STOP; peace "$LASTS"; tell CONT ;;
            slow) spoilt ! -i lo -p tcp --dport 4001 -m statistic --mode random --probability 0.1 -j DROP; peace "$LASTS"; iptables -F ;;
            dead) spoilt -p tcp --dport 4001 -j DROP; peace "$LASTS"; iptables -F ;;
            restarted) kill -TERM 1 ;; # and this script with it: its container starts again beside the node's
        esac
    done
done
