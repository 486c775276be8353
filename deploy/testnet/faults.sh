#!/bin/sh
# Injects one fault after the other into the node in its namespaces, and says which. EVERY and LASTS are seconds.
# A fault comes when the node has trained for EVERY seconds.
set -eu
trap 'mend; exit 0' TERM INT

# The process with exactly this argument. (A whole one: else grep, which is a process here too, would find itself.)
process() { grep -lsz "^$1\$" /proc/[0-9]*/cmdline | cut -d/ -f3 | head -n 1; }
tell() { kill "-$1" "$(process "$2")" || say "there is none now"; }
trainer() { tell "$1" nolocod.trainer.worker; }
mend() {
    iptables -F
    trainer CONT
}
trains() { python3 -c 'from urllib.request import urlopen; urlopen("http://127.0.0.1:9464/readyz", timeout=10)' 2>/dev/null; }
peace() { sleep "$1" & wait $!; }
say() { echo "$(date -u +%H:%M:%S) $*"; }
spoilt() {
    iptables -A INPUT "$@"
    iptables -A OUTPUT "$@"
    peace "$LASTS"
    iptables -F
}

while :; do
    for fault in killed frozen slow dead restarted; do
        until trains && peace "$EVERY" && trains; do peace 2; done
        say "$fault"
        case $fault in
            killed) trainer KILL ;;
            frozen) trainer STOP; peace "$LASTS"; trainer CONT ;;
            slow) spoilt -p tcp --dport 4001 -m statistic --mode random --probability 0.1 -j DROP ;;
            dead) spoilt -p tcp --dport 4001 -j DROP ;;
            restarted) tell TERM join ;;
        esac
    done
done
