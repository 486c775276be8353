#!/bin/sh
# The entry of the testnet's nodes.
#
#   node.sh found   the first node: creates the run on its first start, and writes its address where the others read it
#   node.sh join    any other node
set -eu
address=/rendezvous/address
common="--listen 0.0.0.0:4001 --http 0.0.0.0:9464 --http-open-metrics --threads 1 --no-upnp"
case $1 in
    found)
        [ -e "$NOLOCOD_HOME/manifest" ] || nolocod create /testnet/run.toml
        echo "/dns4/bootstrap/tcp/4001/p2p/$(nolocod id)" >"$address.new"
        mv "$address.new" "$address"
        # shellcheck disable=SC2086 # several words
        exec nolocod start $common
        ;;
    join)
        # shellcheck disable=SC2086 # several words
        exec nolocod join --bootstrap "$(cat "$address")" $common
        ;;
esac
