#!/bin/sh
# The entry of one of several nodes that share a volume: slot.sh VOLUME HOME COMMAND…
#
# It takes the first directory of the volume that no other container holds (1, 2, …), so that each node keeps its identity
# and its checkpoints when the containers are made anew, and runs `nolocod COMMAND…` there. HOME becomes a link to it.
set -eu
volume=$1 home=$2
shift 2
slot=1
while :; do
    exec 9>"$volume/slot-$slot"
    flock --nonblock 9 && break # held until the node ends
    slot=$((slot + 1))
done
[ -d "$volume/$slot" ] || mkdir -m 0700 "$volume/$slot"
ln -sfn "$volume/$slot" "$home"
export NOLOCOD_HOME="$home"
if [ "${GPUS:-0}" -gt 0 ]; then
    export CUDA_VISIBLE_DEVICES=$(((slot - 1) % GPUS))
fi
exec nolocod "$@"
